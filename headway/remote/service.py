"""Serves one engine to many clients, over a Unix socket or TCP.

The service runs on an event loop. Each client gets one write per step. Two clients may use the same
request id, so the engine's ids have the client's number as a prefix. The requests of a client that
disconnects are cancelled; those of one that is lost wait for another client in the journal. One that
does not read is lost, too: what waits for it is limited. If the engine stops, all clients are
notified, including those that connect later; nothing can connect by TCP then.
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
    Goodbye,
    Query,
    QueryResult,
    Refusal,
    Resume,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
    refusal_of,
)
from headway.engine.queries import FindRequest
from headway.errors import ConfigError, ExecutorError, NotResumable
from headway.remote import auth
from headway.remote.codec import frame_results, read_items, to_engine
from headway.remote.journal import HeldRequest, Journal

CLOSE_TIMEOUT = 1.0  # seconds for the clients to read that the engine has stopped
DRAIN_SECONDS = 3.0  # for the clients to move their requests elsewhere and to disconnect
MAX_UNSENT = 1 << 28  # bytes that wait for a client
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientConnection:
    """The connection to one client and its open requests."""

    number: str
    writer: asyncio.StreamWriter
    open: dict[str, HeldRequest] = field(default_factory=dict)  # by the client's ids

    def send(self, messages: list[FromLoop]) -> None:
        """Write messages, or end the connection if the client is too far behind."""
        if self.writer.is_closing():
            return
        unsent = self.writer.transport.get_write_buffer_size()
        if unsent > MAX_UNSENT:
            log.warning(
                "client %s has not read %d bytes (limit %d); its connection is ended, and its %d "
                "requests go on for another client", self.number, unsent, MAX_UNSENT, len(self.open),
            )  # fmt: skip
            self.writer.transport.abort()
        else:
            self.writer.write(frame_results(messages))


Batches = defaultdict[ClientConnection, list[FromLoop]]


class EngineService:
    """Forwards messages between an engine's client and the clients of this service."""

    def __init__(
        self,
        client: EngineClient,
        identity: auth.Identity = auth.LOCAL,
        key: bytes = b"",
        journal: Journal | None = None,
    ) -> None:
        """TCP needs a key. A Unix socket should be in a directory of mode 0700."""
        self.stopped: EngineStopped | None = None
        self.clients: dict[str, ClientConnection] = {}  # by number
        self.identity, self._key, self._client = identity, key, client
        self.journal = journal or Journal()
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
        """Open requests of all clients, and orphans."""
        return sum(request.num_open > 0 for request in self.journal.requests.values())

    async def drain(self, reason: str, seconds: float = 0.0) -> None:
        """Ask all clients to move their requests, and wait until they disconnect.

        `seconds` is their limit for requests that can only end here.
        """
        for client in self.clients.values():
            client.send([Drain(reason)])
        await self._until_disconnected(seconds + DRAIN_SECONDS)

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
        except BaseException as error:  # also if this task was cancelled
            writer.close()
            if not isinstance(error, (*auth.LOST, ExecutorError)):
                raise
            peer = writer.get_extra_info("peername")
            problem = auth.describe(error)
            log.warning("the connection of the client at %s was refused: %s", peer, problem)
            return
        client = self._connected(writer)
        try:
            async for messages in read_items(reader, to_engine()):
                self._client.send([*self._to_engine(client, messages)])
            self.journal.orphan(client)
        except (OSError, ExecutorError) as error:
            log.warning("the connection to a client was lost: %s", error)
            if isinstance(error, OSError):  # else the client is at fault
                self.journal.orphan(client)
        finally:
            self._client.send([Cancel(id) for id in self.journal.cancel(client)])
            del self.clients[client.number]
            writer.close()

    def _connected(self, writer: asyncio.StreamWriter) -> ClientConnection:
        client = ClientConnection(str(next(self._serials)), writer)
        self.clients[client.number] = client
        if self.stopped is not None:
            client.send([self.stopped])
        return client

    def _to_engine(
        self, client: ClientConnection, messages: list[ToLoop | Refusal]
    ) -> Iterator[ToLoop]:
        """Replace a client's ids and query numbers by the engine's; record its open requests."""
        for message in messages:
            match message:
                case Refusal():
                    client.send([message])
                case FindRequest():
                    found = self.journal.find(message.id)
                    answer = found and (self.identity.name, found.id)
                    client.send([QueryResult(message.number, answer)])
                case Query():
                    number = next(self._numbers)
                    self._queries[number] = client, message.number
                    yield replace(message, number=number)
                case Submit():
                    if message.id in client.open:
                        raise ExecutorError(f"it submitted {message.id!r}, which is open, again")
                    id = f"{client.number}-{message.id}"
                    self.journal.add(message, id, client)
                    yield replace(message, id=id, history=())
                case Cancel() if (request := client.open.get(message.id)) is not None:
                    request.is_cancelled |= message.sample is None
                    yield replace(message, id=request.engine_id)
                case Resume():
                    self._resume(client, message)
                case Goodbye():
                    yield from [Cancel(id) for id in self.journal.cancel(client)]
                    client.writer.close()

    def _resume(self, client: ClientConnection, message: Resume) -> None:
        """Send all that a request has gained; what follows is sent as to its first client."""
        id = message.held_id
        try:
            request = self.journal.resume(id, message.submit, client)
        except NotResumable as error:
            client.send([refusal_of(id, error)])
            return
        numbers = sorted({0, *request.samples})
        client.send([request.samples[number].update(id, number) for number in numbers])

    def _receive(self, messages: list[FromLoop]) -> None:
        """Send each client its messages, in one write."""
        batches: Batches = defaultdict(list)
        for message in messages:
            if isinstance(message, TokenBatch):
                self._split(message, batches)
            elif isinstance(message, SampleUpdate | Refusal):
                self._pass_on(message, batches)
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
        if expired := self.journal.expire():
            log.warning("%d requests of lost clients were cancelled", len(expired))
            self._client.send([Cancel(id) for id in expired])

    def _pass_on(self, message: SampleUpdate | Refusal, batches: Batches) -> None:
        """Record an update or a refusal and add it, with the client's id, to the client's batch."""
        request = self.journal.requests.get(message.id)
        if request is None:
            return
        id, owner = request.id, request.owner
        if isinstance(message, SampleUpdate):
            request.samples[message.sample].add(message)
            if message.end is not None:
                request.num_open -= 1
                if not request.num_open:
                    self.journal.end(request)
            passed: FromLoop = replace(message, id=id)
        else:
            request.is_cancelled = True
            self.journal.end(request)
            passed = replace(message, id=id, message=message.message.replace(message.id, id))
        if owner is not None:
            batches[owner].append(passed)

    def _split(self, message: TokenBatch, batches: Batches) -> None:
        """Record the tokens of all requests; add to each client's batch those of its requests."""
        parts: defaultdict[ClientConnection, TokenBatch] = defaultdict(lambda: TokenBatch([], []))
        requests = self.journal.requests
        for name, tokens in zip(message.ids, message.tokens, strict=True):
            if (request := requests.get(name)) is None:
                continue
            request.samples[0].tokens += tokens
            if request.owner is not None:
                part = parts[request.owner]
                part.ids.append(request.id)
                part.tokens.append(tokens)
        for client, part in parts.items():
            batches[client].append(part)
