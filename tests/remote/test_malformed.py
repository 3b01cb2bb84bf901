"""Frames of a process that has the key and sends anything: only its own connection may end."""

from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.engine import messages, queries
from headway.engine.engine import Engine
from headway.engine.thread_client import ThreadClient
from headway.events import ended_by
from headway.grammar.grammar import Grammar
from headway.remote import auth, codec
from headway.remote.client import SocketClient
from headway.remote.service import EngineService
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.remote.test_sockets import (
    KEY,
    MODEL,
    Received,
    connect,
    patient,
    replica,
    submit,
)
from tests.support.waiting import on_loop, until

__all__ = ["patient"]
FRAMES, WORLDS = 500, 4
FULL = messages.Submit(
    "full", [72, 105], traceparent="00-trace", age=0.5, deadline_in=1e6,
    params=RequestParams(
        max_tokens=4, max_total_tokens=90, min_tokens=1, eos_ids=frozenset({257}),
        stop_ids=frozenset({3}), n=2, deadline=1e6, salt="a", client="c", ignore_eos=True,
        prediction=array("i", [72, 105]),
        sampling=Sampling(
            temperature=0.5, logit_bias={3: -1.5}, seed=7, logprobs=2, bad_words=((1, 2),),
            allowed_tokens=frozenset({1, 2, 3}), grammar=Grammar.json_object(),
        ),
    ),
)  # fmt: skip
GOING_ON = messages.Submit("moved", [72, 105], FULL.params, outputs=((4, 5), None))
VALID: list[Any] = [
    FULL, GOING_ON, submit("plain"), messages.Cancel("plain"), messages.Cancel("full", 1),
    queries.GetTime(number=1), queries.ResetPrefixCache(number=2), queries.ReportCache(number=3),
    queries.GetMetrics(prefix="x", number=4), queries.GetRecording(viewer=1, number=5),
    queries.GetTrialLines(first=0, number=6), queries.AskEach(queries.GetTime(), number=7),
    queries.FindRequest("plain", number=8), messages.Resume(submit("plain"), "plain"),
    messages.Resume(FULL, "full", "one"),
]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 3, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.5, -0.5,
    math.nan, math.inf, -math.inf, 1e308, "", "x", "plain", "Submit", "\x00\u2028", "9" * 5000, b"",
    b"\xff" * 7, b"\xff" * 8, [], [[]], [1, -1], [1 << 40], ["x"], {}, {"x": 1}, {1: math.nan},
    {"kind": "regex", "text": "("}, {"num_output": -5, "filler": 1 << 40, "end": -1},
    msgspec.msgpack.Ext(5, b"x"),
]  # fmt: skip


def plain(value: Any) -> Any:
    return msgspec.msgpack.decode(codec.encode(value))


def changed(value: Any, choose: random.Random) -> Any:
    """The value with one part of it replaced, removed or repeated."""
    if not isinstance(value, list | dict) or not value or choose.random() < 0.1:
        return choose.choice(ODD)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, what = choose.choice(keys), choose.random()
    made = value.copy()
    if what < 0.8:
        made[key] = changed(value[key], choose)
    elif what < 0.9:
        del made[key]
    elif isinstance(made, list):
        made.insert(key, choose.choice(ODD))
    else:
        made["more"] = choose.choice(ODD)
    return made


def damaged(frame: bytes, choose: random.Random) -> bytes:
    """A frame with wrong bytes, a wrong length, or without its end."""
    at = choose.randrange(len(frame))
    body = choose.randbytes(choose.randrange(1, 40))
    return choose.choice([
        frame[:at] + bytes([choose.randrange(256)]) + frame[at + 1 :],
        frame[:at],
        codec.LENGTH.pack(choose.choice([0, codec.MAX_FRAME + 1, (1 << 32) - 1])) + frame,
        codec.LENGTH.pack(len(body)) + body,
        codec.LENGTH.pack(5) + choose.choice([b"\xdd", b"\xdf", b"\xc6"]) + b"\xff" * 4,
        codec.frame(None) + frame,
        codec.LENGTH.pack(3000) + b"\x91" * 3000,
    ])  # fmt: skip


