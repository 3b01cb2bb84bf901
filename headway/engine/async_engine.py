"""The engine for asyncio: submit a request, iterate over what it gains.

    engine = AsyncEngine(llm.engine)
    await engine.start()
    async for update in engine.stream("id", prompt_tokens, params):
        ...

The engine runs on a thread of its own, or behind a socket: a `Port` carries messages there and
back. Leaving an iteration early cancels its request. One AsyncEngine belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

from headway import errors
from headway.engine.engine import Engine
from headway.engine.event_loop_bridge import EventLoopBridge
from headway.engine.loop import EngineLoop, Limits
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
from headway.engine.preparation_queue import PreparationQueue
from headway.engine.stream import Stream
from headway.errors import ExecutorError, InvalidRequest, Overloaded
from headway.request import Params

PATIENCE = 0.002  # seconds that the next step may be put off
MAX_TOKENS = 64  # of a step, for it to be worth that
Receive = Callable[[list[FromLoop]], None]


class Port(Protocol):
    """The way to an engine's loop."""

    async def open(self, receive: Receive) -> None:
        """Connect; `receive` is called on this event loop with what comes."""
        ...

    def send(self, messages: list[ToLoop]) -> None: ...
    async def close(self) -> None: ...


class ThreadPort:
    """An engine on a thread of this process."""

    def __init__(self, engine: Engine, limits: Limits | None = None) -> None:
        self.loop = EngineLoop(engine, self._deliver, limits)
        self._anteroom = PreparationQueue(self.loop.post, engine.preparation, self._refuse)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._handover: EventLoopBridge | None = None
        self._receive: Receive | None = None
        # With async scheduling a device works on the next step meanwhile, and must not run dry.
        self._gives_way = not engine.async_scheduling

    async def open(self, receive: Receive) -> None:
        self._handover, self._receive = (
            EventLoopBridge(asyncio.get_running_loop(), receive),
            receive,
        )
        self._thread.start()

    def send(self, messages: list[ToLoop]) -> None:
        """Pass messages to the loop; observations are answered here, also while a step runs."""
        known, rest = self.loop.observations, list[ToLoop]()
        for message in messages:
            if isinstance(message, Query) and message.what in known and self._receive is not None:
                self._receive([self.loop.reply(message)])
            else:
                rest.append(message)
        self._anteroom.send(rest)

    async def close(self) -> None:
        self._anteroom.close()
        self.loop.stop()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:  # it is told to whoever is connected, by `EngineStopped`
            return

    def _refuse(self, refusal: Refusal) -> None:
        """Deliver a refusal that the loop has no part in."""
        assert self._handover is not None, "opened before anything is sent"
        self._handover.deliver([refusal])

    def _deliver(self, messages: list[FromLoop]) -> None:
        """Both threads need the interpreter: what there is goes out before the next step begins."""
        if self._handover is None:  # stepped by hand: nobody listens
            return
        self._handover.deliver(messages)
        if self._gives_way:
            num_tokens = sum(len(each.ids) for each in messages if isinstance(each, Tokens))
            if num_tokens <= MAX_TOKENS:
                self._handover.give_way(PATIENCE)


