"""An engine for several processes: takes messages over a Unix socket, gives each worker its own.

The engine runs on a thread; this is the event loop beside it. One write for a worker and step. A
worker that goes has its requests cancelled; an engine that ends is told to all, now and later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from headway.engine.async_engine import Port
from headway.engine.messages import (
    Ask,
    Cancel,
    FromLoop,
    Gone,
    Refusal,
    Submit,
    ToLoop,
    Update,
)  # fmt: skip
from headway.server.port import LOST, Welcome, frame, read_frame

PATIENCE = 1.0  # seconds for the workers to read that the engine has ended


@dataclass(slots=True, eq=False)
class Worker:
    """One connection, and what it has open."""

    prefix: str
    writer: asyncio.StreamWriter
    num_open: dict[str, int] = field(default_factory=dict)  # by id: samples that have not ended


class Service:
    """Stands between an engine's port and the workers."""

    def __init__(self, port: Port, facts: Any = None) -> None:
        self.gone: Gone | None = None
        self.workers: dict[str, Worker] = {}  # by prefix
        self._port, self._facts = port, facts
        self._asked: dict[int, tuple[Worker, int]] = {}  # who asked, under which number
        self._serials, self._numbers = count(), count()
        self._server: asyncio.Server | None = None

    async def start(self, path: str | Path) -> None:
        """Run the engine and listen; `path` should lie in a folder of mode 0700."""
        await self._port.open(self._receive)
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Tell the workers that are still there, and end the engine."""
        assert self._server is not None, "started before"
        self._server.close()
        await self._port.close()
        for worker in list(self.workers.values()):
            worker.writer.close()
        with suppress(TimeoutError):  # of one that does not read
            async with asyncio.timeout(PATIENCE):
                while self.workers:
                    await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = Worker(f"{next(self._serials)}-", writer)
        self.workers[worker.prefix] = worker
        writer.write(frame(Welcome(worker.prefix, self._facts)))
        if self.gone is not None:
            writer.write(frame([self.gone]))
        try:
            while True:
                self._port.send(self._taken(worker, await read_frame(reader)))
        except LOST:
            self._port.send([Cancel(id) for id in worker.num_open])
        finally:
            del self.workers[worker.prefix]
            writer.close()

    def _taken(self, worker: Worker, messages: list[ToLoop]) -> list[ToLoop]:
        """Note who has what open, and number questions anew."""
        for place, message in enumerate(messages):
            if isinstance(message, Submit):
                worker.num_open[message.id] = max(1, message.params.n)
            elif isinstance(message, Ask):
                number = next(self._numbers)
                self._asked[number] = worker, message.number
                messages[place] = replace(message, number=number)
        return messages

    def _receive(self, messages: list[FromLoop]) -> None:
        batches: dict[Worker, list[FromLoop]] = {}
        for message in messages:
            if isinstance(message, Gone):
                self.gone = message
                for worker in self.workers.values():
                    batches.setdefault(worker, []).append(message)
            elif isinstance(message, Update | Refusal):
                prefix = message.id[: message.id.index("-") + 1]
                if (owner := self.workers.get(prefix)) is not None:
                    _note_end(owner, message)
                    batches.setdefault(owner, []).append(message)
            else:
                worker, number = self._asked.pop(message.number)
                batches.setdefault(worker, []).append(message._replace(number=number))
        for worker, batch in batches.items():
            if not worker.writer.is_closing():
                worker.writer.write(frame(batch))


def _note_end(owner: Worker, message: Update | Refusal) -> None:
    """One sample less is open, or the whole request was refused."""
    if isinstance(message, Refusal):
        owner.num_open.pop(message.id, None)
    elif message.end is not None and message.id in owner.num_open:
        owner.num_open[message.id] -= 1
        if not owner.num_open[message.id]:
            del owner.num_open[message.id]
