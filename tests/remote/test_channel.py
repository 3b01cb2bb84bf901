"""A connection of a fleet: only processes with its key can read it, relay it or take part."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headway.engine import messages
from headway.errors import ExecutorError
from headway.remote import auth, codec, tls
from headway.remote.auth import Identity
from headway.remote.client import SocketClient
from tests.remote.test_sockets import KEY, MODEL, connect, patient, replica, submit
from tests.support.waiting import LIMIT, on_loop, until

__all__ = ["patient"]
ROOT = Path(__file__).parents[2]
TWO = Identity(name="two", model=MODEL.model, block_size=MODEL.block_size)
SECRET = bytes(range(65, 91)) * 4  # a prompt
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Change = Callable[[bytes], bytes]


@asynccontextmanager
async def listening(
    serve: Callable[[Reader, Writer], Any],
) -> AsyncIterator[tuple[str, int]]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


class Relay:
    """A process without the key: it passes bytes on, keeps them, and may change some."""

    def __init__(self, address: auth.Address, change: Change = lambda data: data) -> None:
        self.address, self.change, self.seen = address, change, bytearray()

    async def serve(self, reader: Reader, writer: Writer) -> None:
        assert isinstance(self.address, tuple)
        there, onward = await asyncio.open_connection(*self.address)
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, onward), self._pass(there, writer))

    async def _pass(self, reader: Reader, writer: Writer) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(self.change(data))
        writer.close()


def certificate(key: bytes) -> bytes:
    """The certificate of a server, as a client of this process gets it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.tls_context(key, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_client, to_server)
    context = tls.tls_context(key, ssl.PROTOCOL_TLS_SERVER)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 3:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True) or b""


def test_two_processes_make_the_same_certificate() -> None:
    code = f"from tests.remote.test_channel import certificate; print(certificate({KEY!r}).hex())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT)
    assert shown.stdout.decode().strip() == certificate(KEY).hex() != certificate(b"other").hex()


@on_loop
async def test_a_process_at_the_address_of_a_lost_replica_cannot_relay_to_another() -> None:
    async with replica() as (server, address, _):
        relay = Relay(address)
        async with listening(relay.serve) as taken:
            for _ in range(4):
                client = SocketClient(taken, TWO, KEY)
                with pytest.raises(ExecutorError, match="replica two .* name 'one'"):
                    await client.open(lambda messages: None)
                client.send([submit("r", SECRET)])  # does nothing
        await until(lambda: not server.clients)
        assert relay.seen and server.num_open == 0


@on_loop
async def test_a_relay_to_the_right_replica_can_read_nothing() -> None:
    async with replica() as (_, address, _):
        relay = Relay(address)
        async with listening(relay.serve) as taken:
            client, received = await connect(taken)
            client.send([submit("r", SECRET)])
            await until(lambda: received.has_ended("r"))
            assert received.tokens("r") == SECRET
            await client.close()
        prompt = codec.encode([submit("r", SECRET)])
        for shown in (prompt, SECRET, b"letters", b"Submit", b"SampleUpdate", KEY):
            assert shown not in relay.seen


@on_loop
async def test_a_relay_that_changes_a_byte_ends_the_connection() -> None:
    def change(data: bytes) -> bytes:
        if not is_changing:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    is_changing = False
    async with replica() as (server, address, _):
        relay = Relay(address, change)
        async with listening(relay.serve) as taken:
            client, received = await connect(taken)
            is_changing = True
            client.send([submit("r", SECRET)])
            await until(lambda: received.of(messages.EngineStopped))
            await until(lambda: not server.clients)
            assert server.num_open == 0 and not received.tokens("r")


def context(key: bytes | None = None, **settings: Any) -> ssl.SSLContext:
    """Of a client that accepts any server."""
    side = ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(side) if key is None else tls.tls_context.__wrapped__(key, side)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    for name, value in settings.items():
        setattr(made, name, value)
    return made


OURS = tls.tls_context(KEY, ssl.PROTOCOL_TLS_SERVER)
HELLO = codec.Hello(**asdict(MODEL))
OLD = {"minimum_version": ssl.TLSVersion.TLSv1_2, "maximum_version": ssl.TLSVersion.TLSv1_2}


