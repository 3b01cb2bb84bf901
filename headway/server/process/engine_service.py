"""An engine for several processes: takes messages over a Unix socket, gives each worker its own.

The engine runs on a thread; this is the event loop beside it. One write for a worker and step. Two
workers may use the same id: the engine knows each by the worker's number before it. A worker that
goes has its requests cancelled; an engine that ends is told to all, now and later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from headway.engine.async_engine import Port
from headway.engine.messages import (
    Cancel,
    EngineStopped,
    FromLoop,
    Query,
    QueryResult,
    Refusal,
    Submit,
    Tokens,
    ToLoop,
    Update,
)  # fmt: skip
from headway.server.process.ipc import LOST, frame, read_frame

PATIENCE = 1.0  # seconds for the workers to read that the engine has ended


@dataclass(slots=True, eq=False)
class Worker:
    """One connection, and what it has open."""

    number: str
    writer: asyncio.StreamWriter
    num_open: dict[str, int] = field(default_factory=dict)  # by its id: samples that have not ended

    def ours(self, id: str) -> str:
        """The engine's name for a request of this worker."""
        return f"{self.number}-{id}"


class Service:
    """Stands between an engine's port and the workers."""

    def __init__(self, port: Port, facts: Any = None) -> None:
        self.gone: EngineStopped | None = None
        self.workers: dict[str, Worker] = {}  # by number
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
        worker = Worker(str(next(self._serials)), writer)
        self.workers[worker.number] = worker
        writer.write(frame(self._facts))
        if self.gone is not None:
            writer.write(frame([self.gone]))
        try:
            while True:
                self._port.send(self._taken(worker, await read_frame(reader)))
        except LOST:
            self._port.send([Cancel(worker.ours(id)) for id in worker.num_open])
        finally:
            del self.workers[worker.number]
            writer.close()

    def _taken(self, worker: Worker, messages: list[ToLoop]) -> list[ToLoop]:
        """Note who has what open; ids and numbers as the engine may know them."""
        for place, message in enumerate(messages):
            if isinstance(message, Query):
                number = next(self._numbers)
                self._asked[number] = worker, message.number
                messages[place] = replace(message, number=number)
                continue
            if isinstance(message, Submit):
                worker.num_open[message.id] = max(1, message.params.n)
            messages[place] = replace(message, id=worker.ours(message.id))
        return messages

    def _receive(self, messages: list[FromLoop]) -> None:
        """Sort what the engine says by who is to hear it."""
        batches: dict[Worker, list[FromLoop]] = {worker: [] for worker in self.workers.values()}
        for message in messages:
            if isinstance(message, Tokens):
                self._share_out(message, batches)
            elif isinstance(message, Update | Refusal):
                number, _, id = message.id.partition("-")
                if (owner := self.workers.get(number)) is not None:
                    batches[owner].append(_as_known(message, id, owner))
            elif isinstance(message, QueryResult):
                worker, asked = self._asked.pop(message.number)
                batches.setdefault(worker, []).append(message._replace(number=asked))
            else:
                self.gone = message
                for batch in batches.values():
                    batch.append(message)
        for worker, batch in batches.items():
            if batch and not worker.writer.is_closing():
                worker.writer.write(frame(batch))

    def _share_out(self, gained: Tokens, batches: Mapping[Worker, list[FromLoop]]) -> None:
        """Each worker's part of what all requests gained."""
        parts = {worker.number: Tokens([], []) for worker in batches}
        for name, tokens in zip(gained.ids, gained.tokens, strict=True):
            number, _, id = name.partition("-")
            if (part := parts.get(number)) is not None:
                part.ids.append(id)
                part.tokens.append(tokens)
        for worker, batch in batches.items():
            if parts[worker.number].ids:
                batch.append(parts[worker.number])


def _as_known(message: Update | Refusal, id: str, owner: Worker) -> Update | Refusal:
    """The message under its owner's own id; notes if it ends a sample, or the whole request."""
    if isinstance(message, Refusal):
        owner.num_open.pop(id, None)
        return message._replace(id=id, message=message.message.replace(message.id, id))
    if message.end is not None and id in owner.num_open:
        owner.num_open[id] -= 1
        if not owner.num_open[id]:
            del owner.num_open[id]
    return message._replace(id=id)
