"""Latency targets: upper limits of statistics of a run, and when a run has certainly missed one.

All targets are upper limits, so no two of them contradict each other; one that another implies is
redundant. Whether a target can be met at all, `headway plan capacity` finds out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from headway.errors import ConfigError
from headway.lab.summary import Summary
from headway.record.stats import RunStats

LATENCIES = {
    "ttft": "ttft", "tbt": "time_between_tokens", "stall": "longest_stall", "e2e": "end_to_end",
}  # fmt: skip
STATISTICS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
STALL_STEPS = 64  # between two counts of stalls
MissTest = Callable[[RunStats], bool]  # after every step: whether the target is certainly missed
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
        self.missed: Target | None = None  # the first that was
        self._tests = [(target, _miss_test(target, num_requests, max_gaps)) for target in targets]

    def __call__(self, metrics: RunStats) -> bool:
        self.missed = next(
            (target for target, is_missed in self._tests if is_missed(metrics)), None
        )
        return self.missed is not None


def _miss_test(target: Target, num_requests: int, max_gaps: int) -> MissTest:
    if target.latency == "tbt":
        # A percentile of weighted values: without interpolation. Rounding must not stop a run.
        return _late_gaps(target, math.floor((1 - target.share) * max_gaps + 1e-6))
    # Values that may lie above a percentile with linear interpolation, at most.
    num_ignored = num_requests - 1 - math.floor(target.share * (num_requests - 1))
    return (_stalls if target.latency == "stall" else _late_requests)(target, num_ignored)


def _late_requests(target: Target, num_ignored: int) -> MissTest:
    """Counts requests whose time for the target is over, in order of arrival, and the misses."""
    time_of = attrgetter("first_token" if target.latency == "ttft" else "finished")
    place = num_missed = 0

    def is_missed(metrics: RunStats) -> bool:
        nonlocal place, num_missed
        requests, now = metrics.requests, metrics.ended_at
        while place < len(requests) and requests[place].arrival + target.seconds < now:
            request = requests[place]
            num_missed += not 0 <= time_of(request) - request.arrival <= target.seconds
            place += 1
        return num_missed > num_ignored

    return is_missed


def _late_gaps(target: Target, num_ignored: int) -> MissTest:
    """Counts the times between tokens above the target."""
    place, num_missed = 0, 0.0

    def is_missed(metrics: RunStats) -> bool:
        nonlocal place, num_missed
        gaps, counts = metrics.gap_seconds, metrics.gap_counts
        for i in range(place, len(gaps)):
            if gaps[i] > target.seconds:
                num_missed += counts[i]
        place = len(gaps)
        return num_missed > num_ignored

    return is_missed


def _stalls(target: Target, num_ignored: int) -> MissTest:
    """Counts the requests with a longer stall; at some steps only, because it looks at all."""
    calls = count(1)

    def is_missed(metrics: RunStats) -> bool:
        if next(calls) % STALL_STEPS:
            return False
        return sum(s > target.seconds for s in metrics.longest_stalls()) > num_ignored

    return is_missed
