"""A replica behind TCP: requests, refusals of other fleets, drains and lost connections."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway import Engine, Scheduler, preset
from headway.engine import messages
from headway.engine.queries import GetTime
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError, ExecutorError
from headway.remote import auth, codec, service
from headway.remote.auth import Identity
from headway.remote.client import SocketClient
from headway.remote.service import EngineService
from headway.request import RequestParams
from tests.support.served import VOCAB_SIZE, Capitals
from tests.support.waiting import LIMIT, on_loop, until

KEY = b"k" * 32
MODEL = Identity(name="one", model="letters (float32 on cpu)", block_size=16)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", LIMIT)
    monkeypatch.setattr(service, "DRAIN_SECONDS", 10 * LIMIT)  # longer than a test waits for it


class GetOdd(messages.Query[complex]):
    """Its answer cannot be sent."""


class Received:
    """What one client gets."""

    def __init__(self) -> None:
        self.messages: list[messages.FromLoop] = []
        self._tokens, self._ended = defaultdict[str, list[int]](list), set[str]()
        self._num_read = 0

    def of(self, kind: type[messages.FromLoop]) -> list[messages.FromLoop]:
        return [message for message in self.messages if isinstance(message, kind)]

    def tokens(self, id: str) -> bytes:
        self._read()
        return bytes(token for token in self._tokens[id] if token < 256)

    def has_ended(self, id: str) -> bool:
        self._read()
        return id in self._ended

    def _read(self) -> None:
        """Sort the messages that are new by their requests."""
        for message in self.messages[self._num_read :]:
            if isinstance(message, messages.TokenBatch):
                for id, tokens in zip(message.ids, message.tokens, strict=False):
                    self._tokens[id] += tokens
            elif isinstance(message, messages.SampleUpdate):
                self._tokens[message.id] += message.tokens
                if message.end is not None:
                    self._ended.add(message.id)
        self._num_read = len(self.messages)


@asynccontextmanager
async def replica(
    at: auth.Address = ("127.0.0.1", 0),
) -> AsyncIterator[tuple[EngineService, auth.Address, Capitals]]:
    config = preset("headway", max_model_len=256, num_blocks=256, block_size=16)
    executor = Capitals()
    client = ThreadClient(Engine(Scheduler(config), executor, vocab_size=VOCAB_SIZE))
    client.loop.handle(GetOdd, lambda _: 2j)
    server = EngineService(client, MODEL, b"" if isinstance(at, Path) else KEY)
    yield server, await server.start(at), executor
    executor.gate.set()
    await server.close()


async def connect(
    address: auth.Address, key: bytes = KEY, model: Identity = MODEL
) -> tuple[SocketClient, Received]:
    client, received = SocketClient(address, model, key), Received()
    await client.open(received.messages.extend)
    return client, received


def submit(id: str, text: bytes = b"hello") -> messages.Submit:
    return messages.Submit(id, list(text), RequestParams(max_tokens=len(text), ignore_eos=True))


@on_loop
async def test_two_gateways_share_a_replica_and_may_use_the_same_ids() -> None:
    async with replica() as (server, address, _):
        one, first = await connect(address)
        two, second = await connect(address)
        one.send([submit("r", b"hello")])
        two.send([submit("r", b"other")])
        await until(lambda: first.has_ended("r"))
        await until(lambda: second.has_ended("r"))
        assert (first.tokens("r"), second.tokens("r")) == (b"HELLO", b"OTHER")
        assert server.num_open == 0
        await one.close()
        await two.close()


@on_loop
async def test_a_closed_client_cancels_its_requests() -> None:
    async with replica() as (server, address, executor):
        executor.gate.clear()
        client, received = await connect(address)
        client.send([submit("r")])
        await until(lambda: server.num_open == 1)
        await client.close()
        executor.gate.set()
        await until(lambda: not server.clients)
        client.send([messages.Cancel("r")])  # does nothing
        assert isinstance(received.messages[-1], messages.EngineStopped)


@on_loop
async def test_an_answer_that_cannot_be_sent_becomes_an_error() -> None:
    async with replica() as (_, address, _):
        client, received = await connect(address)
        client.send([GetOdd(number=1), GetTime(number=2)])
        await until(lambda: len(received.messages) >= 2)
        odd, now = sorted(received.of(messages.QueryResult), key=lambda result: result.number)
        assert odd.error is not None and "complex" in odd.error
        assert isinstance(now.value, float)
        await client.close()


@on_loop
async def test_a_client_reports_the_end_of_its_replica_once() -> None:
    async with replica() as (server, address, _):
        client, received = await connect(address)
        for connection in server.clients.values():
            connection.writer.transport.abort()
        (lost,) = await until(lambda: received.of(messages.EngineStopped))
        assert "replica one" in lost.reason
        await client.close()
        assert received.messages[-1] is lost and len(received.of(messages.EngineStopped)) == 1


@on_loop
async def test_a_frame_that_is_invalid_ends_only_its_connection() -> None:
    async with replica() as (_, address, _):
        bad, ended = await connect(address)
        good, received = await connect(address)
        assert bad._writer is not None
        bad._writer.write(codec.frame(["odd"]))
        await until(lambda: ended.of(messages.EngineStopped))
        good.send([submit("r")])
        await until(lambda: received.has_ended("r"))
        await good.close()


@on_loop
async def test_a_request_of_wrong_types_is_refused_alone() -> None:
    async with replica() as (server, address, _):
        client, received = await connect(address)
        wrong: Any = RequestParams(max_tokens="five")  # type: ignore[arg-type]
        client.send([submit("a"), messages.Submit("b", list(b"hello"), wrong), submit("c")])
        await until(lambda: received.has_ended("a") and received.has_ended("c"))
        (refusal,) = received.of(messages.Refusal)
        assert isinstance(refusal, messages.Refusal) and not received.of(messages.EngineStopped)
        assert (refusal.id, refusal.kind) == ("b", "InvalidRequest")
        assert "'b'" in refusal.message and "max_tokens" in refusal.message
        assert received.tokens("c") == b"HELLO" and server.num_open == 0
        await client.close()


@on_loop
async def test_a_drain_asks_the_gateways_and_waits_until_the_requests_are_gone() -> None:
    async with replica() as (server, address, executor):
        executor.gate.clear()
        client, received = await connect(address)
        client.send([submit("r")])
        await until(lambda: server.num_open == 1)
        draining = asyncio.create_task(server.drain("scaled down"))
        await until(lambda: received.of(messages.Drain) == [messages.Drain("scaled down")])
        assert not draining.done()
        await client.close()
        executor.gate.set()
        await asyncio.wait_for(draining, LIMIT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": b"other"}, ("key of this fleet", "another")),
        ({"model": Identity(name="one", model="qwen", block_size=16)}, ("letters", "qwen")),
        ({"model": Identity(name="one", model=MODEL.model, block_size=32)}, ("16", "32")),
        ({"model": Identity(name="two", model=MODEL.model, block_size=16)}, ("'one'", "'two'")),
    ],
)
def test_a_replica_of_another_fleet_is_refused(
    change: dict[str, Any], words: tuple[str, ...]
) -> None:
    @on_loop
    async def run() -> None:
        async with replica() as (server, address, _):
            with pytest.raises(ExecutorError) as raised:
                await connect(address, **change)
            name = change.get("model", MODEL).name
            assert all(word in str(raised.value) for word in (f"replica {name}", *words))
            assert server.clients == {}

    run()


@on_loop
async def test_a_client_without_the_key_reaches_nothing() -> None:
    async with replica() as (server, address, _):
        for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, codec.frame([submit("r")])):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            writer.write_eof()
            answer = await reader.read()
            assert answer.startswith(codec.MAGIC) and len(answer) < 200  # only the greeting
            writer.close()
        assert server.clients == {} and server.num_open == 0


def test_tcp_needs_a_key() -> None:
    @on_loop
    async def run() -> None:
        server = EngineService(ThreadClient(Engine(Scheduler(preset("headway")), Capitals())))
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1 needs a key"):
            await server.start(("127.0.0.1", 0))

    run()


@on_loop
async def test_no_gateway_can_connect_to_an_engine_that_has_stopped() -> None:
    """It would give it requests until it reads that the engine has stopped."""
    async with replica() as (server, address, _):
        client, received = await connect(address)
        assert isinstance(server._client, ThreadClient)
        server._client.loop.fail("a rank was killed")
        (stopped,) = await until(lambda: received.of(messages.EngineStopped))
        assert stopped == messages.EngineStopped("a rank was killed")
        with pytest.raises(ExecutorError, match="cannot connect"):
            await connect(address)
        await client.close()


@on_loop
async def test_an_attempt_that_is_cancelled_leaves_no_connection() -> None:
    """A writer that is not closed is closed by its destructor, which may be after the loop."""
    connected, closed = asyncio.Event(), asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        while await reader.read(1 << 16):
            pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    client = SocketClient(server.sockets[0].getsockname(), MODEL, KEY)
    opening = asyncio.create_task(client.open(lambda _: None))
    await connected.wait()
    opening.cancel()
    await closed.wait()
    server.close()
