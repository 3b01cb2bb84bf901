"""POST /v1/embeddings: OpenAI's format, errors, and cancellation."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from headway import Engine, Scheduler, preset
from headway.engine.input_processor import embedding_params
from headway.engine.loop import EngineLoop
from headway.engine.messages import FromLoop, SampleUpdate, Submit, TokenBatch
from headway.engine.queue_limits import QueueLimits
from headway.remote.codec import encode, from_engine
from headway.request import RequestParams
from tests.server.test_http import error
from tests.support.served import (
    HIDDEN_SIZE,
    MODEL,
    Capitals,
    Server,
    embedding,
    server,
    with_server,
)
from tests.support.waiting import on_loop, until

PATH = "/v1/embeddings"


async def embed(here: Server, **fields: Any) -> dict[str, Any]:
    """The response body of a successful request."""
    response = await here.post(PATH, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def expected(text: str, pooling: str = "mean") -> list[float]:
    vector: list[float] = embedding(list(text.encode()), pooling).tolist()
    return vector


@pytest.mark.parametrize(
    "given", ["hello", list(b"hello"), ["hello"], [list(b"hello")]], ids=["a", "b", "c", "d"]
)
@with_server()
async def test_an_input_is_text_or_tokens_or_a_list_of_either(here: Server, given: Any) -> None:
    body = await embed(here, input=given, model=MODEL)
    data = [{"object": "embedding", "index": 0, "embedding": expected("hello")}]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    assert body == {"object": "list", "data": data, "model": MODEL, "usage": usage}


@with_server()
async def test_vectors_are_in_input_order_in_both_formats(here: Server) -> None:
    texts = ["x" * length + "ab" for length in (90, 1, 40, 7)]
    body = await embed(here, input=texts, encoding_format="float", dimensions=HIDDEN_SIZE)
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    assert [item["embedding"] for item in body["data"]] == [expected(text) for text in texts]
    assert body["usage"]["total_tokens"] == sum(map(len, texts))
    written = await embed(here, input=texts, encoding_format="base64")
    for item, text in zip(written["data"], texts, strict=True):
        decoded = np.frombuffer(b64decode(item["embedding"]), dtype="<f4")
        assert decoded.tolist() == expected(text)
    last = await embed(here, input="abc", pooling="last")
    assert last["data"][0]["embedding"] == expected("abc", "last") != expected("abc")
    await here.settled()


@with_server()
async def test_scheduling_fields_reach_the_engine(here: Server) -> None:
    here.executor.gate.clear()
    fields = {"user": "me", "priority": -3, "cache_salt": "pepper", "deadline": 1000.0}
    calling = asyncio.create_task(embed(here, input="abc", **fields))
    scheduler = here.engine_client.loop.engine.scheduler
    await until(lambda: scheduler.requests)
    (request,) = scheduler.requests.values()
    params = request.params
    assert (params.client, params.priority, params.salt) == ("me", -3, "pepper")
    assert params.deadline is not None and params.deadline > request.arrival + 500
    assert (params.pooling, params.reads_cache, params.max_tokens) == ("mean", False, 1)
    here.executor.gate.set()
    await calling


INPUTS: tuple[Any, ...] = (None, "", [], ["a", ""], [[]], [260], [-1], ["a", 1])
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"input": each}, "input") for each in INPUTS),
    ({}, "input"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": HIDDEN_SIZE - 1}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "cache_salt": "\x00"}, "cache_salt"),
    ({"input": "a", "priority": 2**40}, "priority"),
    ({"input": ["a"] * 4}, "input"),
]


@with_server(max_choices=3)
async def test_a_wrong_field_is_a_400_that_names_it(here: Server) -> None:
    for fields, param in REFUSED:
        found = error(await here.post(PATH, **fields), 400)
        assert found["param"] == param and param in found["message"], fields
    found = error(await here.post(PATH, input="a", dimensions=3), 400)
    assert str(HIDDEN_SIZE) in found["message"]
    assert error(await here.post(PATH, input="a", model="other"), 404)["param"] == "model"
    await here.settled()


@with_server(max_model_len=64)
async def test_an_input_that_is_too_long_is_refused_not_truncated(here: Server) -> None:
    found = error(await here.post(PATH, input=["ok", "x" * 64]), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "input")
    assert "64" in found["message"]
    assert (await embed(here, input="x" * 63))["usage"]["prompt_tokens"] == 63
    await here.settled()


@pytest.mark.parametrize("limit", ["max_waiting", "max_per_client", "max_waiting_tokens"])
@on_loop
async def test_more_inputs_than_the_queue_holds_still_run(limit: str) -> None:
    texts = [f"p{number}" for number in range(100)]
    async with server(QueueLimits(**{limit: 10})) as here:
        here.executor.gate.clear()
        first = asyncio.create_task(embed(here, input="first"))
        await until(lambda: here.engine_client.loop.engine.scheduler.running)  # until its step
        rest = asyncio.create_task(embed(here, input=texts, user="one"))
        await until(lambda: here.engine.num_open > len(texts))
        here.executor.gate.set()  # all are received before the next step
        assert [x["embedding"] for x in (await rest)["data"]] == [expected(text) for text in texts]
        await first
        await here.settled()


@pytest.mark.parametrize("num_inputs", [1, 3])
@with_server(limits=QueueLimits(max_waiting=0))
async def test_inputs_get_a_429_if_none_fits_into_the_queue(here: Server, num_inputs: int) -> None:
    response = await here.post(PATH, input=["abc"] * num_inputs)
    assert error(response, 429)["code"] == "overloaded"
    assert int(response.headers["retry-after"]) >= 1
    await here.settled()


@with_server(limits=QueueLimits(max_waiting=2), max_model_len=8192)
async def test_an_input_that_never_fits_fails_the_others_with_it(here: Server) -> None:
    found = error(await here.post(PATH, input=["a"] * 20 + ["x" * 5000]), 400)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "input")
    await here.settled()


@on_loop
async def test_faults_and_timeouts_have_their_statuses() -> None:
    async with server() as here:
        here.executor.fault = RuntimeError("out of luck")
        found = error(await here.post(PATH, input="abc"), 500)
        assert "out of luck" in found["message"] and found["code"] == "step_failed"
        assert (await embed(here, input="abc"))["data"][0]["embedding"] == expected("abc")
    async with server(request_timeout=0.2) as here:
        here.executor.gate.clear()
        assert error(await here.post(PATH, input="abc"), 504)["code"] == "timeout"
        here.executor.gate.set()
        await here.settled()
        while (response := await here.post(PATH, input="abc")).status_code == 504:
            pass  # the machine was busy for 0.2 s
        assert response.json()["data"][0]["embedding"] == expected("abc")


@with_server(max_model_len=4096)
async def test_a_disconnect_cancels_the_requests(here: Server) -> None:
    here.executor.gate.clear()
    body = json.dumps({"input": ["x" * 2000, "y" * 3000, "z"]}).encode()
    gone, messages = asyncio.Event(), iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nothing may be sent after a disconnect")

    scope = {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(),
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80),
    }  # fmt: skip
    calling = asyncio.create_task(here.app(scope, receive, send))
    await until(lambda: here.engine.num_open == 3 and here.executor.is_blocked)
    gone.set()
    await calling  # although no step ends meanwhile
    assert not here.engine.num_open
    here.executor.gate.set()
    await here.settled()


@with_server(max_model_len=4096)
async def test_completions_run_together_with_embeddings(here: Server) -> None:
    texts = ["hello", "x" * 900, "abc"]
    asked = [here.complete(prompt=text, max_tokens=1000) for text in texts]
    asked += [embed(here, input=texts) for _ in range(3)]
    *said, one, two, three = await asyncio.gather(*asked)
    assert [body["choices"][0]["text"] for body in said] == [text.upper() for text in texts]
    assert one["data"] == two["data"] == three["data"]
    assert [item["embedding"] for item in one["data"]] == [expected(text) for text in texts]


def read_all(loop: EngineLoop) -> None:
    while loop._inbox:  # it reads for a limited time
        loop._read()


def test_a_step_with_an_embedding_sends_other_tokens_in_one_message() -> None:
    sent: list[list[FromLoop]] = []
    config = preset("headway", max_model_len=64, num_blocks=64, block_size=16)
    loop = EngineLoop(Engine(Scheduler(config), Capitals()), sent.append)
    for id in ("a", "b"):
        loop.post([Submit(id, [97, 98, 99], RequestParams(max_tokens=9))])
    read_all(loop)
    loop.engine.step()
    loop.post([Submit("vector", [97, 98], embedding_params("mean"))])
    read_all(loop)
    sent.clear()
    loop.engine.step()
    ((update, tokens),) = (sorted(messages, key=lambda m: type(m).__name__) for messages in sent)
    assert isinstance(tokens, TokenBatch) and sorted(tokens.ids) == ["a", "b"]
    assert isinstance(update, SampleUpdate) and update.id == "vector" and update.end is not None
    assert update.embedding is not None
    (copied,) = from_engine().decode(encode([update]))  # as sent to another process
    assert isinstance(copied, SampleUpdate)
    assert np.array_equal(copied.embedding, update.embedding) and copied.end == update.end
