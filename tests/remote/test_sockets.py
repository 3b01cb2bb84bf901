"""A replica behind TCP: requests, refusals of other fleets, drains and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from headway.fleet.transport import sockets, wire
from headway.fleet.transport.sockets import Identity, ReplicaServer, SocketLink

from headway import Engine, Scheduler, preset
from headway.engine.async_engine import ThreadClient
from headway.engine.messages import (
    Cancel,
    FromLoop,
    Query,
    QueryResult,
    SampleUpdate,
    Submit,
    TokenBatch,
)
from headway.errors import ExecutorError
from headway.request import RequestParams
from tests.support.served import Capitals, on_loop
from tests.support.waiting import LIMIT, until

KEY = b"k" * 32
MODEL = Identity(name="one", model="letters (float32 on cpu)", block_size=16)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", LIMIT)
    monkeypatch.setattr(sockets, "DRAIN_SECONDS", 10 * LIMIT)  # longer than a test waits for it


class Received:
    """What a gateway gets from one link."""

    def __init__(self) -> None:
        self.messages: list[FromLoop] = []
        self.lost: list[str] = []
        self.drained: list[str] = []

    def tokens(self, id: str) -> bytes:
        found: list[int] = []
        for message in self.messages:
            if isinstance(message, TokenBatch) and id in message.ids:
                found += message.tokens[message.ids.index(id)]
            elif isinstance(message, SampleUpdate) and message.id == id:
                found += message.tokens
        return bytes(token for token in found if token < 256)

    def has_ended(self, id: str) -> bool:
        ends = [m for m in self.messages if isinstance(m, SampleUpdate) and m.id == id]
        return any(m.end is not None for m in ends)


@asynccontextmanager
async def replica() -> AsyncIterator[tuple[ReplicaServer, Capitals]]:
    config = preset("headway", max_model_len=256, num_blocks=256, block_size=16)
    executor = Capitals()
    client = ThreadClient(Engine(Scheduler(config), executor))
    client.loop.concurrent_queries["odd"] = lambda _: 2j
    server = ReplicaServer(client, MODEL, KEY)
    await server.start("127.0.0.1")
    yield server, executor
    executor.gate.set()
    await server.close()


async def link_to(
    server: ReplicaServer, key: bytes = KEY, model: Identity = MODEL
) -> tuple[SocketLink, Received]:
    received = Received()
    link = SocketLink(model, server.address, key, received.drained.append)
    await link.open(received.messages.extend, received.lost.append)
    return link, received


def submit(id: str, text: bytes = b"hello") -> Submit:
    return Submit(id, list(text), RequestParams(max_tokens=len(text), ignore_eos=True))


@on_loop
async def test_two_gateways_share_a_replica_and_may_use_the_same_ids() -> None:
    async with replica() as (server, _):
        one, first = await link_to(server)
        two, second = await link_to(server)
        one.send([submit("r", b"hello")])
        two.send([submit("r", b"other")])
        await until(lambda: first.has_ended("r"))
        await until(lambda: second.has_ended("r"))
        assert (first.tokens("r"), second.tokens("r")) == (b"HELLO", b"OTHER")
        assert server.num_open == 0
        await one.close()
        await two.close()


@on_loop
async def test_a_closed_link_cancels_its_requests_and_is_not_reported_as_lost() -> None:
    async with replica() as (server, executor):
        executor.gate.clear()
        link, received = await link_to(server)
        link.send([submit("r")])
        await until(lambda: server.num_open == 1)
        await link.close()
        executor.gate.set()
        await until(lambda: not server.service.workers)
        link.send([Cancel("r")])  # does nothing
        assert received.lost == [] and not link.is_open


@on_loop
async def test_an_answer_that_cannot_be_sent_becomes_an_error() -> None:
    async with replica() as (server, _):
        link, received = await link_to(server)
        link.send([Query(1, "odd"), Query(2, "now")])
        await until(lambda: len(received.messages) >= 2)
        odd, now = sorted(m for m in received.messages if isinstance(m, QueryResult))
        assert odd.error is not None and "complex" in odd.error
        assert isinstance(now.value, float)
        await link.close()


@on_loop
async def test_a_link_reports_the_end_of_its_replica_once() -> None:
    async with replica() as (server, _):
        link, received = await link_to(server)
        for worker in server.service.workers.values():
            worker.writer.transport.abort()
        await until(lambda: received.lost)
        assert len(received.lost) == 1 and not link.is_open
        await link.close()
        assert len(received.lost) == 1


@on_loop
async def test_a_drain_asks_the_gateways_and_waits_until_the_requests_are_gone() -> None:
    async with replica() as (server, executor):
        executor.gate.clear()
        link, received = await link_to(server)
        link.send([submit("r")])
        await until(lambda: server.num_open == 1)
        draining = asyncio.create_task(server.drain("scaled down"))
        await until(lambda: received.drained == ["one"])
        assert not draining.done()
        await link.close()
        executor.gate.set()
        await asyncio.wait_for(draining, LIMIT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": b"other"}, ()),
        ({"model": Identity(name="one", model="qwen", block_size=16)}, ("letters", "qwen")),
        ({"model": Identity(name="one", model=MODEL.model, block_size=32)}, ("16", "32")),
    ],
)
def test_a_replica_of_another_fleet_is_refused(
    change: dict[str, Any], words: tuple[str, ...]
) -> None:
    @on_loop
    async def run() -> None:
        async with replica() as (server, _):
            with pytest.raises(ExecutorError) as raised:
                await link_to(server, **change)
            assert all(word in str(raised.value) for word in ("replica one", *words))
            assert server.service.workers == {}

    run()


def test_another_version_or_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_loop
    async def run(word: str) -> None:
        async with replica() as (server, _):
            with pytest.raises(ExecutorError, match=word):
                await link_to(server)

    hello = wire.Hello("one", "0.0.1", MODEL.model, 16, b"n")
    for start, word in (
        (wire.START.pack(wire.MAGIC, 1), "version '0.0.1'"),
        (wire.START.pack(wire.MAGIC, 99), "protocol 99"),
        (wire.START.pack(b"HTTP/1.1", 1), "not part of a Headway fleet"),
    ):
        said = start + wire.frame(hello)
        monkeypatch.setattr(sockets, "_hello", lambda identity, nonce, said=said: said)
        run(word)


@on_loop
async def test_a_client_without_the_key_reaches_nothing() -> None:
    async with replica() as (server, _):
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, wire.frame([submit("r")])):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(sent)
            writer.write_eof()
            answer = await reader.read()
            assert answer.startswith(wire.MAGIC) and len(answer) < 200  # only the greeting
            writer.close()
        assert server.service.workers == {} and server.num_open == 0
