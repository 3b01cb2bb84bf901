"""An engine on a thread of this process, for callers on an event loop.

`ThreadClient` runs the engine's loop (loop.py). `EventLoopBridge` carries the loop's messages to
`AsyncEngine._on_messages` on the event loop with few wake-ups, and `PreparationQueue` prepares
requests whose params take long to process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from headway.engine.engine import Engine
from headway.engine.loop import Deliver, EngineLoop
from headway.engine.messages import (
    Cancel,
    FromLoop,
    Query,
    Refusal,
    Submit,
    TokenBatch,
    ToLoop,
    refusal_of,
)
from headway.engine.queue_limits import QueueLimits
from headway.errors import ExecutorError, RequestError
from headway.executor.base import Preparation

YIELD_SECONDS = 0.002  # longest delay of the next step in favour of the event loop
MAX_YIELD_TOKENS = 64  # a step with more tokens is not delayed
log = logging.getLogger(__name__)


class ThreadClient:
    """Runs an engine on a thread of this process."""

    def __init__(
        self, engine: Engine, limits: QueueLimits | None = None, *, report_load: bool = False
    ) -> None:
        self.loop = EngineLoop(engine, self._deliver, limits, report_load=report_load)
        self._preparation: PreparationQueue | None = None
        if engine.preparation is not None:
            self._preparation = PreparationQueue(self.loop.post, engine.preparation, self._refuse)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._bridge: EventLoopBridge | None = None  # once opened
        # With async scheduling the next step is already running, and the device must not wait.
        self._yields = not engine.async_scheduling

    async def open(self, on_messages: Deliver) -> None:
        self._bridge = EventLoopBridge(asyncio.get_running_loop(), on_messages)
        self._thread.start()

    def send(self, messages: list[ToLoop]) -> None:
        """Send messages to the loop; queries may be answered here, even during a step."""
        rest = list[ToLoop]()
        for message in messages:
            if isinstance(message, Query) and not message.between_steps and self._bridge:
                self._bridge.receive([self.loop.reply(message)])
            else:
                rest.append(message)
        if rest:
            (self._preparation.send if self._preparation else self.loop.post)(rest)

    async def close(self) -> None:
        if self._preparation is not None:
            self._preparation.close()
        self.loop.stop()
        if self._bridge is not None:  # the thread was started
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception:  # callers learn it from the EngineStopped message
            log.exception("the engine has stopped")

    def _refuse(self, refusal: Refusal) -> None:
        assert self._bridge is not None, "opened before anything is sent"
        self._bridge.deliver([refusal])

    def _deliver(self, messages: list[FromLoop]) -> None:
        """Deliver messages; after a small step, let the event loop have the GIL to send them."""
        if self._bridge is None:  # not opened: a test steps the loop
            return
        self._bridge.deliver(messages)
        if self._yields:
            num_tokens = sum(len(each.ids) for each in messages if isinstance(each, TokenBatch))
            if num_tokens <= MAX_YIELD_TOKENS:
                self._bridge.wait_received(YIELD_SECONDS)


class EventLoopBridge:
    """Delivers messages to an event loop in order.

    Messages that arrive before the event loop runs its callback are received in one call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Deliver):
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


class PreparationQueue:
    """Passes messages to a loop, after a thread has prepared those that are not ready.

    Other messages pass at once and in order, and messages about a waiting request wait with it. A
    request with invalid params is refused here and never reaches the loop. `send` must be called by
    one thread at a time. `refuse` is called on the thread that prepares params, or after `close` on
    that of `send`.
    """

    def __init__(
        self,
        post: Callable[[list[ToLoop]], None],
        preparation: Preparation,
        refuse: Callable[[Refusal], None],
    ) -> None:
        self._post, self._preparation, self._refuse = post, preparation, refuse
        # By id of a waiting request: later messages about it.
        self._held: dict[str, list[ToLoop]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        # One thread, so that preparation takes at most one core from the engine.
        self._thread = ThreadPoolExecutor(1, "preparation_queue")

    def send(self, messages: list[ToLoop]) -> None:
        """Pass messages on; requests that are not ready are prepared first."""
        ready = [passed for each in messages if (passed := self._passed(each)) is not None]
        if ready:
            self._post(ready)

    def close(self) -> None:
        """Prepare nothing more; waiting requests are dropped, later ones are refused."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _passed(self, message: ToLoop) -> ToLoop | None:
        """The message to pass on; None if it has to wait here."""
        if isinstance(message, Submit):
            params = self._preparation.ready(message.params)
            if params is not None:
                return message if params is message.params else replace(message, params=params)
            if self._is_closed:
                self._refuse(refusal_of(message.id, ExecutorError("the engine has been closed")))
                return None
            with self._lock:
                self._held[message.id] = []
            self._thread.submit(self._make_ready, message)
            return None
        if self._held and isinstance(message, Cancel):
            with self._lock:
                if message.id in self._held:
                    self._held[message.id].append(message)
                    return None
        return message

    def _make_ready(self, message: Submit) -> None:
        try:
            message = replace(message, params=self._preparation.make_ready(message.params))
        except RequestError as error:
            with self._lock:
                del self._held[message.id]  # a later Cancel is dropped: the request has ended
            self._refuse(refusal_of(message.id, error))
            return
        except Exception as error:  # the executor raises it again and fails the request
            log.debug("request %r could not be prepared: %s", message.id, error)
        with self._lock:  # post under the lock, so that later messages come after these
            self._post([message, *self._held.pop(message.id)])