def malformed(choose: random.Random) -> bytes:
    if choose.random() < 0.25:
        return damaged(codec.frame([choose.choice(VALID)]), choose)
    batch = [plain(each) for each in choose.choices(VALID, k=choose.randint(1, 4))]
    for _ in range(choose.choice([1, 1, 2])):
        batch = changed(batch, choose)
    return codec.frame(batch)


class Peer:
    """A client that has the key; connects again when its connection has ended."""

    def __init__(self, address: auth.Address) -> None:
        self.address = address
        self.client: SocketClient | None = None
        self.received = Received()

    async def write(self, frame: bytes) -> None:
        if self.received.of(messages.EngineStopped):
            await self.close()
        if self.client is None:
            self.client, self.received = await connect(self.address, b"")
        assert self.client._writer is not None
        self.client._writer.write(frame)

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        self.client, self.received = None, Received()


def engine_of(server: EngineService) -> Engine:
    assert isinstance(server._client, ThreadClient)
    return server._client.loop.engine


async def give_malformed(
    server: EngineService, address: auth.Address, choose: random.Random, num: int
) -> None:
    """Send malformed frames while the requests of another client go on."""
    engine = engine_of(server)
    peer, (good, received) = Peer(address), await connect(address, b"")
    for number in range(num):
        text = f"text number {number}".encode()
        good.send([submit(str(number), text)])
        await peer.write(malformed(choose))
        if choose.random() < 0.2:  # a frame without its end would hide those that follow
            await peer.close()
        if number % 8 == 0:
            await until(lambda number=number: received.has_ended(str(number)))  # type: ignore[misc]
    await until(lambda: all(received.has_ended(str(number)) for number in range(num)))
    for number in range(num):
        assert received.tokens(str(number)) == f"text number {number}".upper().encode()
    await peer.close()
    await peer.write(codec.frame([messages.Cancel("0")])[:-1])  # in every world, one is cut off
    await peer.close()
    await until(lambda: len(server.clients) == 1 and server.num_open == 0)
    await until(lambda: not engine.has_work)
    assert server.stopped is None and engine.fault is None
    assert not received.of(messages.EngineStopped) and not received.of(messages.Refusal)
    await good.close()


@pytest.mark.parametrize("world", range(WORLDS))
def test_malformed_frames_end_no_engine_and_no_request_of_another_client(
    world: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @on_loop
    async def run() -> None:
        async with replica(tmp_path / "engine") as (server, address, _):
            await give_malformed(server, address, random.Random(world), FRAMES)
        lost = [text for text in caplog.messages if "the connection to a client was lost" in text]
        assert len(lost) > FRAMES / 20
        assert any("cannot be decoded" in t for t in lost) and any("limit" in t for t in lost)
        assert any("within a frame" in text for text in lost)
        assert not [r for r in caplog.records if r.exc_info], "an error that nothing expected"

    run()


@on_loop
async def test_a_request_that_is_submitted_twice_ends_with_its_connection() -> None:
    async with replica() as (server, address, executor):
        executor.gate.clear()
        engine = engine_of(server)
        ended: dict[str, str | None] = {}
        engine.observers.append(
            lambda event: ended.update({r.id: r.finish_reason for r in ended_by(event)})
        )
        client, received = await connect(address)
        client.send([submit("r")])
        await until(lambda: engine.scheduler.requests)
        client.send([submit("r")])
        await until(lambda: received.of(messages.EngineStopped))
        await until(lambda: not server.clients)
        await client.close()
        executor.gate.set()
        await until(lambda: ended and not engine.has_work)  # observers hear of it afterwards
        assert list(ended.values()) == ["abort"]


@on_loop
async def test_messages_that_contradict_each_other_end_only_their_connection() -> None:
    async with replica() as (server, address, _):
        received = Received()

        def receive(batch: list[messages.FromLoop]) -> None:
            for each in batch:
                if isinstance(each, messages.TokenBatch):
                    dict(zip(each.ids, each.tokens, strict=True))
            received.messages.extend(batch)

        client = SocketClient(address, MODEL, KEY)
        await client.open(receive)
        (there,) = await until(lambda: [*server.clients.values()])
        there.send([messages.TokenBatch(["r"], [])])
        (lost,) = await until(lambda: received.of(messages.EngineStopped))
        assert isinstance(lost, messages.EngineStopped)
        assert "replica one" in lost.reason and "ValueError" in lost.reason
        await client.close()
