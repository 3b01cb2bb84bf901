"""Capacity: the highest request rate at which a workload meets its targets.

For every seed, bisection finds the highest rate that its run meets; the capacity is the mean over
the seeds, with a confidence interval. One seed keeps its lengths and the pattern of its arrivals at
every rate (common random numbers); only the time between arrivals is stretched. The midpoints do not
depend on the targets, so looser targets never give a lower capacity. A run also fails if its queue
grows while requests arrive: with few requests it can meet its targets although it is over-saturated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.errors import ConfigError
from headway.lab.planner.confidence import Interval, interval
from headway.lab.planner.evaluate import Evaluator, Job, Outcome, check_completed
from headway.lab.planner.targets import Targets, duration_text, missed
from headway.lab.planner.workload import at_rate
from headway.lab.summary import Summary

TOLERANCE = 0.01  # width of the last bracket, relative to its upper end
LIGHT, ALONE = 1 / 16, 1 / 1000  # of the saturated rate; ALONE: requests hardly ever meet
AT_ONCE = 10_000  # times the saturated rate; the arrivals end within about a step
MAX_ALONE = 100  # requests whose figure a message gives
NUM_ALONE = 3  # seeds that must fail before a target is called impossible
SATURATED = "queue growth"
MIN_SPANS = 5  # mean latencies that the arrivals should last


@dataclass
class SeedSearch:
    """The search of one seed: doubles the rate until a run fails, then bisects.

    A rate below ALONE counts as 0. `low` is the highest rate that has passed, `high` the lowest that has failed.
    """

    seed: int
    start: float
    low: float = 0.0
    high: float = math.inf
    limits: Counter[str] = field(default_factory=Counter)  # what failed at the lowest failed rate

    @property
    def is_zero(self) -> bool:
        return self.high <= ALONE * self.start

    @property
    def is_done(self) -> bool:
        return self.is_zero or self.high - self.low <= TOLERANCE * self.high < math.inf

    @property
    def next_rate(self) -> float:
        if self.high == math.inf:
            return 2 * self.low or self.start
        return (self.low + self.high) / 2

    @property
    def rate(self) -> float:
        return 0.0 if self.is_zero else (self.low + self.high) / 2


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The highest rate in requests per second, and what happens above it."""

    rate: Interval
    by_seed: tuple[float, ...]
    saturated_rate: float  # of requests that all arrive at once, on seed 0
    limited_by: dict[str, int]  # seeds by what fails just above their rate
    is_short: bool  # the arrivals last too short a time for a steady state
    num_runs: int

    def replicas(self, rate: float) -> int | None:
        """Replicas for a total rate, by the lower end of the interval; None if that is 0."""
        return math.ceil(rate / self.rate.low) if self.rate.low > 0 else None


class Impossible(ConfigError):
    """Targets that no rate meets."""


def find_capacity(job: Job, seeds: Sequence[int], evaluator: Evaluator) -> Capacity:
    """The capacity for the workload, settings and targets of a job.

    ConfigError if the workload has no arrival process or too few requests, Impossible if no rate
    meets the targets.
    """
    at_rate(job.workload.requests(), 1.0)
    (at_once,) = evaluator.run([replace(job, rate=math.inf, targets=())])
    check_completed(job, at_once)
    saturated = at_once.summary["requests_per_second"]
    num_runs = 1 + _check_possible(job, seeds[:NUM_ALONE], saturated, evaluator)
    searches = [SeedSearch(seed, saturated) for seed in seeds]
    latest: dict[int, Outcome] = {}
    while active := [search for search in searches if not search.is_done]:
        jobs = [replace(job, seed=search.seed, rate=search.next_rate) for search in active]
        num_runs += len(active)
        for search, outcome in zip(active, evaluator.run(jobs), strict=True):
            if failed := failures(job.targets, outcome):
                search.high, search.limits = search.next_rate, Counter(failed)
            else:
                search.low = search.next_rate
                _check_limited(job, search)
                latest[search.seed] = outcome
    rates = tuple(search.rate for search in searches)
    limits = Counter(name for search in searches for name in search.limits)
    mean, low, high = interval(rates)
    return Capacity(
        rate=Interval(mean, max(0.0, low), high), by_seed=rates, saturated_rate=saturated,
        limited_by=dict(sorted(limits.items())), num_runs=num_runs,
        is_short=any(_is_short(outcome.summary) for outcome in latest.values()),
    )  # fmt: skip


def _check_limited(job: Job, search: SeedSearch) -> None:
    """ConfigError if a run fails nothing although its requests practically arrive at once."""
    if search.low >= AT_ONCE * search.start:
        passed = "all targets are met and the queue" if job.targets else "the queue"
        raise ConfigError(
            f"the {len(job.workload.requests())} requests of the workload are too few to find "
            f"a capacity: {passed} does not grow even at {search.low:.3g} requests/s "
            f"(seed {search.seed}); give the workload more requests"
        )


def failures(targets: Targets, outcome: Outcome) -> list[str]:
    """What a run fails: names of targets, or the growth of its queue."""
    if outcome.is_stopped:
        return [outcome.stopped_by]
    failed = [target.name for target in missed(targets, outcome.summary)]
    return [*failed, *([SATURATED] if outcome.is_saturated else [])]


def _is_short(summary: Summary) -> bool:
    """Whether requests stay so long that the arrivals end before the batch is steady."""
    return bool(summary["seconds"] < (MIN_SPANS + 1) * summary["end_to_end"]["mean"])


def _check_possible(job: Job, seeds: Sequence[int], saturated: float, evaluator: Evaluator) -> int:
    """The number of runs at low rates; Impossible if no rate meets one of the targets."""
    if not job.targets:
        return 0
    (light,) = evaluator.run([replace(job, seed=seeds[0], rate=saturated * LIGHT)])
    if not failures(job.targets, light):
        return 1
    alone = [replace(job, seed=seed, rate=saturated * ALONE) for seed in seeds]
    failed = [failures(job.targets, outcome) for outcome in evaluator.run(alone)]
    if hopeless := [t for t in job.targets if all(t.name in names for names in failed)]:
        share = min(1.0, MAX_ALONE / len(job.workload.requests()))
        # The others were stopped, so their figures are partial.
        (complete,) = evaluator.run([replace(alone[0], targets=(), share=share)])
        found = (
            f"{t} cannot be met: requests that run alone have {t.name} "
            f"{duration_text(float(f'{t.measured(complete.summary):.3g}'))} already"
            for t in hopeless
        )
        raise Impossible("; ".join(found))
    return 1 + len(alone)
