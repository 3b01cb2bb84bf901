"""The HTTP endpoints: OpenAI's formats, errors, cancellation and access control."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.routing import Route

from headway import VirtualClock
from headway.engine.messages import Cancel, Submit
from headway.engine.queue_limits import QueueLimits
from headway.errors import ConfigError
from headway.server import doctor, lab, live
from headway.server.anthropic.protocol import CountRequest, MessagesRequest
from headway.server.app import create_app
from headway.server.generation.prepared_chat import OutputParser
from headway.server.generation.prompt_runs import Delta
from headway.server.openai import protocol
from headway.server.openai.embeddings import EmbeddingRequest
from headway.server.openai.responses_input import ResponsesRequest
from headway.server.settings import Settings, read_api_keys
from headway.server.toolcalls.choice import tool_use
from headway.server.toolcalls.formats import CallDelta
from tests.support.served import MODEL, TOOL_TEMPLATE, VOCAB_SIZE, Server, server, with_server
from tests.support.waiting import LIMIT, on_loop, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """All events before the [DONE] event, which must be the last."""
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have this status and OpenAI's format."""
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return found


@pytest.mark.parametrize(
    "prompt", ["hello", list(b"hello"), ["hello"], [list(b"hello")]], ids=["a", "b", "c", "d"]
)
@with_server()
async def test_a_prompt_is_text_or_tokens_or_a_list_of_either(here: Server, prompt: Any) -> None:
    body = await here.complete(prompt=prompt, model=MODEL)
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": "HELLO", "logprobs": None, "finish_reason": "stop"}
    assert body["object"] == "text_completion" and body["model"] == MODEL
    cached = {"cached_tokens": 0}
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11,
        "prompt_tokens_details": cached,
    }  # fmt: skip


