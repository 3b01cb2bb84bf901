"""OpenTelemetry spans of every request: queue, prefill, decode, and preempted while it waits again.

Nothing of it is loaded unless `install` is called. Times are the engine's own.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.plan import StepReport
from headway.request import Request


def install(engine: Engine) -> None:
    """Trace an engine through whatever provider OpenTelemetry is set up with."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
    except ModuleNotFoundError:
        raise ConfigError("spans need OpenTelemetry: pip install opentelemetry-sdk") from None
    engine.observers.append(Spans(engine, trace.get_tracer("headway"), trace.set_span_in_context))


class Spans:
    """An observer; a request's spans are made when it ends."""

    def __init__(self, engine: Engine, tracer: Any, inside: Any) -> None:
        self._engine, self._tracer, self._inside = engine, tracer, inside
        self._epoch = time.time() - engine.clock.now()  # the engine's clock began then
        self._phases: dict[Request, list[tuple[str, float]]] = {}  # each with its beginning

    def __call__(self, report: StepReport) -> None:
        plan, now = report.plan, report.result.ended or self._engine.clock.now()
        self._phases.update({r: [("queue", r.arrival)] for r in plan.added})
        began = [(p.request, "preempted", plan.planned_at) for p in plan.preempted]
        began += [(a.request, "prefill", plan.planned_at) for a in plan.admitted]
        began += [(chunk.request, "decode", now) for chunk in plan.chunks if chunk.is_last]
        for request, phase, start in began:
            if request in self._phases:
                self._phases[request].append((phase, start))
        for request in report.finished:
            self._emit(request, self._phases.pop(request, []), now)

    def _emit(self, request: Request, phases: list[tuple[str, float]], end: float) -> None:
        facts = {"request.id": request.id, "finish_reason": request.finish_reason or ""}
        num_output = request.num_generated if request.params.pooling is None else 0
        counts = {"prompt_tokens": request.num_prompt, "output_tokens": num_output}
        start, attributes = self._stamp(request.arrival), facts | counts
        whole = self._tracer.start_span("request", start_time=start, attributes=attributes)
        context, ends = self._inside(whole), [begin for _, begin in phases[1:]] + [end]
        for (phase, begin), stop in zip(phases, ends, strict=True):
            span = self._tracer.start_span(phase, context=context, start_time=self._stamp(begin))
            span.end(end_time=self._stamp(max(begin, stop)))
        whole.end(end_time=self._stamp(end))

    def _stamp(self, seconds: float) -> int:
        return int((self._epoch + seconds) * 1e9)
