"""One request's updates between the event loop's one callback and whoever awaits them.

A reader that waits may have a `sink`: it takes updates at once, and the reader sleeps on, which
makes most of what a token costs. Both are on one event loop. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.engine.messages import Update


class Stream:
    """What one request has gained and nobody has read yet."""

    __slots__ = ("_reader", "num_open", "pending", "refusal", "sink")

    def __init__(self, num_samples: int) -> None:
        self.num_open = num_samples  # those whose end has not been taken
        self.pending: list[Update] = []
        self.refusal: Exception | None = None
        self.sink: Callable[[Update], bool] | None = None  # False: that one is for the reader
        self._reader: asyncio.Future[None] | None = None  # done once there is something to take

    def put(self, update: Update) -> None:
        """To the sink if all that came before has been read, else to the reader."""
        if self._reader is None or self.sink is None or not self.sink(update):
            self.keep(update)

    def keep(self, update: Update) -> None:
        """To the reader, who takes all that is there at once."""
        self.pending.append(update)
        if self._reader is not None:
            self._wake(self._reader)

    def fail(self, error: Exception) -> None:
        self.refusal = error
        if self._reader is not None:
            self._wake(self._reader)

    async def take(self) -> list[Update]:
        """All that has come since; waits for something. Raises what made the request fail."""
        if not self.pending and self.refusal is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self.pending:
            assert self.refusal is not None, "woken for a reason"
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
