"""From an engine's thread to an event loop: messages in order, with as few wake-ups as there may be.

Knows no engine. What the messages are is for those at both ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from headway.engine.messages import FromLoop


class EventLoopBridge:
    """All that is delivered until the event loop looks, it receives at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[list[FromLoop]], None]):
        self._loop, self._receive = loop, receive
        self._messages: list[FromLoop] = []  # not empty: the event loop is about to look
        self._lock = threading.Lock()
        self._is_received = threading.Event()

    # On the engine's thread.

    def deliver(self, messages: list[FromLoop]) -> None:
        self._is_received.clear()
        with self._lock:
            is_told, self._messages = bool(self._messages), self._messages + messages
        if not is_told and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look)

    def give_way(self, seconds: float) -> None:
        """Wait until all has been received, but no longer than this."""
        if not self._loop.is_closed():
            self._is_received.wait(seconds)

    # On the event loop's.

    def _look(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, []
        self._receive(messages)
        self._is_received.set()