@with_server()
async def test_choices_are_in_prompt_order_and_usage_counts_them_all(here: Server) -> None:
    body = await here.complete(prompt=["abc", "wxyz"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["ABC", "BC", "WXYZ", "XYZ"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 4 + 3 + 5 + 4


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True, "logprobs": 0}])
@on_loop
async def test_a_streamed_completion_equals_the_complete_one(more: dict[str, Any]) -> None:
    async with server() as here:
        asked = {"prompt": ["hello", "héé €"], "stop": ["LO", "€"], **more}
        whole = await here.complete(**asked)
        options = {"include_usage": True}
        response = await here.post(COMPLETIONS, **asked, stream=True, stream_options=options)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
        del last["usage"]["prompt_tokens_details"], whole["usage"]["prompt_tokens_details"]
        assert last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
        for choice in whole["choices"]:
            mine = [
                c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]
            ]
            assert "".join(each["text"] for each in mine) == choice["text"]
            assert [each["finish_reason"] for each in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"
            for name, column in (choice["logprobs"] or {}).items():
                assert [each for part in mine for each in part["logprobs"][name]] == column


@with_server()
async def test_a_stop_string_ends_text_and_token_count(here: Server) -> None:
    body = await here.complete(prompt="abcdefgh", stop="DE")
    assert body["choices"][0]["text"] == "ABC" and body["usage"]["completion_tokens"] == 5
    asked = {"prompt": "abcdefgh", "stop": ["DE"], "include_stop_str_in_output": True}
    assert (await here.complete(**asked))["choices"][0]["text"] == "ABCDE"
    body = await here.complete(prompt="abcdeabcdefgh", stop="DE", min_tokens=5)
    assert body["choices"][0]["text"] == "ABCDEABC"
    body = await here.complete(prompt="abcdefgh", stop_token_ids=[ord("C")])
    assert body["choices"][0]["text"] == "AB"
    body = await here.complete(prompt="abcdefgh", max_tokens=3)
    assert body["choices"][0]["text"] == "ABC"
    assert body["choices"][0]["finish_reason"] == "length"
    await here.settled()


@with_server()
async def test_a_stop_string_cancels_the_sample_at_once(here: Server) -> None:
    seen = spied(here)
    here.executor.num_free_steps = 5
    asked = asyncio.create_task(here.complete(prompt="x" * 100, max_tokens=100, stop="XXX"))
    await until(lambda: any(isinstance(message, Cancel) for message in seen))
    here.executor.gate.set()
    body = await asked
    assert body["choices"][0]["text"] == "" and body["usage"]["completion_tokens"] == 3
    assert isinstance(seen[-1], Cancel) and seen[-1].sample == 0


@with_server()
async def test_completion_logprobs_are_columns_that_cover_the_text(here: Server) -> None:
    body = await here.complete(prompt="abc", logprobs=2, echo=True)
    (choice,) = body["choices"]
    columns = choice["logprobs"]
    assert "".join(columns["tokens"]) == choice["text"] == "abcABC"
    assert columns["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert columns["token_logprobs"] == [None, *[-0.5] * 5]
    assert columns["top_logprobs"][0] is None
    assert columns["top_logprobs"][3] == {"A": -0.5, "B": -1.5}
    body = await here.complete(prompt="abc", logprobs=0, echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "abc"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("limit", [3, 11, 99])
@with_server()
async def test_an_echo_is_the_prompt_that_the_model_receives(here: Server, limit: int) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1, "truncate_prompt_tokens": limit}
    for prompt in ("hello world", list(b"hello world")):
        (choice,) = (await here.complete(prompt=prompt, **fields))["choices"]
        kept = "hello world"[-limit:]
        assert choice["text"] == kept + kept[0].upper()
        assert choice["logprobs"]["tokens"] == [*choice["text"]]
        assert choice["logprobs"]["text_offset"] == [*range(len(choice["text"]))]


@with_server(bos="<start>")
async def test_an_echo_shows_no_token_that_the_tokenizer_adds(here: Server) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    for prompt, offsets in {"abc": [0, 0, 1, 2], "<start>abc": [0, 0, 7, 8, 9]}.items():
        (choice,) = (await here.complete(prompt=prompt, **fields))["choices"]
        assert choice["text"].startswith(prompt)
        tokens = ["<start>", *["<start>"] * prompt.count("<start>"), "a", "b", "c"]
        assert choice["logprobs"]["tokens"][:-1] == tokens
        assert choice["logprobs"]["text_offset"] == [*offsets, len(prompt)]


@with_server()
async def test_the_echo_of_half_a_character_has_consistent_offsets(here: Server) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1, "truncate_prompt_tokens": 4}
    (choice,) = (await here.complete(prompt="éabc", **fields))["choices"]
    assert choice["text"].startswith("\N{REPLACEMENT CHARACTER}abc")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


@with_server()
async def test_a_repeated_prompt_counts_as_cached(here: Server) -> None:
    prompt = "x" * 64
    await here.complete(prompt=prompt, max_tokens=1)
    body = await here.complete(prompt=prompt, max_tokens=1)
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 48
    assert (await here.post("/reset_prefix_cache")).json() == {"success": True}
    body = await here.complete(prompt=prompt, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@with_server()
async def test_a_chat_uses_the_template_complete_and_streamed(here: Server) -> None:
    parts = [{"type": "text", "text": "hello"}]
    asked = {"messages": [{"role": "user", "content": parts}], "user": "me", "priority": 3}
    body = (await here.post(CHAT, **asked, n=2, max_completion_tokens=6)).json()
    assert body["object"] == "chat.completion" and body["usage"]["prompt_tokens"] == 10
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert texts == ["U:HELL", ":HELLO"]
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    response = await here.post(CHAT, **asked, n=2, max_tokens=6, stream=True)
    chunks = events(response)
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)
    for number, text in enumerate(texts):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == number]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in mine) == text
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "length"


