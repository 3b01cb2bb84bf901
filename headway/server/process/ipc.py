"""The way to an engine in another process: messages as pickles over a Unix socket.

Pickles are trusted: both ends are ours, and the socket lies in a folder that only its user may
enter. The first that comes is what whoever made the engine wants known of it.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.engine.async_engine import Receive
from headway.engine.messages import EngineStopped, ToLoop
from headway.errors import ExecutorError

MAX_READ = 1 << 20  # bytes
LENGTH = struct.Struct("<Q")
LOST = (asyncio.IncompleteReadError, ConnectionError)  # what reading raises when the other end dies


def frame(value: Any) -> bytes:
    """A value with its length before it."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(pickled)) + pickled


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value; one of LOST if there is none."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class Frames:
    """Values from bytes as they come, however these were cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Those that are whole by now."""
        values, data, start = [], self._rest + data, 0
        while len(data) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                break
            values.append(pickle.loads(memoryview(data)[begin:end]))
            start = end
        self._rest = data[start:]
        return values


class SocketPort:
    """An engine behind a Unix socket. What the engine's side wants known of it is in `facts`."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.facts: Any = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, receive: Receive) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.path)
            self.facts = await read_frame(reader)
        except (*LOST, OSError) as error:
            raise ExecutorError(f"no engine answers at {self.path}: {error}") from None
        self._reading = asyncio.create_task(self._read(reader, receive))

    def send(self, messages: list[ToLoop]) -> None:
        assert self._writer is not None, "opened before anything is sent"
        if messages and not self._writer.is_closing():  # if it is, all that is open is told so
            self._writer.write(frame(messages))

    async def close(self) -> None:
        """Leave the engine to others; what is open here fails."""
        assert self._writer is not None and self._reading is not None, "opened before"
        self._writer.close()
        await self._reading
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, receive: Receive) -> None:
        frames = Frames()
        with suppress(*LOST):
            while data := await reader.read(MAX_READ):
                batches = frames.feed(data)
                if batches:
                    receive([message for batch in batches for message in batch])
        receive([EngineStopped("the connection to its process was lost")])
