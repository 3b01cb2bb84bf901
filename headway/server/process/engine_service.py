"""Shares one engine between several API workers over a Unix socket.

The engine runs on a thread, the service on an event loop. Each worker gets one write per step. Two
workers may use the same request id, so the engine's ids have the worker's number as a prefix. The
requests of a worker that disconnects are cancelled. If the engine stops, all workers are notified,
including those that connect later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from headway.engine.async_engine import EngineClient
from headway.engine.messages import (
    Cancel,
    EngineStopped,
    FromLoop,
    Query,
    QueryResult,
    Refusal,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
)  # fmt: skip
from headway.server.process.ipc import LOST, frame, read_frame

CLOSE_TIMEOUT = 1.0  # seconds for the workers to read that the engine has stopped


@dataclass(slots=True, eq=False)
class WorkerConnection:
    """The connection to one worker and its open requests."""

    number: str
    writer: asyncio.StreamWriter
    num_open: dict[str, int] = field(default_factory=dict)  # open samples by request id

    def engine_id(self, id: str) -> str:
        """The engine's id of a request of this worker."""
        return f"{self.number}-{id}"


class EngineService:
    """Forwards messages between an engine's client and the workers."""

    def __init__(self, client: EngineClient, model_info: Any = None) -> None:
        self.stopped: EngineStopped | None = None
        self.workers: dict[str, WorkerConnection] = {}  # by number
        self._client, self._model_info = client, model_info
        # By the engine's query number: the worker and its own number of the query.
        self._queries: dict[int, tuple[WorkerConnection, int]] = {}
        self._serials, self._numbers = count(), count()
        self._server: asyncio.Server | None = None

    async def start(self, path: str | Path) -> None:
        """Start the engine and listen; `path` should be in a directory of mode 0700."""
        await self._client.open(self._receive)
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def close(self) -> None:
        """Stop the engine and close the connections to the workers."""
        assert self._server is not None, "start() was called"
        self._server.close()
        await self._client.close()
        for worker in list(self.workers.values()):
            worker.writer.close()
        with suppress(TimeoutError):  # a worker may not read
            async with asyncio.timeout(CLOSE_TIMEOUT):
                while self.workers:
                    await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = WorkerConnection(str(next(self._serials)), writer)
        self.workers[worker.number] = worker
        writer.write(frame(self._model_info))
        if self.stopped is not None:
            writer.write(frame([self.stopped]))
        try:
            while True:
                self._client.send(self._to_engine(worker, await read_frame(reader)))
        except LOST:
            self._client.send([Cancel(worker.engine_id(id)) for id in worker.num_open])
        finally:
            del self.workers[worker.number]
            writer.close()

    def _to_engine(self, worker: WorkerConnection, messages: list[ToLoop]) -> list[ToLoop]:
        """Replace a worker's ids and query numbers by the engine's; record its open requests."""
        for place, message in enumerate(messages):
            if isinstance(message, Query):
                number = next(self._numbers)
                self._queries[number] = worker, message.number
                messages[place] = replace(message, number=number)
                continue
            if isinstance(message, Submit):
                worker.num_open[message.id] = message.num_open
            messages[place] = replace(message, id=worker.engine_id(message.id))
        return messages

    def _receive(self, messages: list[FromLoop]) -> None:
        """Send each worker its messages, in one write."""
        batches: dict[WorkerConnection, list[FromLoop]] = {
            worker: [] for worker in self.workers.values()
        }
        for message in messages:
            if isinstance(message, TokenBatch):
                self._split(message, batches)
            elif isinstance(message, SampleUpdate | Refusal):
                number, _, id = message.id.partition("-")
                if (owner := self.workers.get(number)) is not None:
                    batches[owner].append(_to_worker(message, id, owner))
            elif isinstance(message, QueryResult):
                worker, number_there = self._queries.pop(message.number)
                batches.setdefault(worker, []).append(message._replace(number=number_there))
            else:  # it concerns all workers
                if isinstance(message, EngineStopped):
                    self.stopped = message
                for batch in batches.values():
                    batch.append(message)
        for worker, batch in batches.items():
            if batch and not worker.writer.is_closing():
                worker.writer.write(frame(batch))

    def _split(
        self, message: TokenBatch, batches: Mapping[WorkerConnection, list[FromLoop]]
    ) -> None:
        """Add to each worker's batch the tokens of its requests."""
        parts = {worker.number: TokenBatch([], []) for worker in batches}
        for name, tokens in zip(message.ids, message.tokens, strict=True):
            number, _, id = name.partition("-")
            if (part := parts.get(number)) is not None:
                part.ids.append(id)
                part.tokens.append(tokens)
        for worker, batch in batches.items():
            if parts[worker.number].ids:
                batch.append(parts[worker.number])


def _to_worker(
    message: SampleUpdate | Refusal, id: str, owner: WorkerConnection
) -> SampleUpdate | Refusal:
    """The message with the worker's own id; records the end of a sample or of the request."""
    if isinstance(message, Refusal):
        owner.num_open.pop(id, None)
        return message._replace(id=id, message=message.message.replace(message.id, id))
    if message.end is not None and id in owner.num_open:
        owner.num_open[id] -= 1
        if not owner.num_open[id]:
            del owner.num_open[id]
    return message._replace(id=id)
