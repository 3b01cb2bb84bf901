"""Structured output over HTTP: an invalid grammar is a 400 error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch

from headway import LLM, AsyncEngine
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.settings import Settings
from tests.support.served import TOOL_TEMPLATE
from tests.support.served import server as letters_server
from tests.support.waiting import on_loop

pytest.importorskip("llguidance")
torch.set_num_threads(1)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
# Passes every check: the dead end is further away than the checks look.
LATE = 'start: ("a" | "b"){40} NEVER\nNEVER: /[^\\s\\S]/\n'
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, kv_memory="4MiB", threads=1)


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    """The app over a tiny model, without sockets."""
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TOOL_TEMPLATE + "{{ messages[0].content }}"
    engine = AsyncEngine(llm.engine)
    await engine.start()
    context = Context(
        engine=engine, input_processor=llm.input_processor, model_name="tiny", max_model_len=512
    )
    transport = httpx.ASGITransport(app=create_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await engine.close()


def asked(**form: Any) -> dict[str, Any]:
    return {"prompt": "The", "max_tokens": 120, "temperature": 1, "seed": 1, **form}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, asked(structured_outputs={"regex": ".*" * 3000}), "structured_outputs"),
    (COMPLETIONS, asked(structured_outputs={"grammar": 'start: "a" NEVER\nNEVER: /[^\\s\\S]/'}),
     "structured_outputs"),
    (COMPLETIONS, asked(response_format={
        "type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}), "response_format"),
    (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
     "tools"),
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_an_invalid_grammar_is_a_400(llm: LLM, is_stream: bool) -> None:
    async with serving(llm) as client:
        for path, body, param in MISTAKES:
            response = await client.post(path, json={**body, "stream": is_stream})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert llm.engine.fault is None and not llm.engine.has_work


@on_loop
async def test_a_grammar_may_have_thousands_of_choices(llm: LLM) -> None:
    texts = [f"item {number}" for number in range(2010)]
    async with serving(llm) as client:
        body = asked(structured_outputs={"choice": texts})
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["text"] in texts and choice["finish_reason"] == "stop"


@on_loop
async def test_a_grammar_that_fails_during_generation_is_a_400(llm: LLM) -> None:
    body = asked(structured_outputs={"grammar": LATE})
    expected = ("invalid_request_error", "structured_outputs", "grammar_failed")
    async with serving(llm) as client:
        whole = await client.post(COMPLETIONS, json=body)
        assert whole.status_code == 400, whole.text
        error = whole.json()["error"]
        assert (error["type"], error["param"], error["code"]) == expected
        stream = await client.post(COMPLETIONS, json={**body, "stream": True})
        assert stream.status_code == 200  # after the first text
        *chunks, last, done = stream.text.strip().split("\n\n")
        assert done == "data: [DONE]" and chunks
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["param"], error["code"]) == expected
        assert (await client.post(COMPLETIONS, json=asked())).status_code == 200


STRICT = {"type": "json_schema", "json_schema": {"schema": OBJECT, "strict": True}}
LOOSE = {"type": "json_schema", "json_schema": {"schema": OBJECT}}
CLOSED = "disable_additional_properties"


@pytest.mark.parametrize(
    ("is_default", "form", "is_closed"),
    [
        (False, {"response_format": STRICT}, True),
        (False, {"response_format": LOOSE}, False),
        (True, {"response_format": LOOSE}, True),
        (False, {"structured_outputs": {"json": OBJECT}}, False),
        (True, {"structured_outputs": {"json": OBJECT}}, True),
        (False, {"structured_outputs": {"json": OBJECT, CLOSED: True}}, True),
        (True, {"structured_outputs": {"json": OBJECT, CLOSED: False}}, True),
    ],
)
@on_loop
async def test_objects_are_closed_if_requested(
    is_default: bool, form: dict[str, Any], is_closed: bool
) -> None:
    async with letters_server(disable_additional_properties=is_default) as here:
        seen: list[Any] = []
        send = here.engine_client.send
        here.engine_client.send = lambda messages: (seen.extend(messages), send(messages))[1]  # type: ignore[method-assign]
        response = await here.post(COMPLETIONS, prompt="abc", **form)
        assert response.status_code == 200, response.text
        schema = json.loads(seen[0].params.sampling.grammar.text)
        assert (schema.get("additionalProperties") is False) == is_closed


@on_loop
async def test_a_grammar_is_that_of_the_answer_after_the_reasoning() -> None:
    async with letters_server(reasoning_parser="qwen3") as here:
        seen: list[Any] = []
        send = here.engine_client.send
        here.engine_client.send = lambda messages: (seen.extend(messages), send(messages))[1]  # type: ignore[method-assign]
        talk = [*HELLO, {"role": "assistant", "content": "</think>"}]
        for more in ({"messages": HELLO}, {"messages": talk, "continue_final_message": True}):
            response = await here.post(CHAT, **more, structured_outputs={"choice": ["yes"]})
            assert response.status_code == 200, response.text
        sent = [each.params.sampling.grammar for each in seen if hasattr(each, "params")]
        assert [grammar.kind for grammar in sent] == ["after", "choice"]
        assert {grammar.answer.text for grammar in sent} == {'["yes"]'}


@on_loop
async def test_disable_additional_properties_alone_is_refused() -> None:
    async with letters_server() as here:
        form = {"disable_additional_properties": True}
        response = await here.post(COMPLETIONS, prompt="abc", structured_outputs=form)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "structured_outputs"


def test_objects_are_open_by_default() -> None:
    assert not Settings().disable_additional_properties


@pytest.fixture(autouse=True)
def fresh(llm: LLM) -> Iterator[None]:
    """Reset the engine: its loop ends with its AsyncEngine, and the next test reuses it."""
    observers = list(llm.engine.observers)
    yield
    llm.engine.observers[:] = observers


def test_offline_a_failed_grammar_is_an_error_of_its_sample(llm: LLM) -> None:
    from headway import Grammar, SamplingParams

    (result,) = llm.generate("The", SamplingParams(grammar=Grammar.lark(LATE), max_tokens=120))
    assert result.outputs[0].finish_reason == "error"
    assert "cannot be followed" in (result.outputs[0].error or "")
