"""Passes messages from the engine's thread to readers on an event loop.

`EventLoopBridge` carries messages between the threads with few wake-ups. `RequestStream` holds the
updates of one request until its reader takes them. Neither knows the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from headway.engine.messages import FromLoop, SampleUpdate


class EventLoopBridge:
    """Delivers messages to an event loop in order.

    Messages that arrive before the event loop runs its callback are received in one call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[list[FromLoop]], None]):
        self._loop, self.receive = loop, receive
        self._messages: list[FromLoop] = []  # not empty: a callback is scheduled
        self._lock = threading.Lock()
        self._is_received = threading.Event()

    # On the engine's thread.

    def deliver(self, messages: list[FromLoop]) -> None:
        """Deliver messages; if the event loop is closed, drop them."""
        if self._loop.is_closed():
            return
        self._is_received.clear()
        with self._lock:
            is_scheduled, self._messages = bool(self._messages), self._messages + messages
        if not is_scheduled:
            self._loop.call_soon_threadsafe(self._receive_all)

    def wait_received(self, seconds: float) -> None:
        """Wait until the event loop has received everything, at most this long."""
        if not self._loop.is_closed():
            self._is_received.wait(seconds)

    # On the event loop.

    def _receive_all(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, []
        self.receive(messages)
        self._is_received.set()


class RequestStream:
    """Updates of one request that its reader has not taken yet.

    While the reader waits, a `sink` may consume updates directly. This avoids waking the reader's
    task, which is most of the cost of a streamed token. Sink and reader share one event loop.
    """

    __slots__ = ("_reader", "num_open", "pending", "refusal", "sink")

    def __init__(self, num_samples: int) -> None:
        self.num_open = num_samples  # samples whose end the reader has not taken
        self.pending: list[SampleUpdate] = []
        self.refusal: Exception | None = None
        # Takes updates directly; returns False if the reader must take one.
        self.sink: Callable[[SampleUpdate], bool] | None = None
        self._reader: asyncio.Future[None] | None = None  # of a waiting reader

    def put(self, update: SampleUpdate) -> None:
        """Give an update to the sink if the reader waits with nothing pending, else keep it."""
        if self._reader is None or self.sink is None or not self.sink(update):
            self.keep(update)

    def keep(self, update: SampleUpdate) -> None:
        """Keep an update for the reader, which takes all pending updates at once."""
        self.pending.append(update)
        if self._reader is not None:
            self._wake(self._reader)

    def fail(self, error: Exception) -> None:
        """Make `take` raise this error after the pending updates."""
        self.refusal = error
        if self._reader is not None:
            self._wake(self._reader)

    async def take(self) -> list[SampleUpdate]:
        """All pending updates; waits for at least one. Raises the error that ended the request."""
        if not self.pending and self.refusal is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self.pending:
            assert self.refusal is not None, "woken without an update or an error"
            raise self.refusal
        taken, self.pending = self.pending, []
        for update in taken:
            if update.end is not None:
                self.num_open -= 1
        return taken

    def _wake(self, reader: asyncio.Future[None]) -> None:
        self._reader = None
        if not reader.done():  # it may have been cancelled
            reader.set_result(None)