class AsyncEngine:
    """Requests by id, each with a stream of updates."""

    def __init__(self, engine: Engine | Port, limits: Limits | None = None) -> None:
        self.port: Port = ThreadPort(engine, limits) if isinstance(engine, Engine) else engine
        self.gone: str | None = None  # why the engine has ended
        self.is_closing = False  # nothing new is taken
        self._streams: dict[str, Stream] = {}
        self._left: dict[str, int] = {}  # ids that nobody reads any more: samples still to end
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()

    async def start(self) -> None:
        await self.port.open(self._receive)

    async def close(self) -> None:
        """End the engine; what is open fails."""
        await self.port.close()

    def cancel_all(self) -> None:
        """End what is open, each with an end of its own, and take nothing new."""
        self.is_closing = True
        self.port.send([Cancel(id) for id in self._streams])

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def stream(
        self, id: str, prompt: Sequence[int], params: Params
    ) -> AsyncIterator[list[Update]]:
        """What the request gains, step by step, until all its samples have ended.

        Raises what the engine refused it for. Leaving early, or being cancelled, ends the request.
        """
        with self.submitted(id, prompt, params) as stream:
            while stream.num_open:
                yield await stream.take()

    @contextmanager
    def submitted(
        self, id: str, prompt: Sequence[int], params: Params, traceparent: str = ""
    ) -> Iterator[Stream]:
        """A request's stream, to take from until nothing of it is open; leaving ends the rest."""
        self._check_free(id)
        # A wrong number of samples is refused, which takes one answer.
        num_samples = params.n if isinstance(params.n, int) else 1
        stream = self._streams[id] = Stream(max(1, num_samples))
        try:
            self.port.send([Submit(id, prompt, params, traceparent)])
            yield stream
        finally:
            del self._streams[id]
            num_open = stream.num_open - sum(u.end is not None for u in stream.pending)
            if num_open and stream.refusal is None and self.gone is None:  # it is still there
                self._left[id] = num_open
                self.port.send([Cancel(id)])

    def _check_free(self, id: str) -> None:
        """Whether a request may come under this id; raises why not."""
        if id in self._streams or id in self._left:
            raise InvalidRequest(f"request {id!r}: this id is in use")
        if self.gone is not None:
            raise ExecutorError(f"the engine has ended: {self.gone}")
        if self.is_closing:
            raise Overloaded("the server is shutting down and takes nothing new")

    def stop_sample(self, id: str, sample: int) -> None:
        """End one sample where it stands; its stream says so."""
        self.port.send([Cancel(id, sample)])

    async def ask(self, what: str, details: Any = None) -> Any:
        """The answer of the engine's loop to a question it knows."""
        if self.gone is not None:
            raise ExecutorError(f"the engine has ended: {self.gone}")
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.port.send([Query(number, what, details)])
        try:
            return await future
        finally:
            del self._asked[number]

    def _receive(self, messages: list[FromLoop]) -> None:
        # Those of several steps: readers are behind, and are to have them together.
        is_late = sum(isinstance(message, Tokens) for message in messages) > 1
        for message in messages:
            if isinstance(message, Tokens):
                self._pass_on(message, is_late)
            elif isinstance(message, Update):
                self._put(message)
            elif isinstance(message, Refusal):
                if stream := self._streams.get(message.id):
                    stream.fail(_error_of(message))
                self._left.pop(message.id, None)
            elif isinstance(message, QueryResult):
                self._settle(message)
            else:
                self._end(message)

    def _pass_on(self, gained: Tokens, is_late: bool) -> None:
        for id, tokens in zip(gained.ids, gained.tokens, strict=True):
            if stream := self._streams.get(id):
                if is_late:
                    stream.keep(Update(id, 0, tokens))
                else:
                    stream.put(Update(id, 0, tokens))

    def _put(self, update: Update) -> None:
        """To whoever reads it; if nobody does, the id is free once its last sample has ended."""
        if stream := self._streams.get(update.id):
            stream.put(update)
        elif update.end is not None:
            if self._left.get(update.id, 0) > 1:
                self._left[update.id] -= 1
            else:
                self._left.pop(update.id, None)

    def _settle(self, reply: QueryResult) -> None:
        future = self._asked.get(reply.number)
        if future is not None and not future.done():
            if reply.error is None:
                future.set_result(reply.value)
            else:
                future.set_exception(ExecutorError(reply.error))

    def _end(self, message: EngineStopped) -> None:
        self.gone = message.reason
        self._left.clear()
        error = ExecutorError(f"the engine has ended: {message.reason}")
        for stream in self._streams.values():
            stream.fail(error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)


def _error_of(refusal: Refusal) -> Exception:
    """The error as it was raised on the other side."""
    kind: type[Exception] = getattr(errors, refusal.kind, ExecutorError)
    return kind(refusal.words, **refusal.numbers)
