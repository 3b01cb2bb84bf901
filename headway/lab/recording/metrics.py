"""Named numbers of one run: what a story promises, and the recording shows.

A metric is a path into the run's summary (`steps`, `ttft.mean`) or a function from METRICS with its
arguments: `admitted(r3)` is the step in which r3 was first admitted, `admitted(r3, 2)` its second
admission. A request id that ends in `*` stands for all requests with this beginning; their mean is
taken. Times are in seconds, shares from 0 to 1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

from headway.errors import ConfigError
from headway.events import Completed, Event, Planned, ended_by, preempted_by
from headway.lab.summary import Summary, summarize
from headway.plan import Plan
from headway.record.stats import RunStats
from headway.record.timeline import RequestTimeline
from headway.record.writer import header
from headway.scheduler.policies.presets import preset

FORM = re.compile(r"([a-z_]+(?:\.\w+)*)(?:\(([^()]*)\))?")


class RunMetrics:
    """Follows a run event by event, and evaluates metrics when it has ended."""

    def __init__(self, stats: RunStats) -> None:
        self.stats = stats
        self._events: dict[tuple[str, str], list[int]] = defaultdict(list)  # kind and id
        self._places: dict[int, int] = {}  # of a step in the statistics, which count steps alone
        self._step = -1  # of the latest plan
        self.num_read = 0  # tokens that the attention of all chunks reads

    def follow(self, event: Event) -> None:
        """Note what an event does. `stats` must have counted it."""
        if isinstance(event, Planned):
            self._step = event.plan.step
            if not event.plan.is_empty:
                self._plan(event.plan)
        elif isinstance(event, Completed):
            self._places[event.plan.step] = len(self._places)
        for preemption in preempted_by(event):
            self._events["preempted", preemption.request.id].append(self._step)
            self._events["victims", ""].append(self._step)
        for request in ended_by(event):
            step = event.plan.step if isinstance(event, Completed) else self._step
            self._events["finished", request.id].append(step)

    def _plan(self, plan: Plan) -> None:
        for admission in plan.admitted:
            id = admission.request.id
            self._events["admitted", id].append(plan.step)
            self._events["admissions", ""].append(plan.step)
            self._events["cached", id].append(admission.num_cached)
        for chunk in plan.chunks:
            self._events["chunk", chunk.request.id].append(chunk.end - chunk.start)
            self.num_read += chunk.end
        for request, _ in plan.new_blocks:
            self._events["new_block", request.id].append(plan.step)

    def value(self, metric: str) -> float | None:
        """The value of a metric; None if the run has no such request, event or step.

        ConfigError if the metric is unknown.
        """
        name, arguments = parse_metric(metric)
        if name in METRICS:
            found = METRICS[name][1](self, *arguments)
            return None if found is None else float(found)
        return float(_look_up(summarize(self.stats), name))

    def event(self, kind: str, id: str, count: str = "1") -> int | None:
        """The value of the count-th event of this kind."""
        events = self._events.get((kind, id), [])
        return events[int(count) - 1] if int(count) <= len(events) else None

    def count(self, kind: str, step: str) -> int:
        """Events of this kind in a step."""
        return self._events[kind, ""].count(int(step))

    def mean(self, id: str, value: Callable[[RequestTimeline], float]) -> float | None:
        """The mean over one request, or over all whose ids begin with the text before a `*`.

        Negative values are left out: the request has not come that far.
        """
        start = id.removesuffix("*")
        values = [
            value(request)
            for request in self.stats.requests
            if request.id == id or (start != id and request.id.startswith(start))
        ]
        values = [each for each in values if each >= 0]
        return sum(values) / len(values) if values else None

    def at_step(self, column: str, step: str) -> float | None:
        place = self._places.get(int(step))
        return None if place is None else self.stats.steps[column][place]

    def running_share(self, id: str) -> float | None:
        """The mean share of max_num_seqs in use while this request runs."""
        first, last = self.event("admitted", id), self.event("finished", id)
        if first not in self._places or last not in self._places:
            return None
        counts = self.stats.steps["running"][self._places[first] : self._places[last] + 1]
        return sum(counts) / len(counts) / int(self.stats.config["max_num_seqs"])


Function = Callable[..., float | None]
ID, NTH, STEP, NONE = r"[^,]+", r"[^,]+(,\s*[1-9]\d*)?", r"\d+", ""  # forms of the arguments


def _event(kind: str) -> Function:
    return lambda run, request, count="1": run.event(kind, request, count)


def _mean(time: Callable[[RequestTimeline], float]) -> Function:
    return lambda run, request: run.mean(request, time)


def _at_step(column: str) -> Function:
    return lambda run, step: run.at_step(column, step)


METRICS: dict[str, tuple[str, Function]] = {
    "admitted": (NTH, _event("admitted")),  # steps
    "preempted": (NTH, _event("preempted")),
    "new_block": (NTH, _event("new_block")),
    "finished": (ID, _event("finished")),
    "cached": (NTH, _event("cached")),  # tokens of an admission that were found in the cache
    "chunk": (NTH, _event("chunk")),  # tokens of a chunk
    "ttft": (ID, _mean(lambda request: request.first_token - request.arrival)),
    "queue_time": (ID, _mean(lambda request: request.admitted - request.arrival)),
    "output": (ID, _mean(lambda request: request.num_output)),
    "running_share": (ID, RunMetrics.running_share),
    "running_at": (STEP, _at_step("running")),
    "decodes_at": (STEP, _at_step("decodes")),
    "tokens_at": (STEP, _at_step("tokens")),
    "admitted_at": (STEP, lambda run, step: run.count("admissions", step)),
    "preempted_at": (STEP, lambda run, step: run.count("victims", step)),
    "first_preemption": (NONE, lambda run: run.event("victims", "")),
    "tokens_read": (NONE, lambda run: run.num_read),
    "longest_step": (NONE, lambda run: max(run.stats.steps["seconds"], default=None)),
    "busy_seconds": (NONE, lambda run: sum(run.stats.steps["seconds"])),
    "longest_gap": (NONE, lambda run: run.stats.gaps()["max"]),
}


def parse_metric(metric: str) -> tuple[str, list[str]]:
    """Name and arguments of a metric; ConfigError if it is not known."""
    match = FORM.fullmatch(metric)
    if not match or (match[1] not in METRICS and (match[2] or not _is_in_summary(match[1]))):
        known = ", ".join(METRICS)
        raise ConfigError(f"unknown metric {metric!r}; known: {known}, and keys of a summary")
    name, arguments = match[1], match[2] or ""
    if name in METRICS and not re.fullmatch(METRICS[name][0], arguments):
        raise ConfigError(f"metric {metric!r} has wrong arguments")
    return name, [each.strip() for each in arguments.split(",")] if arguments else []


@cache
def _is_in_summary(path: str) -> bool:
    summary = summarize(RunStats(header(preset(), False)))
    return isinstance(_look_up(summary, path), int | float)


def _look_up(summary: Summary, path: str) -> Any:
    value: Any = summary
    for key in path.split(".", 1):  # a key may have a dot: p99.9
        value = value.get(key) if isinstance(value, dict) else None
    return value
