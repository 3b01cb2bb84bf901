"""Latency targets: upper limits of statistics of a run, and when a run has certainly missed one.

All targets are upper limits, so no two of them contradict each other. A target that another one
implies is redundant; `redundant` names it. Whether a target can be met at all depends on profile
and workload; `headway plan capacity` finds out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.errors import ConfigError
from headway.lab.summary import Summary
from headway.record.stats import RunStats

LATENCIES = {
    "ttft": "ttft", "tbt": "time_between_tokens", "stall": "longest_stall", "e2e": "end_to_end",
}  # fmt: skip
STATISTICS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
STALL_STEPS = 64  # between two counts of stalls
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0}


class Target(NamedTuple):
    """A statistic of a latency must be at most `seconds`."""

    latency: str
    statistic: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.latency}-{self.statistic}"

    @property
    def share(self) -> float:
        """The share of values that must be at most `seconds`."""
        return STATISTICS[self.statistic]

    def __str__(self) -> str:
        return f"{self.name} {duration_text(self.seconds)}"

    def measured(self, summary: Summary) -> float:
        """The statistic in a summary, in seconds. Rejected requests count as infinitely late."""
        if summary["rejected"] > (1 - self.share) * summary["requests"]:
            return math.inf
        return float(summary[LATENCIES[self.latency]][self.statistic])


Targets = tuple[Target, ...]


def parse_duration(name: str, text: str) -> float:
    """Seconds of "200ms", "1s", "1.5" or "2m"; ConfigError if it is not a positive duration."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not 0 < float(match[1]) < 1e9:
        raise ConfigError(
            f"{name} must be a duration above 0 such as 200ms, 1s or 1.5, not {text!r}"
        )
    return float(match[1]) * UNITS[match[2]]


def duration_text(seconds: float) -> str:
    """As `parse_duration` reads it."""
    return f"{seconds * 1e3:g}ms" if seconds < 1 else f"{seconds:g}s"


def missed(targets: Targets, summary: Summary) -> list[Target]:
    """The targets that a complete run did not meet."""
    return [target for target in targets if target.measured(summary) > target.seconds]


def worst_ratio(targets: Targets, summary: Summary) -> float:
    """The largest statistic relative to its target: at most 1 if all are met; 0 without targets."""
    return max((t.measured(summary) / t.seconds for t in targets), default=0.0)


def redundant(targets: Iterable[Target]) -> list[str]:
    """A sentence for each target that another one implies."""
    given = list(targets)
    return [
        f"{weak} is redundant: {strong} implies it"
        for weak in given
        if (strong := next((t for t in given if t is not weak and _implies(t, weak)), None))
    ]


def _implies(strong: Target, weak: Target) -> bool:
    if strong.seconds > weak.seconds or strong.share < weak.share:
        return False
    if strong.latency == weak.latency:
        return True
    # The first token comes before the end, and every gap is at most the request's longest stall.
    pair = strong.latency, weak.latency
    return pair == ("e2e", "ttft") or (pair == ("stall", "tbt") and strong.statistic == "max")


class MissCounter:
    """Counts what has missed a target, and says when the target is certainly missed.

    Exact: a run is stopped only if its complete statistic would be above the target, because more
    values have missed it than the statistic ignores. Values are requests; for `tbt` they are the
    times between tokens, of which a run has at most `max_gaps`. Misses of `ttft` and `e2e` are known
    as soon as the time is over.
    """

    def __init__(self, targets: Sequence[Target], num_requests: int, max_gaps: int) -> None:
        self._counts: list[_Count | _GapCount | _StallCount] = []
        for target in targets:
            num_ignored = _num_ignored(target.share, num_requests)
            if target.latency == "tbt":
                self._counts.append(_GapCount(target, max_gaps))
            elif target.latency == "stall":
                self._counts.append(_StallCount(target, num_ignored))
            else:
                self._counts.append(_Count(target, num_ignored))
        self.missed: Target | None = None  # the first that was

    def __call__(self, metrics: RunStats) -> bool:
        self.missed = next((c.target for c in self._counts if c.is_missed(metrics)), None)
        return self.missed is not None


class _Count:
    """The requests whose time for one target is over, in order of arrival, and the misses."""

    def __init__(self, target: Target, num_ignored: int) -> None:
        self.target, self._seconds, self._num_ignored = target, target.seconds, num_ignored
        self._field = "first_token" if target.latency == "ttft" else "finished"
        self._next = self._num_missed = 0

    def is_missed(self, metrics: RunStats) -> bool:
        requests, now = metrics.requests, metrics.ended_at
        while self._next < len(requests):
            request = requests[self._next]
            if request.arrival + self._seconds >= now:
                break
            reached = getattr(request, self._field)
            self._num_missed += not 0 <= reached - request.arrival <= self._seconds
            self._next += 1
        return self._num_missed > self._num_ignored


class _GapCount:
    """The times between tokens above the target."""

    def __init__(self, target: Target, max_gaps: int) -> None:
        self.target, self._seconds = target, target.seconds
        # A percentile of weighted values: without interpolation. Rounding must not stop a run.
        self._num_ignored = math.floor((1 - target.share) * max_gaps + 1e-6)
        self._next, self._num_missed = 0, 0.0

    def is_missed(self, metrics: RunStats) -> bool:
        gaps = metrics.gap_seconds
        for place in range(self._next, len(gaps)):
            if gaps[place] > self._seconds:
                self._num_missed += metrics.gap_counts[place]
        self._next = len(gaps)
        return self._num_missed > self._num_ignored


class _StallCount:
    """The requests with a longer stall; counted at some steps only, because it looks at all."""

    def __init__(self, target: Target, num_ignored: int) -> None:
        self.target, self._seconds = target, target.seconds
        self._num_ignored, self._num_calls = num_ignored, 0

    def is_missed(self, metrics: RunStats) -> bool:
        self._num_calls += 1
        if self._num_calls % STALL_STEPS:
            return False
        return sum(s > self._seconds for s in metrics.longest_stalls()) > self._num_ignored


def _num_ignored(share: float, num_values: int) -> int:
    """Values that may lie above a percentile with linear interpolation, at most."""
    return num_values - 1 - math.floor(share * (num_values - 1))
