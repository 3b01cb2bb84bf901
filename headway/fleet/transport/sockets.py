"""One TCP connection between each gateway and each replica carries all messages.

A replica writes one frame per step and gateway. Both sides prove that they know the fleet's key
before anything else is read; the key itself is never sent. Knows no Ray and no routing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headway import __version__
from headway.engine.async_engine import EngineClient
from headway.engine.messages import FromLoop, QueryResult, ToLoop
from headway.errors import ExecutorError
from headway.fleet.transport.links import OnBatch, OnLost
from headway.fleet.transport.wire import (
    MAGIC,
    PROTOCOL,
    START,
    Drain,
    Hello,
    Proof,
    frame,
    read_frame,
)
from headway.server.process.engine_service import EngineService

HANDSHAKE_SECONDS = 2.0
MAX_HANDSHAKE = 1 << 16  # bytes of a frame before the key is proved
DRAIN_SECONDS = 3.0  # for the gateways to move the requests of a replica and to disconnect
LOST = (asyncio.IncompleteReadError, ConnectionError)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a replica says of itself; the replicas of a fleet differ only in `name`."""

    name: str
    model: str  # everything that results depend on, in words
    block_size: int


def _hello(identity: Identity | None, nonce: bytes) -> bytes:
    name, model, size = ("gateway", "", 0)
    if identity is not None:
        name, model, size = identity.name, identity.model, identity.block_size
    said = Hello(name, __version__, model, size, nonce)
    return START.pack(MAGIC, PROTOCOL) + frame(said)


async def _read_hello(reader: asyncio.StreamReader, peer: str) -> Hello:
    magic, protocol = START.unpack(await reader.readexactly(START.size))
    if magic != MAGIC:
        raise ExecutorError(f"{peer} is not part of a Headway fleet")
    if protocol != PROTOCOL:
        raise ExecutorError(
            f"{peer} has wire protocol {protocol} and this process has {PROTOCOL}; install the same "
            "version of Headway on all machines"
        )
    said = await read_frame(reader, MAX_HANDSHAKE)
    if not isinstance(said, Hello):
        raise ExecutorError(f"{peer} sent {type(said).__name__} instead of Hello")
    return said


def _digest(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")


async def _check_proof(
    reader: asyncio.StreamReader, key: bytes, role: bytes, nonce: bytes, peer: str
) -> None:
    proof = await read_frame(reader, MAX_HANDSHAKE)
    known = isinstance(proof, Proof) and isinstance(proof.digest, bytes)
    if not known or not hmac.compare_digest(proof.digest, _digest(key, role, nonce)):
        raise ExecutorError(f"{peer} does not have the key of this fleet")


async def _read_batch(reader: asyncio.StreamReader) -> Any:
    """The next batch; ConnectionError if it is invalid, which ends the connection."""
    try:
        return await read_frame(reader)
    except ExecutorError as error:
        raise ConnectionError(str(error)) from error


def _frame_batch(batch: Any) -> bytes:
    """A batch as bytes; answers that cannot be sent become errors."""
    try:
        return frame(batch)
    except TypeError:
        return frame([_sendable(message) for message in batch])


def _sendable(message: FromLoop) -> FromLoop:
    try:
        frame(message)
    except TypeError as error:
        if not isinstance(message, QueryResult):
            raise
        return QueryResult(message.number, None, f"the answer cannot be sent: {error}")
    return message


class ReplicaServer:
    """Serves one engine to all gateways that know the key."""

    def __init__(self, client: EngineClient, identity: Identity, key: bytes) -> None:
        self.identity, self._key = identity, key
        self.service = EngineService(client, None, _frame_batch, _read_batch)
        self.address = ("", 0)  # host and port, once it listens
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> None:
        """Start the engine and listen on a free port."""
        await self.service.open()
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = (host, port)

    @property
    def num_open(self) -> int:
        """Open requests of all gateways."""
        return sum(len(worker.num_open) for worker in self.service.workers.values())

    async def drain(self, reason: str) -> None:
        """Ask all gateways to move their requests, and wait until they have and disconnect."""
        notice = frame([Drain(reason)])
        for worker in self.service.workers.values():
            worker.writer.write(notice)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self.service.workers:
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop the engine and disconnect."""
        if self._server is not None:
            self._server.close()
        await self.service.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = f"the gateway at {writer.get_extra_info('peername')}"
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._prove(reader, writer, peer)
        except (*LOST, TimeoutError, ExecutorError) as error:
            log.warning("a connection was refused: %s", str(error) or "it sent nothing in time")
            writer.close()
            return
        await self.service.serve(reader, writer)

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        nonce = secrets.token_bytes(16)
        writer.write(_hello(self.identity, nonce))
        said = await _read_hello(reader, peer)
        await _check_proof(reader, self._key, b"gateway", nonce, peer)
        writer.write(frame(Proof(_digest(self._key, b"replica", said.nonce))))


class SocketLink:
    """A gateway's link to a replica behind TCP. `on_drain` is called if the replica asks for it."""

    def __init__(
        self,
        identity: Identity,
        address: tuple[str, int],
        key: bytes,
        on_drain: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name, self.address = identity.name, address
        self.is_open = False
        self.num_frames = 0  # received
        self._expected, self._key, self._on_drain = identity, key, on_drain
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        peer = f"replica {self.name} at {self.address[0]}:{self.address[1]}"
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                reader, self._writer = await asyncio.open_connection(*self.address)
                await self._prove(reader, self._writer, peer)
        except ExecutorError:
            self._disconnect()
            raise
        except (*LOST, OSError, TimeoutError) as error:
            self._disconnect()
            reason = str(error) or f"it did not answer within {HANDSHAKE_SECONDS:g} s"
            raise ExecutorError(f"cannot connect to {peer}: {reason}") from None
        self.is_open = True
        self._reading = asyncio.create_task(self._read(reader, on_batch, on_lost))

    def send(self, messages: list[ToLoop]) -> None:
        if messages and self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(messages))

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        self._disconnect()

    def _disconnect(self) -> None:
        self.is_open = False
        if self._writer is not None:
            # The peer may be stopped and never read what is left.
            self._writer.transport.abort()

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        said, nonce = await _read_hello(reader, peer), secrets.token_bytes(16)
        check_same(said, self._expected, peer)
        proof = Proof(_digest(self._key, b"gateway", said.nonce))
        writer.write(_hello(None, nonce) + frame(proof))
        await _check_proof(reader, self._key, b"replica", nonce, peer)

    async def _read(self, reader: asyncio.StreamReader, on_batch: OnBatch, on_lost: OnLost) -> None:
        reason = "its process has ended"
        try:
            while True:
                batch = await _read_batch(reader)
                self.num_frames += 1
                if isinstance(batch[0], Drain):
                    self._on_drain(self.name)
                else:
                    on_batch(batch)
        except asyncio.IncompleteReadError:
            pass
        except ConnectionError as error:
            reason = f"the connection to it was lost: {error}"
        self._disconnect()
        on_lost(reason)


def check_same(said: Hello, expected: Identity, peer: str) -> None:
    """ExecutorError unless a replica has this version, and the model of the fleet."""
    pairs = {
        "version": (said.version, __version__),
        "model": (said.model, expected.model),
        "block_size": (said.block_size, expected.block_size),
    }
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise ExecutorError(
                f"{peer} has {name} {found!r}, but this fleet has {wanted!r}; start all replicas "
                "with the same version, model and flags"
            )
