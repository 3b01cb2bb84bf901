"""The statistics of a whole run, from the events of an engine or of a journal file.

Memory grows by a few numbers for each request and each step.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from headway.events import Added, Completed, Event, Planned, preempted_by
from headway.record.lines import HeaderLine, Line
from headway.record.reader import EventReader, split_header
from headway.record.timeline import RequestTimeline, StepStats, Timeline

PERCENTILES = (50, 90, 99, 99.9)
STATISTICS = ("mean", *(f"p{p:g}" for p in PERCENTILES), "max")  # keys of a latency
FIRST_BOUND, FACTOR = 256, 4  # of the classes of prompt length: 0-255, 256-1023, 1024-4095, ...
PER_STEP = ("running", "waiting", "free", "tokens", "prefill", "decodes", "seconds")


class RunStats:
    """Counts one run; call it with every event.

    `count` counts an event that a timeline outside has followed. `started` is the time at which a
    part of a run begins.
    """

    def __init__(self, header: HeaderLine, started: float | None = None) -> None:
        self.header = header
        self.config = header.config
        self.started_at = started  # None: the first arrival
        self.totals: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # steps in which a request waited for this reason
        self.requests: list[RequestTimeline] = []  # in the order of arrival
        self.streams: list[RequestTimeline] | None = None  # whose stalls count; None: requests
        self.steps: dict[str, array[float]] = {name: array("d") for name in PER_STEP}
        self.swap_ins = array("d")  # seconds of each step that copied blocks from the host
        # Times between tokens in seconds, and the number of tokens that each was measured for.
        self.gap_seconds, self.gap_counts = array("d"), array("d")
        self.ended_at = 0.0
        self._timeline = Timeline(started or 0.0)

    def __call__(self, event: Event) -> None:
        stats = self._timeline.follow(event)
        if type(event) is not Planned or event.plan.preempted:  # else there is nothing to count
            self.count(event, stats, self._timeline)

    def merge(self, other: RunStats) -> None:
        """Add another part of the same run: later steps, or those of another replica."""
        other._timeline.update_stalls()
        self.totals.update(other.totals)
        self.reasons.update(other.reasons)
        self.requests += other.requests
        for name, column in other.steps.items():
            self.steps[name].extend(column)
        self.swap_ins.extend(other.swap_ins)
        self.ended_at = max(self.ended_at, other.ended_at)
        self.gap_seconds.extend(other.gap_seconds)
        self.gap_counts.extend(other.gap_counts)

    def add_gap(self, seconds: float) -> None:
        """Add one time between tokens that no step has."""
        self.gap_seconds.append(seconds)
        self.gap_counts.append(1)

    def count(self, event: Event, stats: StepStats, timeline: Timeline) -> None:
        totals = self.totals
        if isinstance(event, Completed):
            self._count_step(event, stats)
        elif preempted := preempted_by(event):
            for preemption in preempted:
                totals["swaps" if preemption.is_swap else "recomputes"] += 1
                totals["priority_preemptions"] += preemption.is_priority
        elif isinstance(event, Added):
            self.requests += [timeline.open[request] for request in event.requests]
        if stats.finished:
            self._count_finished(stats)

    def _count_step(self, event: Completed, stats: StepStats) -> None:
        planned, result, steps, totals = event.planned, event.result, self.steps, self.totals
        plan = planned.plan
        if stats.num_admitted:
            totals["prompt_tokens"] += stats.num_admitted
            totals["cached_tokens"] += stats.num_hit
        steps["running"].append(planned.num_running)
        steps["waiting"].append(planned.num_waiting)
        steps["free"].append(planned.num_free)
        steps["tokens"].append(stats.num_prefill + len(plan.decodes) + plan.num_drafted)
        steps["prefill"].append(stats.num_prefill)
        steps["decodes"].append(stats.num_computed - stats.num_prefill)
        steps["seconds"].append(stats.now - result.started)
        totals["computed_tokens"] += stats.num_computed
        if plan.drafts:
            totals["num_draft_steps"] += stats.num_draft_steps
            totals["num_drafted"] += stats.num_drafted
            totals["num_accepted"] += stats.num_accepted
        if plan.copies_out or plan.copies_in:
            totals["blocks_out"] += len(plan.copies_out)
            totals["blocks_in"] += len(plan.copies_in)
        if result.swap_in:
            self.swap_ins.append(result.swap_in)
        if stats.now > self.ended_at:
            self.ended_at = stats.now
        if plan.blocked or plan.not_considered:
            rest = [plan.not_considered.reason] if plan.not_considered else []
            for reason in {*rest, *[blocked.reason for blocked in plan.blocked]}:
                self.reasons[reason] += 1
        for seconds, count in stats.gaps:
            self.gap_seconds.append(seconds)
            self.gap_counts.append(count)

    def _count_finished(self, stats: StepStats) -> None:
        for _, times in stats.finished:
            self.totals["recomputed_tokens"] += times.num_recomputed
            self.totals["output_tokens"] += times.num_output
            self.totals[f"finished_{times.finish_reason}"] += 1
            times.phases.clear()  # only spans and Perfetto files use them

    def gaps(self) -> dict[str, float]:
        """Mean, percentiles and maximum of the times between tokens; zeros without any."""
        gaps, counts = np.asarray(self.gap_seconds), np.asarray(self.gap_counts)
        if not len(gaps):
            return dict.fromkeys(STATISTICS, 0.0)
        order = np.argsort(gaps)
        reached, total = np.cumsum(counts[order]), counts.sum()
        marks = [float(gaps[order][np.argmax(reached >= p / 100 * total)]) for p in PERCENTILES]
        values = (float(np.average(gaps, weights=counts)), *marks, float(gaps.max()))
        return dict(zip(STATISTICS, values, strict=True))

    def longest_stalls(self) -> list[float]:
        """The largest time between tokens of each request that has two tokens."""
        self._timeline.update_stalls()
        return stalls_of(self.requests if self.streams is None else self.streams)


def stats_of(journal: Iterable[HeaderLine | Line]) -> RunStats:
    header, lines = split_header(journal)
    stats, reader = RunStats(header), EventReader(header)
    for line in lines:
        stats(reader.event(line))
    return stats


def stalls_of(requests: Iterable[RequestTimeline]) -> list[float]:
    """The longest stalls of the requests that have two tokens."""
    return [x.longest_stall for x in requests if x.num_output > 1 or x.longest_stall]


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles and maximum of values; zeros without any."""
    array_: npt.NDArray[np.float64] = np.fromiter(values, dtype=np.float64)
    if not len(array_):
        return dict.fromkeys(STATISTICS, 0.0)
    marks = (array_.mean(), *np.percentile(array_, PERCENTILES), array_.max())
    return dict(zip(STATISTICS, map(float, marks), strict=True))


def by_prompt_length(
    values: Iterable[tuple[int, float]],
) -> Iterator[tuple[int, int, list[float]]]:
    """Values by class of prompt length [from, to), shortest first; classes without any are left out."""
    classes: dict[int, list[float]] = defaultdict(list)
    for num_prompt, value in values:
        bound = FIRST_BOUND
        while num_prompt >= bound:
            bound *= FACTOR
        classes[bound].append(value)
    for bound, found in sorted(classes.items()):
        yield bound // FACTOR if bound > FIRST_BOUND else 0, bound, found
