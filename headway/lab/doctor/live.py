"""The doctor of a running engine: findings over the last minute, and its recent steps for a trial.

The engine keeps the steps of the last minutes, without token ids. A step in which only decodes run
costs a few microseconds. A trial, which another process makes (see trial.py), fetches the steps in
parts, so that no query delays a step for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from itertools import islice

from headway.engine.engine import Engine
from headway.engine.loop import CachedReader, EngineLoop
from headway.engine.queries import (
    Document,
    EndTrial,
    GetDiagnosis,
    GetTrialLines,
    StartTrial,
    TrialStart,
)
from headway.events import Event
from headway.lab.cost import Model
from headway.lab.doctor.diagnose import diagnose
from headway.lab.summary import summarize
from headway.observe.server_metrics import ServerMetrics
from headway.record.lines import AddedLine, Line, PlannedLine, RequestLine, ends_of, time_of
from headway.record.writer import LineMaker, header

MAX_LINES, MAX_SECONDS = 120_000, 300.0  # events that are kept; a step has two
NUM_PER_QUERY = 400  # events in one answer, which takes about a millisecond
TRIAL_SECONDS = 120.0  # after which a trial that has not ended may be replaced


def install(loop: EngineLoop, metrics: ServerMetrics, model: Model | None = None) -> None:
    """Answer the queries of the doctor and of its trials."""
    trace, latest = RecentTrace(loop.engine, model), CachedReader(loop.engine, metrics.recent)
    loop.engine.observers.append(trace)

    def diagnosis() -> Document:
        stats = latest.get()[0]
        summary = summarize(stats)
        findings = diagnose(summary, stats.config) if summary["steps"] else []
        return {
            "seconds": summary["seconds"], "vitals": metrics.snapshot()["vitals"],
            "findings": [finding._asdict() for finding in findings],
            "config": stats.config, "summary": summary,
        }  # fmt: skip

    loop.handle(GetDiagnosis, lambda _: diagnosis())
    loop.handle(StartTrial, lambda _: trace.start())
    loop.handle(GetTrialLines, lambda query: trace.lines(query.first))
    loop.handle(EndTrial, lambda _: trace.end())


class RecentTrace:
    """An observer that keeps the latest steps. Use it on the engine's thread."""

    def __init__(self, engine: Engine, model: Model | None = None) -> None:
        self._engine, self._model = engine, model
        self._lines: deque[Line] = deque()
        self._num_dropped = 0
        # Requests that are open when the kept lines begin, and their tokens found in the cache.
        self._before: dict[str, tuple[RequestLine, int | None]] = {}
        self._line_of = LineMaker(redact=True).line
        self._trial_ends = 0.0  # until then no other trial may start
        self._drop_at = 0.0  # the time from which the oldest line is too old

    def __call__(self, event: Event) -> None:
        lines = self._lines
        lines.append(self._line_of(event))
        if len(lines) > MAX_LINES or event.time > self._drop_at:
            oldest = event.time - MAX_SECONDS
            while (first := time_of(lines[0])) < oldest or len(lines) > MAX_LINES:
                self._drop(lines.popleft())
            self._drop_at = first + MAX_SECONDS

    def start(self) -> TrialStart | None:
        """What a trial needs besides the steps; None if another trial runs."""
        now = self._engine.clock.now()
        if now < self._trial_ends:
            return None
        self._trial_ends = now + TRIAL_SECONDS
        scheduler = self._engine.scheduler
        return TrialStart(
            header=header(scheduler.config, self._engine.async_scheduling, is_redacted=True),
            model=None if self._model is None else asdict(self._model),
            before=list(self._before.values()),
            generated={id: r.num_generated for id, r in scheduler.requests.items()},
            first=self._num_dropped, end=self._num_dropped + len(self._lines),
        )  # fmt: skip

    def lines(self, first: int) -> list[Line]:
        """The next kept steps from this number on; fewer if some were dropped meanwhile."""
        begin = max(0, first - self._num_dropped)
        end = max(begin, first + NUM_PER_QUERY - self._num_dropped)
        return list(islice(self._lines, begin, end))

    def end(self) -> None:
        self._trial_ends = 0.0

    def _drop(self, line: Line) -> None:
        """Follow the requests of a line that is no longer kept."""
        self._num_dropped += 1
        before = self._before
        if isinstance(line, PlannedLine):
            for id, num_cached, _, is_resume in line.admitted:
                if id in before and not is_resume:
                    before[id] = before[id][0], num_cached
            return
        for end in ends_of(line):
            before.pop(end.id, None)
        if isinstance(line, AddedLine):
            before.update((each.id, (each, None)) for each in line.requests)
