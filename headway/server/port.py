"""The way to an engine in another process: messages as pickles over a Unix socket.

Pickles are trusted: both ends are ours, and the socket lies in a folder that only its user may
enter. Each connection is told a prefix of its own for its ids, so that two workers may use the same.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from headway.engine.async_engine import Receive
from headway.engine.messages import Ask, FromLoop, Gone, Refusal, ToLoop, Update
from headway.errors import ExecutorError

LENGTH = struct.Struct("<Q")
LOST = (asyncio.IncompleteReadError, ConnectionError)  # what reading raises when the other end dies


class Welcome(NamedTuple):
    """The first thing a worker reads."""

    prefix: str
    facts: Any  # what whoever made the engine wants workers to know of it


def frame(value: Any) -> bytes:
    """A value with its length before it."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(pickled)) + pickled


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value; one of LOST if there is none."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class SocketPort:
    """An engine behind a Unix socket. What the engine's side wants known of it is in `facts`."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.facts: Any = None
        self._prefix = ""
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, receive: Receive) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.path)
            self._prefix, self.facts = await read_frame(reader)
        except (*LOST, OSError) as error:
            raise ExecutorError(f"no engine answers at {self.path}: {error}") from None
        self._reading = asyncio.create_task(self._read(reader, receive))

    def send(self, messages: list[ToLoop]) -> None:
        assert self._writer is not None, "opened before anything is sent"
        if messages and not self._writer.is_closing():  # if it is, all that is open is told so
            self._writer.write(frame([self._outward(message) for message in messages]))

    async def close(self) -> None:
        """Leave the engine to others; what is open here fails."""
        assert self._writer is not None and self._reading is not None, "opened before"
        self._writer.close()
        await self._reading
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, receive: Receive) -> None:
        with suppress(*LOST):
            while True:
                receive([self._inward(message) for message in await read_frame(reader)])
        receive([Gone("the connection to its process was lost")])

    def _outward(self, message: ToLoop) -> ToLoop:
        if isinstance(message, Ask):
            return message
        return replace(message, id=self._prefix + message.id)

    def _inward(self, message: FromLoop) -> FromLoop:
        start = len(self._prefix)
        if isinstance(message, Update):
            return Update(message[0][start:], *message[1:])
        if isinstance(message, Refusal):
            id = message.id[start:]
            return message._replace(id=id, words=message.words.replace(message.id, id))
        return message