@pytest.mark.parametrize(
    "stranger",
    [context(), context(b"other"), context(KEY, **OLD)],
    ids=["no certificate", "another key", "TLS 1.2"],
)
def test_a_client_without_the_certificate_reads_nothing(
    stranger: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    @on_loop
    async def run() -> None:
        async with replica() as (server, address, _):
            assert isinstance(address, tuple)
            reader, writer = await asyncio.open_connection(*address)
            await reader.readexactly(codec.GREETING.size)
            with suppress(OSError):
                await writer.start_tls(stranger)
                writer.write(codec.frame([submit("r")]))
                assert await reader.read() == b""
            writer.close()
            (refused,) = await until(lambda: [t for t in caplog.messages if "refused" in t])
            assert "127.0.0.1" in refused and "key of this fleet" in refused
            assert server.clients == {} and server.num_open == 0

    run()


async def talk_http(reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def say_nothing(reader: Reader, writer: Writer) -> None:
    await reader.read()
    writer.close()


async def hang_up(reader: Reader, writer: Writer) -> None:
    writer.close()


def greet(
    context: ssl.SSLContext | None, sent: bytes = b"", protocol: int = codec.PROTOCOL
) -> Callable[[Reader, Writer], Any]:
    """Begin like an engine, then send some bytes."""

    async def serve(reader: Reader, writer: Writer) -> None:
        writer.write(codec.GREETING.pack(codec.MAGIC, protocol))
        with suppress(OSError):
            if context is not None:
                await writer.start_tls(context)
            else:
                await reader.read(1)  # the client has read the greeting
            writer.write(sent)
            await reader.read()
        writer.close()

    return serve


def old_server() -> ssl.SSLContext:
    made = tls.tls_context.__wrapped__(KEY, ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1_2
    return made


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        (talk_http, ("not a Headway process",)),
        (hang_up, ("closed the connection",)),
        (say_nothing, ("cannot connect", "0.2 s")),
        (
            greet(tls.tls_context(b"other", ssl.PROTOCOL_TLS_SERVER)),
            ("key of this fleet", "VERIFY_FAILED"),
        ),
        (greet(old_server()), ("closed the connection",)),
        (greet(None, b"\xff" * 64), ("key of this fleet", "this version")),
        (greet(None, protocol=99), ("protocol 99", "install the same version")),
        (
            greet(OURS, codec.frame(replace(HELLO, version="0.0.1"))),
            ("version '0.0.1'", "start all"),
        ),
        (
            greet(OURS, codec.frame(replace(HELLO, name="two"))),
            ("name 'two'", "let no other process"),
        ),
        (greet(OURS, b"\xff" * 64), ("limit 65536",)),
        (greet(OURS, codec.frame([1])), ("cannot be decoded",)),
    ],
)
def test_a_process_that_is_no_replica_is_named(
    serve: Callable[[Reader, Writer], Any],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if serve is say_nothing:
        monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.2)

    @on_loop
    async def run() -> None:
        async with listening(serve) as (host, port):
            with pytest.raises(ExecutorError) as raised:
                await connect((host, port))
            wanted = ("replica one", str(port), *words)
            assert [w for w in wanted if w not in str(raised.value)] == [], raised.value

    run()


@pytest.mark.parametrize("change", [{"version": "0.0.1"}, {"name": "two"}, {"protocol": 99}])
def test_an_engine_refuses_a_client_that_expects_another(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    @on_loop
    async def run() -> None:
        async with replica() as (server, address, _):
            assert isinstance(address, tuple)
            reader, writer = await asyncio.open_connection(*address)
            await reader.readexactly(codec.GREETING.size)
            await writer.start_tls(tls.tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT))
            writer.write(codec.frame(replace(HELLO, **change)) + codec.frame([submit("r")]))
            assert await codec.read_frame(reader, codec.HELLO, 1 << 16) == HELLO
            assert await reader.read() == b"" and server.clients == {}
            writer.close()
        (refused,) = [text for text in caplog.messages if "refused" in text]
        assert repr(*change.values()) in refused and "127.0.0.1" in refused

    run()


@on_loop
async def test_a_unix_socket_can_be_opened_by_its_user_only(tmp_path: Path) -> None:
    async with replica(tmp_path / "engine") as (_, address, _):
        assert address == tmp_path / "engine"
        assert address.stat().st_mode & 0o777 == 0o600
        client = SocketClient(address, MODEL)
        await asyncio.wait_for(client.open(lambda messages: None), LIMIT)
        await client.close()
