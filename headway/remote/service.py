"""Serves one engine to many clients, over a Unix socket or TCP.

The service runs on an event loop. Each client gets one write per step. Two clients may use the same
request id, so the engine's ids have the client's number as a prefix. The requests of a client that
disconnects are cancelled. If the engine stops, all clients are notified, including those that
connect later; nothing can connect by TCP then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from headway.engine.async_engine import EngineClient
from headway.engine.messages import (
    Cancel,
    Drain,
    EngineStopped,
    FromLoop,
    Query,
    QueryResult,
    Refusal,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
)
from headway.errors import ConfigError, ExecutorError
from headway.remote import auth
from headway.remote.codec import frame_results, read_items, to_engine

CLOSE_TIMEOUT = 1.0  # seconds for the clients to read that the engine has stopped
DRAIN_SECONDS = 3.0  # for the clients to move their requests elsewhere and to disconnect
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientConnection:
    """The connection to one client and its open requests."""

    number: str
    writer: asyncio.StreamWriter
    num_open: dict[str, int] = field(default_factory=dict)  # open samples by request id

    def engine_id(self, id: str) -> str:
        """The engine's id of a request of this client."""
        return f"{self.number}-{id}"

    def send(self, messages: list[FromLoop]) -> None:
        if not self.writer.is_closing():
            self.writer.write(frame_results(messages))


Batches = defaultdict[ClientConnection, list[FromLoop]]


class EngineService:
    """Forwards messages between an engine's client and the clients of this service."""

    def __init__(
        self, client: EngineClient, identity: auth.Identity = auth.LOCAL, key: bytes = b""
    ) -> None:
        """TCP needs a key. A Unix socket should be in a directory of mode 0700."""
        self.stopped: EngineStopped | None = None
        self.clients: dict[str, ClientConnection] = {}  # by number
        self.identity, self._key, self._client = identity, key, client
        # By the engine's query number: the client and its own number of the query.
        self._queries: dict[int, tuple[ClientConnection, int]] = {}
        self._serials, self._numbers = count(), count()
        self._server: asyncio.Server | None = None

    async def start(self, address: auth.Address) -> auth.Address:
        """Start the engine and listen; returns the address, with the port that 0 stands for.

        ConfigError for TCP without a key.
        """
        if not (self._key or isinstance(address, Path)):
            raise ConfigError(f"an engine at {address[0]} needs a key: any process can connect")
        await self._client.open(self._receive)
        if isinstance(address, Path):
            self._server = await asyncio.start_unix_server(
                self._serve, address, start_serving=False
            )
            address.chmod(0o600)  # before a client can connect
            await self._server.start_serving()
            return address
        self._server = await asyncio.start_server(self._serve, *address)
        return address[0], self._server.sockets[0].getsockname()[1]

    @property
    def num_open(self) -> int:
        """Open requests of all clients."""
        return sum(len(client.num_open) for client in self.clients.values())

    async def drain(self, reason: str) -> None:
        """Ask all clients to move their requests, and wait until they have and disconnect."""
        for client in self.clients.values():
            client.send([Drain(reason)])
        await self._until_disconnected(DRAIN_SECONDS)

    async def close(self) -> None:
        """Stop the engine and close the connections."""
        if self._server is not None:
            self._server.close()
        await self._client.close()
        for client in self.clients.values():
            client.writer.close()
        await self._until_disconnected(CLOSE_TIMEOUT)  # a client may not read

    async def _until_disconnected(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.clients:
                    await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(auth.HANDSHAKE_SECONDS):
                await auth.admit_client(reader, writer, self.identity, self._key)
        except (*auth.LOST, ExecutorError) as error:
            peer, reason = (
                writer.get_extra_info("peername"),
                str(error) or "it sent nothing in time",
            )
            log.warning("the connection of the client at %s was refused: %s", peer, reason)
            writer.close()
            return
        client = ClientConnection(str(next(self._serials)), writer)
        self.clients[client.number] = client
        if self.stopped is not None:
            client.send([self.stopped])
        try:
            async for messages in read_items(reader, to_engine()):
                self._client.send([*self._to_engine(client, messages)])
        except (OSError, ExecutorError) as error:
            log.warning("the connection to a client was lost: %s", error)
        finally:
            self._client.send([Cancel(client.engine_id(id)) for id in client.num_open])
            del self.clients[client.number]
            writer.close()

    def _to_engine(
        self, client: ClientConnection, messages: list[ToLoop | Refusal]
    ) -> Iterator[ToLoop]:
        """Replace a client's ids and query numbers by the engine's; record its open requests."""
        for message in messages:
            if isinstance(message, Refusal):
                client.send([message])
            elif isinstance(message, Query):
                number = next(self._numbers)
                self._queries[number] = client, message.number
                yield replace(message, number=number)
            else:
                if isinstance(message, Submit):
                    if message.id in client.num_open:
                        raise ExecutorError(f"it submitted {message.id!r}, which is open, again")
                    client.num_open[message.id] = message.num_open
                yield replace(message, id=client.engine_id(message.id))

    def _receive(self, messages: list[FromLoop]) -> None:
        """Send each client its messages, in one write."""
        batches: Batches = defaultdict(list)
        for message in messages:
            if isinstance(message, TokenBatch):
                self._split(message, batches)
            elif isinstance(message, SampleUpdate | Refusal):
                number, _, id = message.id.partition("-")
                if (owner := self.clients.get(number)) is not None:
                    batches[owner].append(_to_client(message, id, owner))
            elif isinstance(message, QueryResult):
                client, number_there = self._queries.pop(message.number)
                batches[client].append(replace(message, number=number_there))
            else:  # it concerns all clients
                if isinstance(message, EngineStopped):
                    self.stopped = message
                    if self._key and self._server is not None:
                        self._server.close()  # a fleet must not connect again
                for client in self.clients.values():
                    batches[client].append(message)
        for client, batch in batches.items():
            client.send(batch)

    def _split(self, message: TokenBatch, batches: Batches) -> None:
        """Add to each client's batch the tokens of its requests."""
        parts: defaultdict[str, TokenBatch] = defaultdict(lambda: TokenBatch([], []))
        for name, tokens in zip(message.ids, message.tokens, strict=True):
            number, _, id = name.partition("-")
            parts[number].ids.append(id)
            parts[number].tokens.append(tokens)
        for number, part in parts.items():
            if (client := self.clients.get(number)) is not None:
                batches[client].append(part)


def _to_client(
    message: SampleUpdate | Refusal, id: str, owner: ClientConnection
) -> SampleUpdate | Refusal:
    """The message with the client's own id; records the end of a sample or of the request."""
    if isinstance(message, Refusal):
        owner.num_open.pop(id, None)
        return replace(message, id=id, message=message.message.replace(message.id, id))
    if message.end is not None and id in owner.num_open:
        owner.num_open[id] -= 1
        if not owner.num_open[id]:
            del owner.num_open[id]
    return replace(message, id=id)
