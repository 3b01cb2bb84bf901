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
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from typing import Any, Protocol

from headway import errors
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop, Limits
from headway.engine.messages import (
    Ask,
    Cancel,
    FromLoop,
    Gone,
    Refusal,
    Reply,
    Submit,
    ToLoop,
    Update,
)  # fmt: skip
from headway.errors import ExecutorError, InvalidRequest, Overloaded, RequestError
from headway.request import Params

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
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._receive: Receive | None = None
        self._asyncio: asyncio.AbstractEventLoop | None = None

    async def open(self, receive: Receive) -> None:
        self._receive, self._asyncio = receive, asyncio.get_running_loop()
        self._thread.start()

    def send(self, messages: list[ToLoop]) -> None:
        self.loop.post(messages)

    async def close(self) -> None:
        self.loop.stop()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:  # it is told to whoever is connected, by `Gone`
            return

    def _deliver(self, messages: list[FromLoop]) -> None:
        assert self._asyncio is not None and self._receive is not None, "opened before it runs"
        if not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(self._receive, messages)


class Stream:
    """What one request has gained and nobody has read yet."""

    __slots__ = ("_news", "is_over", "pending", "refusal")

    def __init__(self) -> None:
        self.pending: list[Update] = []
        self.refusal: Exception | None = None
        self.is_over = False
        self._news = asyncio.Event()

    def put(self, update: Update) -> None:
        self.pending.append(update)
        self._news.set()

    def fail(self, error: Exception) -> None:
        self.refusal = error
        self._news.set()

    async def take(self) -> list[Update]:
        """All that has come since; waits for something. Raises what made the request fail."""
        await self._news.wait()
        self._news.clear()
        if self.pending:
            taken, self.pending = self.pending, []
            if self.refusal is not None:
                self._news.set()
            return taken
        assert self.refusal is not None, "woken for a reason"
        raise self.refusal


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
        if id in self._streams or id in self._left:
            raise InvalidRequest(f"request {id!r}: this id is in use")
        if self.gone is not None:
            raise ExecutorError(f"the engine has ended: {self.gone}")
        if self.is_closing:
            raise Overloaded("the server is shutting down and takes nothing new")
        stream = self._streams[id] = Stream()
        num_open = max(1, params.n)  # a wrong number is refused, which takes one answer
        try:
            self.port.send([Submit(id, prompt, params)])
            while num_open:
                updates = await stream.take()
                num_open -= sum(update.end is not None for update in updates)
                yield updates
        except RequestError:
            num_open = 0  # it was never there
            raise
        finally:
            del self._streams[id]
            num_open -= sum(update.end is not None for update in stream.pending)
            if num_open and stream.refusal is None and self.gone is None:
                self._left[id] = num_open
                self.port.send([Cancel(id)])

    def stop_sample(self, id: str, sample: int) -> None:
        """End one sample where it stands; its stream says so."""
        self.port.send([Cancel(id, sample)])

    async def ask(self, what: str, details: Any = None) -> Any:
        """The answer of the engine's loop to a question it knows."""
        if self.gone is not None:
            raise ExecutorError(f"the engine has ended: {self.gone}")
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.port.send([Ask(number, what, details)])
        try:
            return await future
        finally:
            del self._asked[number]

    def _receive(self, messages: list[FromLoop]) -> None:
        streams = self._streams
        for message in messages:
            if isinstance(message, Update):
                if stream := streams.get(message.id):
                    stream.put(message)
                elif message.end is not None:
                    self._let_go(message.id)
            elif isinstance(message, Refusal):
                if stream := streams.get(message.id):
                    stream.fail(_error_of(message))
                self._left.pop(message.id, None)
            elif isinstance(message, Reply):
                self._settle(message)
            else:
                self._end(message)

    def _let_go(self, id: str) -> None:
        """A sample that nobody reads has ended; after the last one, the id is free again."""
        if self._left.get(id, 0) > 1:
            self._left[id] -= 1
        else:
            self._left.pop(id, None)

    def _settle(self, reply: Reply) -> None:
        future = self._asked.get(reply.number)
        if future is not None and not future.done():
            if reply.error is None:
                future.set_result(reply.value)
            else:
                future.set_exception(ExecutorError(reply.error))

    def _end(self, message: Gone) -> None:
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