@with_server()
async def test_chat_logprobs_have_one_object_per_visible_token(here: Server) -> None:
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    body = (await here.post(CHAT, **asked)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "U:HELLO;A:"
    assert content[0] == {
        "token": "U", "logprob": -0.5, "bytes": [85],
        "top_logprobs": [
            {"token": "U", "logprob": -0.5, "bytes": [85]},
            {"token": "V", "logprob": -1.5, "bytes": [86]},
        ],
    }  # fmt: skip
    chunks = events(await here.post(CHAT, **asked, stream=True))
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [one for each in streamed if each for one in each["content"]] == content


@with_server()
async def test_every_field_reaches_the_engine(here: Server) -> None:
    seen, clock = spied(here), VirtualClock()
    clock.advance_to(1000)
    here.engine_client.loop.engine.clock = clock
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11}
    asked |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    more = {"logit_bias": {"65": 2}, "min_tokens": 2, "ignore_eos": True, "priority": -4}
    more |= {"user": "me", "deadline": 100, "cache_salt": "s", "stop_token_ids": [5]}
    more |= {"max_completion_tokens": 4, "max_tokens": 3, "bad_words": ["a"], "unknown": {}}
    response = await here.post(CHAT, messages=HELLO, **asked, **more)
    assert response.status_code == 200, response.text
    params = next(message.params for message in seen if isinstance(message, Submit))
    assert all(getattr(params.sampling, name) == value for name, value in asked.items())
    assert params.sampling.logit_bias == {65: 2} and params.sampling.bad_words
    found = (params.min_tokens, params.ignore_eos, params.priority, params.client)
    assert found == (2, True, -4, "me")
    assert (params.salt, params.stop_ids, params.max_tokens) == ("s", {5}, 4)
    assert params.deadline == 1100


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("response_format", {"type": "json_object"}, "json_object"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema"),
        ("structured_outputs", {"regex": "a+"}, "regex"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "choice"),
        ("structured_outputs", {"json": {"type": "integer"}}, "json_schema"),
        ("response_format", {"type": "text"}, None),
    ],
)
@with_server()
async def test_structured_output_reaches_the_engine(
    here: Server, field: str, value: dict[str, Any], kind: str | None
) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": HELLO})):
        seen = spied(here)
        response = await here.post(path, **{field: value}, **asked)
        assert response.status_code == 200, response.text
        grammar = seen[0].params.sampling.grammar
        assert (grammar and grammar.kind) == kind


@with_server(template=TOOL_TEMPLATE)
async def test_tool_calls_are_parsed_complete_and_streamed(here: Server) -> None:
    call = b'<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    here.executor.says = b"Well. " + call + call
    asked = {"messages": HELLO, "tools": [TOOL]}
    (choice,) = (await here.post(CHAT, **asked)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."
    functions = [each["function"] for each in choice["message"]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    here.executor.seconds = 0.05  # a busy server sends several tokens in one event
    chunks = events(await here.post(CHAT, **asked, stream=True))
    here.executor.seconds = 0.0
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    streamed = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert [each["index"] for each in streamed if "id" in each] == [0, 1]
    for index, function in enumerate(functions):
        parts = [each["function"] for each in streamed if each["index"] == index]
        assert parts[0]["name"] == "f" and all("name" not in part for part in parts[1:])
        assert "".join(part["arguments"] for part in parts) == function["arguments"]
        assert len(parts) > 2, "arguments are streamed"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    parser = OutputParser(tool_use(TOOL_TEMPLATE, [TOOL]).parser())  # type: ignore[union-attr]
    pieces = parser.push(Delta(0, (call + call).decode(), finish_reason="stop"))
    numbers = [piece.number for piece in pieces if isinstance(piece, CallDelta)]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1}
    seen = spied(here)
    await here.post(CHAT, **asked, tool_choice="required")
    assert seen[0].params.sampling.grammar is not None
    (cut,) = (await here.post(CHAT, **asked, max_tokens=30)).json()["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("Well.", "length")
    assert not cut["message"].get("tool_calls")


# Values that /v1/completions refuses, by field.
VALUES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, "5"),
    "temperature": (-1, float("nan"), float("inf"), [1]),
    "top_p": (0,),
    "n": (0, True),
    "logprobs": (101,),
    "stop": ([""], ["x"] * 100),
    "stop_token_ids": ([VOCAB_SIZE],),
    "logit_bias": ({"x": 1}, {"1": 101}, {str(VOCAB_SIZE): 1}),
    "seed": (2**70,),
    "deadline": (-1,),
    "priority": (0.5,),
    "cache_salt": ("\n",),
    "suffix": ("b",),
    "best_of": (2,),
    "stream_options": ({"include_usage": True},),
    "response_format": ({"type": "x"}, {"type": "json_schema"}),
    "structured_outputs": ({}, {"regex": "("}, {"choice": []}),
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": "a\ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 300}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 50, "n": 50}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": HELLO, "tools": [TOOL]}, "tools"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    *(
        (CHAT, {"messages": HELLO, "prediction": wrong}, "prediction")
        for wrong in (
            "x",
            {},
            {"type": "content"},
            {"type": "text", "content": "x"},
            {"type": "content", "content": 5},
            {"type": "content", "content": "x" * 300},
            {"type": "content", "content": [{"type": "image_url"}]},
        )
    ),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    *(
        (COMPLETIONS, {"prompt": "a", name: value}, name)
        for name, values in VALUES.items()
        for value in values
    ),
]


