"""The statistics of the last minute of a running engine.

Steps are counted in slices of a few seconds. A slice is dropped when it is old, so memory is bounded
by the work of a minute.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headway.events import Event
from headway.record.lines import HeaderLine
from headway.record.stats import RunStats
from headway.record.timeline import RequestTimeline, StepStats, Timeline

SLICE_SECONDS, NUM_SLICES = 10.0, 6


class _Slice(NamedTuple):
    start: float
    stats: RunStats
    finished: list[RequestTimeline]


class RecentStats:
    """Counts steps, and forgets them after 60 to 70 seconds."""

    def __init__(self, header: HeaderLine) -> None:
        self._header = header
        self._slices: deque[_Slice] = deque(maxlen=NUM_SLICES + 1)

    def count(self, event: Event, stats: StepStats, timeline: Timeline) -> None:
        """Count an event that the timeline has followed."""
        now = stats.now or event.time
        if not self._slices or now >= self._slices[-1].start + SLICE_SECONDS:
            self._slices.append(_Slice(now, RunStats(self._header), []))
        latest = self._slices[-1]
        latest.stats.count(event, stats, timeline)
        if stats.finished:
            latest.finished.extend([times for _, times in stats.finished])

    def merged(self, timeline: Timeline, now: float) -> RunStats:
        """The slices of the last minute as one run, which began with the first of them.

        Requests are those that arrived in it; stalls are those of all requests that were open.
        """
        recent = self._recent(now)
        run = RunStats(self._header, recent[0].start if recent else now)
        run.ended_at = now
        run.streams = self.streams(timeline, now)
        for each in recent:
            run.merge(each.stats)
        return run

    def streams(self, timeline: Timeline, now: float) -> list[RequestTimeline]:
        """The requests that were open in the last minute, with their longest stalls so far."""
        timeline.update_stalls()
        finished = [times for each in self._recent(now) for times in each.finished]
        return [*finished, *timeline.open.values()]

    def _recent(self, now: float) -> list[_Slice]:
        oldest = now - (NUM_SLICES + 1) * SLICE_SECONDS
        return [each for each in self._slices if each.start > oldest]
