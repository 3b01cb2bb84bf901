"""An EngineClient of an engine behind a socket: in another process, or on another machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headway.engine.async_engine import OnMessages
from headway.engine.messages import EngineStopped, FromLoop, Goodbye, Query, QueryResult, ToLoop
from headway.errors import ExecutorError
from headway.remote import auth
from headway.remote.codec import frame, from_engine, read_items, typed_answer

GOODBYE_SECONDS = 0.5  # for an engine to disconnect; a stopped one does not


class SocketClient:
    """Connects to an `EngineService`, which must have the expected identity and the same key."""

    def __init__(
        self, address: auth.Address, expected: auth.Identity = auth.LOCAL, key: bytes = b""
    ) -> None:
        self.address, self._expected, self._key = address, expected, key
        self._queries: dict[int, type[Query[Any]]] = {}  # without an answer, by number
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, on_messages: OnMessages) -> None:
        try:
            async with asyncio.timeout(auth.HANDSHAKE_SECONDS):
                reader, self._writer = await self._connect()
                await auth.join_engine(reader, self._writer, self._expected, self._key)
        except (*auth.LOST, ExecutorError) as error:
            self._abort()
            problem = auth.describe(error)
            raise ExecutorError(f"cannot connect to {self._peer}: {problem}") from None
        except BaseException:  # this task was cancelled
            self._abort()
            raise
        self._reading = asyncio.create_task(self._read(reader, on_messages))

    def send(self, messages: list[ToLoop]) -> None:
        if not messages or self._writer is None or self._writer.is_closing():
            return
        for message in messages:
            if isinstance(message, Query):
                self._queries[message.number] = type(message)
        self._writer.write(frame(messages))

    async def close(self) -> None:
        """Disconnect from the engine, which continues; requests open here end."""
        try:
            if self._reading is not None and not self._reading.done():
                self.send([Goodbye()])
                await asyncio.wait({self._reading}, timeout=GOODBYE_SECONDS)
        finally:
            self._abort()
        if self._reading is not None:
            await self._reading

    @property
    def _peer(self) -> str:
        if isinstance(self.address, Path):
            return f"the engine at {self.address}"
        return f"replica {self._expected.name} at {self.address[0]}:{self.address[1]}"

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.address, Path):
            return await asyncio.open_unix_connection(self.address)
        return await asyncio.open_connection(*self.address)

    def _abort(self) -> None:
        if self._writer is not None:
            # The peer may be stopped and never read what is left.
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, on_messages: OnMessages) -> None:
        problem: object = "its process has ended; restart it"
        try:
            async for messages in read_items(reader, from_engine()):
                on_messages(self._with_answers(messages) if self._queries else messages)
        except Exception as error:  # also what messages that contradict each other cause
            problem = error if isinstance(error, OSError | ExecutorError) else repr(error)
        self._abort()
        on_messages([EngineStopped(f"the connection to {self._peer} was lost: {problem}")])

    def _with_answers(self, messages: list[FromLoop]) -> list[FromLoop]:
        """The messages, with answers of the types that the queries name."""
        return [
            typed_answer(self._queries.pop(each.number), each)
            if isinstance(each, QueryResult) and each.number in self._queries
            else each
            for each in messages
        ]
