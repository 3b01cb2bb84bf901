"""Connects an API process to the engine's process: pickled messages over a Unix socket.

Both ends belong to one server, and the socket is in a directory that only its user can access, so
unpickling is safe. The first message from the engine's side describes the model.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.engine.async_engine import OnMessages
from headway.engine.messages import EngineStopped, ToLoop
from headway.errors import ExecutorError

MAX_READ = 1 << 20  # bytes
LENGTH = struct.Struct("<Q")
LOST = (asyncio.IncompleteReadError, ConnectionError)  # raised by reading when the peer has exited


def frame(value: Any) -> bytes:
    """A pickled value, preceded by its length."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(pickled)) + pickled


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value; raises one of LOST if the peer has exited."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class FrameDecoder:
    """Decodes values from a byte stream that arrives in arbitrary parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """The values that are complete with these bytes."""
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


class SocketClient:
    """A client of an engine behind a Unix socket; `model_info` is available once it is open."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.model_info: Any = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, on_messages: OnMessages) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.path)
            self.model_info = await read_frame(reader)
        except (*LOST, OSError) as error:
            raise ExecutorError(f"cannot connect to the engine at {self.path}: {error}") from None
        self._reading = asyncio.create_task(self._read(reader, on_messages))

    def send(self, messages: list[ToLoop]) -> None:
        assert self._writer is not None, "open() was called"
        if messages and not self._writer.is_closing():  # otherwise open requests fail by `_read`
            self._writer.write(frame(messages))

    async def close(self) -> None:
        """Disconnect from the engine, which continues; requests open here fail."""
        assert self._writer is not None and self._reading is not None, "open() was called"
        self._writer.close()
        await self._reading
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, on_messages: OnMessages) -> None:
        decoder = FrameDecoder()
        with suppress(*LOST):
            while data := await reader.read(MAX_READ):
                batches = decoder.feed(data)
                if batches:
                    on_messages([message for batch in batches for message in batch])
        on_messages(
            [EngineStopped("the connection to the engine's process was lost; restart the server")]
        )