@with_server()
async def test_a_wrong_field_is_a_400_that_names_it_with_and_without_stream(here: Server) -> None:
    for path, fields, param in WRONG:
        for more in ({}, {"stream": True}):
            if "stream_options" in fields and more:
                continue
            content = json.dumps({**fields, **more}).encode()
            response = await here.client.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            found = error(response, 400)
            assert found["param"] == param, (fields, found)
            assert param in found["message"] and found["type"] == "invalid_request_error"
    await here.settled()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["auto", "required", "json_object", 10**30, -1, 0, 1, 1e308, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "json", "1"]), inner),
    max_leaves=4,
)  # fmt: skip


def bodies(request: type[BaseModel], start: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Valid bodies in which a few fields have arbitrary values."""
    fields = st.sampled_from(sorted(request.model_fields))
    return st.dictionaries(fields, VALUES, max_size=3).map(lambda wrong: {**start, **wrong})


MESSAGES = {"model": MODEL, "messages": HELLO}
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    COMPLETIONS: (protocol.CompletionRequest, {"prompt": "abc"}),
    CHAT: (protocol.ChatRequest, {"messages": HELLO}),
    "/v1/responses": (ResponsesRequest, {"input": "abc"}),
    "/v1/messages": (MessagesRequest, {**MESSAGES, "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountRequest, MESSAGES),
    "/v1/embeddings": (EmbeddingRequest, {"input": "abc"}),
    "/tokenize": (protocol.TokenizeRequest, {"prompt": "abc"}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [97]}),
}


def test_no_body_causes_a_server_error() -> None:
    asked = st.one_of([st.tuples(st.just(path), bodies(*start)) for path, start in BODIES.items()])

    async def send(here: Server, asked: tuple[str, dict[str, Any]]) -> None:
        content, kind = json.dumps(asked[1]).encode(), {"content-type": "application/json"}
        response = await here.client.post(asked[0], content=content, headers=kind)
        assert response.status_code < 500, response.text
        if asked[0].startswith("/v1/messages"):
            assert response.status_code == 200 or response.json()["type"] == "error"
        elif response.status_code != 200:
            error(response, response.status_code)
        await here.settled()

    with asyncio.Runner() as runner:
        serving = server()
        here = runner.run(serving.__aenter__())

        @settings(max_examples=80, deadline=None)
        @given(asked)
        def check(asked: tuple[str, dict[str, Any]]) -> None:
            runner.run(asyncio.wait_for(send(here, asked), LIMIT))

        try:
            check()
        finally:
            runner.run(serving.__aexit__(None, None, None))


@with_server(vocab_size=ord("~"))
async def test_text_with_a_token_beyond_the_vocabulary_is_refused(here: Server) -> None:
    """On a GPU, such a token would crash the process: it has no row in the embedding."""
    said = [{"role": "user", "content": "a~b"}]
    for path, body in ((COMPLETIONS, {"prompt": "a~b"}), (CHAT, {"messages": said})):
        response = await here.client.post(path, json=body)
        assert "'~' (126) is not one of the 126" in error(response, 400)["message"]
    assert (await here.complete(prompt="ab"))["choices"][0]["text"] == "AB"


@with_server(max_model_len=64)
async def test_an_error_for_a_long_prompt_names_the_limit(here: Server) -> None:
    found = error(await here.post(COMPLETIONS, prompt="x" * 64), 400)
    assert found["code"] == "context_length_exceeded" and "64" in found["message"]
    long = [{"role": "user", "content": "x" * 64}]
    found = error(await here.post(CHAT, messages=long, stream=True), 400)
    assert found["param"] == "messages" and "64" in found["message"]


@on_loop
async def test_an_error_for_a_long_request_advises_only_what_its_client_can_change() -> None:
    for chunk, limit in (("split_any", 256), ("whole", 4000)):
        numbers = {"chunk": chunk, "max_num_batched_tokens": 4000}
        async with server(max_model_len=8192, policies=numbers) as here:
            num_tokens = 5000 if chunk == "split_any" else 4040
            found = error(await here.post(COMPLETIONS, prompt="x", max_tokens=num_tokens), 400)
        message = found["message"]
        assert found["code"] == "context_length_exceeded" and str(limit) in message
        advice = message.rpartition(";")[2]
        assert "max_tokens" in advice and "prompt" in advice
        assert not re.search("num_blocks|batched|chunk", advice), advice


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b'"text"', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"", "application/json", 400),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"prompt": "a"}', "text/plain", 415),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "' + b"a" * 2000 + b'"}', "application/json", 413),
    ],
)
@on_loop
async def test_an_unreadable_body_is_a_client_error(content: bytes, kind: str, status: int) -> None:
    async with server(max_body_bytes=1000 if status == 413 else 1 << 20) as here:
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            headers = {"content-type": kind}
            error(await here.client.post(path, content=content, headers=headers), status)


@on_loop
async def test_a_body_without_content_length_is_limited() -> None:
    async def flood() -> Any:
        for _ in range(100):
            yield b" " * 100

    async with server(max_body_bytes=1000) as here:
        headers = {"content-type": "application/json"}
        response = await here.client.post(COMPLETIONS, content=flood(), headers=headers)
        assert "1000" in error(response, 413)["message"]


@on_loop
async def test_a_body_that_does_not_arrive_times_out() -> None:
    async def drip() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    async with server(body_timeout=0.05) as here:
        headers = {"content-type": "application/json"}
        response = await here.client.post(COMPLETIONS, content=drip(), headers=headers)
        assert "0.05" in error(response, 408)["message"]


@with_server()
async def test_unknown_models_paths_and_methods_are_errors(here: Server) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        found = error(await here.post(path, model="gpt", **fields), 404)
        assert MODEL in found["message"] and found["code"] == "model_not_found"
    error(await here.client.get("/v2"), 404)
    error(await here.client.get(COMPLETIONS), 405)


@pytest.mark.parametrize(
    ("fields", "client"), [({"user": "me"}, "client 'me'"), ({}, "without a client (field `user`)")]
)
@on_loop
async def test_a_full_queue_is_a_429_with_retry_after(fields: dict[str, str], client: str) -> None:
    async with server(limits=QueueLimits(max_per_client=1)) as here:
        here.executor.gate.clear()
        first = asyncio.create_task(here.complete(prompt="abc", **fields))
        await until(lambda: here.executor.is_blocked)
        second = asyncio.create_task(here.post(COMPLETIONS, prompt="abc", stream=True, **fields))
        await until(lambda: here.engine.num_open == 2)
        here.executor.gate.set()
        response = await second
        found = error(response, 429)
        assert found["code"] == "overloaded"
        assert client in found["message"] and "(limit 1)" in found["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert (await first)["choices"][0]["text"] == "ABC"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_failed_step_is_a_500_and_the_next_request_works(path: str, stream: bool) -> None:
    async with server() as here:
        asked = {"prompt": "abc"} if path == COMPLETIONS else {"messages": HELLO}
        here.executor.fault = RuntimeError("out of luck")
        found = error(await here.post(path, **asked, stream=stream), 500)
        assert "out of luck" in found["message"] and found["code"] == "step_failed"
        assert (await here.post(path, **asked)).status_code == 200


@with_server()
async def test_an_error_in_a_stream_is_an_event_followed_by_done(here: Server) -> None:
    sent: list[Any] = []
    here.executor.num_free_steps = 2

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):  # after the first text
            here.executor.fault = RuntimeError("out of luck")
            here.executor.gate.set()

    await call(here, {"prompt": "x" * 100, "max_tokens": 100, "stream": True}, send)
    assert sent[0]["status"] == 200
    body = b"".join(message.get("body", b"") for message in sent[1:]).decode()
    *_, last = body.removesuffix("\n\ndata: [DONE]\n\n").split("\n\n")
    assert "out of luck" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert sent[-1]["more_body"] is False
    await here.settled()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 3}])
@with_server(max_model_len=4096)
async def test_a_disconnect_cancels_the_requests(here: Server, fields: dict[str, Any]) -> None:
    gone = asyncio.Event()
    prompt = ["x" * 2000, "y" * 2000]
    asked = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, **fields}
    calling = asyncio.create_task(call(here, asked, nothing, gone))
    await until(lambda: here.engine_client.loop.engine.scheduler.running)
    here.executor.gate.clear()
    gone.set()
    await calling  # although no step ends meanwhile
    here.executor.gate.set()
    await here.settled()


@with_server(max_model_len=4096, stall_timeout=0.05)
async def test_a_client_that_stops_reading_is_disconnected(here: Server) -> None:
    async def never(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await call(here, {"prompt": "x" * 900, "max_tokens": 3000, "stream": True}, never)
    await here.settled()


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_request_that_times_out_is_a_504_and_is_cancelled(stream: bool) -> None:
    async with server(request_timeout=0.05) as here:
        here.executor.gate.clear()
        found = error(await here.post(COMPLETIONS, prompt="abc", stream=stream), 504)
        assert found["code"] == "timeout"
        here.executor.gate.set()
        await here.settled()


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_the_time_limit_begins_after_the_body(stream: bool) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]

    async def body() -> AsyncIterator[bytes]:
        nonlocal now
        yield b'{"prompt": "abc", '
        now += 1.0
        for _ in range(20):  # a limit that had begun would end the request now
            await asyncio.sleep(0)
        yield json.dumps({"stream": stream}).encode()[1:]

    async with server(request_timeout=0.2) as here:
        headers = {"content-type": "application/json"}
        response = await here.client.post(COMPLETIONS, content=body(), headers=headers)
        assert response.status_code == 200 and '"text":"' in response.text


@with_server()
async def test_a_stopped_engine_is_a_503_on_all_endpoints(here: Server) -> None:
    here.engine_client.loop.stop()
    await until(lambda: here.engine.stop_reason)
    for stream in (False, True):
        error(await here.post(COMPLETIONS, prompt="abc", stream=stream), 503)
        error(await here.post(CHAT, messages=HELLO, stream=stream), 503)
    for path in ("/health", "/load", "/metrics"):
        error(await here.client.get(path), 503)


@pytest.mark.parametrize("stream", [False, True])
@with_server()
async def test_shutdown_is_a_503_for_open_and_new_requests(here: Server, stream: bool) -> None:
    here.executor.gate.clear()
    inside = asyncio.create_task(here.post(COMPLETIONS, prompt="abc", stream=stream))
    await until(lambda: here.engine.num_open)
    here.engine.cancel_all()
    outside = await here.post(COMPLETIONS, prompt="abc", stream=stream)
    assert error(outside, 503)["code"] == "shutting_down" and outside.headers["retry-after"]
    here.executor.gate.set()
    ended = await inside
    if stream and ended.status_code == 200:  # the running step sends its token first
        assert events(ended)[-1]["error"]["code"] == "shutting_down"
    else:
        assert error(ended, 503)["code"] == "shutting_down"


@with_server()
async def test_a_tokenizer_failure_fails_only_its_request(here: Server) -> None:
    tokenizer = here.app.state.context.input_processor.tokenizer
    encode = tokenizer.encode

    def fails(text: str, **options: Any) -> list[int]:
        if "bad" in text:
            raise RuntimeError("no such merge")
        found: list[int] = encode(text, **options)
        return found

    tokenizer.encode = fails
    error(await here.post(COMPLETIONS, prompt="bad"), 500)
    error(await here.post(CHAT, messages=[{"role": "user", "content": "bad"}]), 500)
    error(await here.post("/tokenize", prompt="bad"), 500)
    assert (await here.complete(prompt="good"))["choices"][0]["text"] == "GOOD"


# Information about the server, and access to it.


@with_server(metrics_prefix="vllm")
async def test_models_version_load_metrics_and_health(here: Server) -> None:
    get = here.client.get
    (card,) = (await get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert (await get(f"/v1/models/{MODEL}")).json() == card
    error(await get("/v1/models/other/name"), 404)
    assert "version" in (await get("/version")).json()
    idle = {"server_load": 0, "running": 0, "waiting": 0, "age": 0}
    assert (await get("/load")).json() == idle
    assert (await get("/metrics")).text == "# vllm\n"
    assert (await here.client.head("/metrics")).status_code == 200
    assert (await get("/health")).json() == {"status": "ok"}


@with_server()
async def test_detokenize_inverts_tokenize(here: Server) -> None:
    for text in ("héllo <end> €", "x" * 10_000, ""):  # one of them is tokenized on a thread
        body = (await here.post("/tokenize", prompt=text, return_token_strs=True)).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert (await here.post("/detokenize", tokens=body["tokens"])).json()["prompt"] == text
    body = (await here.post("/tokenize", messages=HELLO)).json()
    assert bytes(body["tokens"]) == b"u:hello;a:"


@with_server(api_keys=("first", "second"))
async def test_all_but_open_paths_need_a_key(here: Server) -> None:
    for path in ("/v1/models", "/metrics", "/load", "/openapi.json"):
        for wrong in ({}, {"authorization": "Bearer firs"}, {"authorization": "Basic first"}):
            assert error(await here.client.get(path, headers=wrong), 401)["message"]
        right = {"authorization": "Bearer second"}
        assert (await here.client.get(path, headers=right)).status_code == 200
    error(await here.post(COMPLETIONS, prompt="abc"), 401)
    assert (await here.client.get("/health")).status_code == 200
    assert "first" not in repr(here.app.state.context.settings)


def test_keys_are_read_from_the_environment_and_a_file(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\ntwo \n")
    assert read_api_keys(path, {"HEADWAY_API_KEY": "zero"}) == ("zero", "one", "two")
    assert read_api_keys(None, {}) == ()
    path.write_text("\n")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=wrong.name):
            read_api_keys(wrong, {})
    for wrong_settings in ({"max_body_bytes": 0}, {"request_timeout": 0.0}, {"api_keys": ("",)}):
        with pytest.raises(ConfigError):
            Settings(**wrong_settings)  # type: ignore[arg-type]


@on_loop
async def test_the_documented_paths_are_served_and_only_the_named_ones_need_no_key() -> None:
    document = (Path(__file__).parents[2] / "docs/server.md").read_text(encoding="utf-8")
    table = document.partition("## Endpoints")[2].partition("## Fields")[0]
    named = re.search(r"All paths except (.*?) then require", document, re.DOTALL)
    assert named is not None
    async with server(api_keys=("key",)) as here:
        context = here.app.state.context
        routers = [module.router(context) for module in (live, lab, doctor)]
        paths = {"/docs", "/openapi.json", *create_app(context, routers).openapi()["paths"]}
        routes = [route for router in routers for route in router.routes]
        paths |= {route.path for route in routes if isinstance(route, Route)}  # also hidden ones
        responses = {path: await here.client.get(path) for path in paths}
    needs_no_key = {path for path in paths if responses[path].status_code != 401}
    page = {"/lab/{name:path}"}  # its files
    assert needs_no_key == set(re.findall(r"`(/\w*)`", named[1])) | page
    data = {"/lab/api/catalog", "/lab/api/live"}
    assert paths - page - data == set(re.findall(r"`(?:GET|POST) (/[^`]*)`", table))


@on_loop
async def test_cors_headers_are_sent_only_to_allowed_origins() -> None:
    asks = {"origin": "http://page", "access-control-request-method": "POST"}
    async with server() as here:
        response = await here.client.get("/version", headers=asks)
        assert "access-control-allow-origin" not in response.headers
    async with server(allowed_origins=("http://page",), api_keys=("k",)) as here:
        response = await here.client.options(COMPLETIONS, headers=asks)
        assert response.headers["access-control-allow-origin"] == "http://page"


@with_server()
async def test_the_schema_lists_all_paths_with_responses_and_errors(here: Server) -> None:
    schema = (await here.client.get("/openapi.json")).json()
    assert {
        COMPLETIONS, CHAT, "/v1/models", "/version", "/load", "/tokenize", "/detokenize",
        "/reset_prefix_cache", "/metrics", "/health",
    } <= set(schema["paths"])  # fmt: skip
    assert "422" not in json.dumps(schema) and "HTTPValidationError" not in json.dumps(schema)
    for path in (COMPLETIONS, CHAT):
        answers = schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "429", "503"} <= set(answers)
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}


def spied(here: Server) -> list[Any]:
    """A list that collects all messages sent to the engine."""
    seen: list[Any] = []
    send = here.engine_client.send

    def spy(messages: list[Any]) -> None:
        seen.extend(messages)
        send(messages)

    here.engine_client.send = spy  # type: ignore[method-assign]
    return seen


@with_server()
async def test_an_error_of_the_system_is_no_disconnect(here: Server) -> None:
    def submitted(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    here.engine.submitted = submitted  # type: ignore[method-assign]
    for stream in (False, True):
        response = await here.post(COMPLETIONS, model=MODEL, prompt="a", stream=stream)
        assert response.status_code == 500 and response.json()["error"]["message"]


@with_server()
async def test_an_error_while_sending_is_a_disconnect_at_any_message(here: Server) -> None:
    for number in range(4):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent, number: int = number) -> None:
            sent.append(message)
            if len(sent) > number:
                raise OSError(32, "Broken pipe")

        await call(here, {"model": MODEL, "prompt": "hello", "stream": True}, send)
        assert len(sent) == number + 1
        await here.settled()


async def nothing(message: Any) -> None:
    await asyncio.sleep(0)


async def call(
    here: Server, fields: dict[str, Any], send: Any, gone: asyncio.Event | None = None
) -> None:
    """Call the app like an ASGI server does; the client disconnects when `stop_reason` is set."""
    body = json.dumps(fields).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
        "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "root_path": "", "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await here.app(scope, receive, send)
