"""The doctor of a running engine: findings over the last minute, and its recent steps for a trial.

The engine keeps the steps of the last minutes, without token ids. A step in which only decodes run
costs a few microseconds. A trial, which another process makes (see trial.py), fetches the steps in
parts, so that no query delays a step for long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from itertools import islice
from typing import Any

from headway.engine.engine import Engine
from headway.engine.loop import CachedReader, EngineLoop
from headway.lab.cost import Model
from headway.lab.doctor.diagnose import diagnose
from headway.lab.summary import summarize
from headway.observe.server_metrics import ServerMetrics
from headway.observe.trace import Line, describe_step, header
from headway.plan import StepReport

MAX_LINES, MAX_SECONDS = 30_000, 300.0  # steps that are kept
NUM_PER_QUERY = 200  # steps in one answer, which takes about a millisecond
TRIAL_SECONDS = 120.0  # after which a trial that has not ended may be replaced


def install(loop: EngineLoop, metrics: ServerMetrics, model: Model | None = None) -> None:
    """Answer the queries "doctor", "trial_start", "trial_lines" and "trial_end" of a loop."""
    trace, latest = RecentTrace(loop.engine, model), CachedReader(loop.engine, metrics.recent)
    loop.engine.observers.append(trace)

    def diagnosis(_: Any) -> dict[str, Any]:
        stats = latest.get()[0]
        summary = summarize(stats)
        findings = diagnose(summary, stats.config) if summary["steps"] else []
        return {
            "seconds": summary["seconds"], "vitals": metrics.snapshot()["vitals"],
            "findings": [finding._asdict() for finding in findings],
            "config": stats.config, "summary": summary,
        }  # fmt: skip

    loop.concurrent_queries["doctor"] = diagnosis
    loop.step_queries |= {
        "trial_start": trace.start, "trial_lines": trace.lines, "trial_end": trace.end,
    }  # fmt: skip


class RecentTrace:
    """An observer that keeps the latest steps. Use it on the engine's thread."""

    def __init__(self, engine: Engine, model: Model | None = None) -> None:
        self._engine, self._model = engine, model
        self._lines: deque[Line] = deque()
        self._num_dropped = 0
        self._before: dict[str, Line] = {}  # requests that are open when the kept steps begin
        self._trial_ends = 0.0  # until then no other trial may start

    def __call__(self, report: StepReport) -> None:
        line = describe_step(report, redact=True) if _has_changes(report) else _times(report)
        self._lines.append(line)
        oldest = line["t"] - MAX_SECONDS
        while len(self._lines) > MAX_LINES or self._lines[0]["t"] < oldest:
            self._drop(self._lines.popleft())

    def start(self, _: Any = None) -> dict[str, Any] | None:
        """What a trial needs besides the steps; None if another trial runs."""
        now = self._engine.clock.now()
        if now < self._trial_ends:
            return None
        self._trial_ends = now + TRIAL_SECONDS
        scheduler = self._engine.scheduler
        return {
            "header": header(scheduler.config, self._engine.async_scheduling, is_redacted=True),
            "model": None if self._model is None else asdict(self._model),
            "before": list(self._before.values()),
            "generated": {id: r.num_generated for id, r in scheduler.requests.items()},
            "first": self._num_dropped, "end": self._num_dropped + len(self._lines),
        }  # fmt: skip

    def lines(self, first: int) -> list[Line]:
        """The next kept steps from this number on; fewer if some were dropped meanwhile."""
        begin = max(0, first - self._num_dropped)
        end = max(begin, first + NUM_PER_QUERY - self._num_dropped)
        return list(islice(self._lines, begin, end))

    def end(self, _: Any = None) -> None:
        """Allow the next trial."""
        self._trial_ends = 0.0

    def _drop(self, line: Line) -> None:
        """Follow the requests of a step that is no longer kept."""
        self._num_dropped += 1
        before = self._before
        for entry in line.get("added", ()):
            before[entry["id"]] = entry
        for id, num_cached, _, is_resume in line.get("admitted", ()):
            if id in before and not is_resume:
                before[id] = {**before[id], "cached": num_cached}
        for finished in line.get("finished", ()):
            before.pop(finished["id"], None)


def _has_changes(report: StepReport) -> bool:
    """Whether a step does more than to decode."""
    plan, events = report.plan, report.plan.events
    return bool(
        plan.chunks or report.finished or plan.admitted or events.added or events.preempted
        or plan.tokens_kept or plan.deferred or plan.copies_out or plan.copies_in
        or events.aborted or events.aborted_in_flight
    )  # fmt: skip


def _times(report: StepReport) -> Line:
    """A step of decodes alone, without the reasons of waiting requests."""
    plan, result, events = report.plan, report.result, report.plan.events
    return {
        "step": plan.step, "t": events.schedule_ended, "start": result.started, "end": result.ended,
        "running": events.num_running, "waiting": events.num_waiting, "free": events.num_free,
        "decodes": len(plan.decodes), "decode_context": plan.decode_context,
        "num_steps": plan.num_steps, "in_flight": events.num_in_flight,
    }  # fmt: skip
