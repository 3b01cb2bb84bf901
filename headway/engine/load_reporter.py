"""Tells a fleet how busy an engine is, and that its process is alive.

A report follows every step. If no message was sent for HEARTBEAT_SECONDS, because the engine is
idle or a step takes long, a thread repeats the latest report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from headway.engine.messages import FromLoop, LoadReport
from headway.scheduler import Scheduler

HEARTBEAT_SECONDS = 0.25
MAX_COUNTED = 64  # requests; a longer queue is counted at most every COUNT_SECONDS
COUNT_SECONDS = 0.05


class LoadReporter:
    """Makes the LoadReports of an engine loop. `deliver` must accept calls from any thread."""

    def __init__(self, deliver: Callable[[list[FromLoop]], None]) -> None:
        self._deliver = deliver
        self._latest: LoadReport | None = None
        self._is_quiet = True  # no report since the latest heartbeat
        self._is_stopped = threading.Event()
        self._waiting_tokens, self._counted_at = 0, -COUNT_SECONDS

    def start(self, scheduler: Scheduler) -> None:
        """Send the first report, and heartbeats from now on."""
        self._deliver([self.report(scheduler)])
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped.set()

    def report(self, scheduler: Scheduler) -> LoadReport:
        """The present load; called on the loop's thread after every step."""
        left = [
            request.prefill_end - request.num_computed for request in scheduler.state.prefilling
        ]
        self._is_quiet = False
        self._latest = LoadReport(
            scheduler.num_steps, len(scheduler.running), len(scheduler.queue),
            self._count_waiting(scheduler) + sum(left), scheduler.num_free,
            scheduler.config.num_blocks,
        )  # fmt: skip
        return self._latest

    def _count_waiting(self, scheduler: Scheduler) -> int:
        """Tokens of the queue; a recent number if the queue is long."""
        now = time.monotonic()
        if len(scheduler.queue) <= MAX_COUNTED or now - self._counted_at > COUNT_SECONDS:
            # A waiting request has no tokens outside these two lists.
            lengths = [r.num_prompt + len(r.flushed_tokens) for r in scheduler.queue]
            self._waiting_tokens, self._counted_at = sum(lengths), now
        return self._waiting_tokens

    def _beat(self) -> None:
        while not self._is_stopped.wait(HEARTBEAT_SECONDS):
            if self._is_quiet and self._latest is not None:
                self._deliver([self._latest])
            self._is_quiet = True
