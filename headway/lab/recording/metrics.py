"""Named numbers of one run: what a story promises, and the recording shows.

A metric is a path into the run's summary (`steps`, `ttft.mean`) or a function from METRICS with its
arguments, such as `admitted(r3, 2)`; docs/course/write-a-story.md lists them. Times are in seconds,
shares from 0 to 1.
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
        # By kind and id; None: of any request.
        self._events: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        self._places: dict[int, int] = {}  # of a step in the statistics, which count steps alone
        self._step = -1  # of the latest plan
        self.num_read = 0  # tokens that the attention of all chunks reads

    def follow(self, event: Event) -> None:
        """Note what an event does. `stats` must have counted it."""
        step = self._step
        if isinstance(event, Planned):
            step = self._step = event.plan.step
            self._plan(event.plan)
        elif isinstance(event, Completed):
            step = event.plan.step
            self._places[step] = len(self._places)
        for preemption in preempted_by(event):
            self._note("preempted", preemption.request.id, step)
        for request in ended_by(event):
            self._note("finished", request.id, step)

    def _plan(self, plan: Plan) -> None:
        for admission in plan.admitted:
            self._note("admitted", admission.request.id, plan.step)
            self._note("cached", admission.request.id, admission.num_cached)
        for chunk in plan.chunks:
            self._note("chunk", chunk.request.id, chunk.end - chunk.start)
            self.num_read += chunk.end
        for request, _ in plan.new_blocks:
            self._note("new_block", request.id, plan.step)

    def _note(self, kind: str, id: str, value: int) -> None:
        """Note an event of a request, and of the run."""
        self._events[kind, id].append(value)
        self._events[kind, None].append(value)

    def value(self, metric: str) -> float | None:
        """The value of a metric; None if the run has no such request, event or step.

        ConfigError if the metric is unknown.
        """
        name, arguments = parse_metric(metric)
        if name in METRICS:
            found = METRICS[name][1](self, *arguments)
            return None if found is None else float(found)
        return float(_look_up(summarize(self.stats), name))

    def event(self, kind: str, id: str | None, count: str = "1") -> int | None:
        """The value of the count-th event of this kind."""
        events = self._events.get((kind, id), [])
        return events[int(count) - 1] if int(count) <= len(events) else None

    def count(self, kind: str, step: str) -> int:
        """Events of this kind in a step."""
        return self._events[kind, None].count(int(step))

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


ID, NTH, STEP, NONE = r"[^,]+", r"[^,]+(,\s*[1-9]\d*)?", r"\d+", ""  # forms of the arguments
METRICS: dict[str, tuple[str, Callable[..., float | None]]] = {
    "admitted": (NTH, lambda run, *nth: run.event("admitted", *nth)),  # steps
    "preempted": (NTH, lambda run, *nth: run.event("preempted", *nth)),
    "new_block": (NTH, lambda run, *nth: run.event("new_block", *nth)),
    "finished": (ID, lambda run, at: run.event("finished", at)),
    "cached": (NTH, lambda run, *nth: run.event("cached", *nth)),  # tokens, of an admission
    "chunk": (NTH, lambda run, *nth: run.event("chunk", *nth)),  # tokens of a chunk
    "ttft": (ID, lambda run, at: run.mean(at, lambda r: r.first_token - r.arrival)),
    "queue_time": (ID, lambda run, at: run.mean(at, lambda r: r.admitted - r.arrival)),
    "output": (ID, lambda run, at: run.mean(at, lambda r: r.num_output)),
    "running_share": (ID, RunMetrics.running_share),
    "running_at": (STEP, lambda run, step: run.at_step("running", step)),
    "decodes_at": (STEP, lambda run, step: run.at_step("decodes", step)),
    "tokens_at": (STEP, lambda run, step: run.at_step("tokens", step)),
    "admitted_at": (STEP, lambda run, step: run.count("admitted", step)),
    "preempted_at": (STEP, lambda run, step: run.count("preempted", step)),
    "first_preemption": (NONE, lambda run: run.event("preempted", None)),
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
