"""OpenTelemetry spans of every request: queue, prefill, decode, and preempted while it waits again.

Exports over OTLP/HTTP as the standard OTEL_* environment variables say, or through the tracer
provider that the embedding program has set. A request's span is the child of the W3C `traceparent`
that came with it. Nothing of OpenTelemetry is loaded unless `install` is called. Times are the
engine's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from headway import __version__
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import Submit
from headway.errors import ConfigError
from headway.plan import StepReport
from headway.request import Request
from headway.sampling_params import Sampling

SERVICE_NAME = "headway"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say otherwise
FLUSH_SECONDS = 1.5  # for the last spans to be exported when the engine ends
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_installed() -> None:
    """ConfigError with the command to run if OpenTelemetry is not installed."""
    for name in NEEDED:
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it
            is_there = False
        if not is_there:
            raise ConfigError(
                f"--spans needs {name}, which is not installed: pip install 'headway[otel]'"
            )


def install(loop: EngineLoop, model_name: str) -> Callable[[], None]:
    """Trace every request of a loop. Returns a function that exports what is left and stops."""
    check_installed()
    from opentelemetry import trace

    shut_down: Callable[[], None] = _do_nothing
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # none is set
        provider = _make_provider()
        trace.set_tracer_provider(provider)
        shut_down = provider.shutdown
    spans = Spans(loop.engine, trace.get_tracer("headway", __version__), model_name)
    loop.engine.observers.append(spans)
    loop.on_submit.append(spans.expect)
    return lambda: _within(FLUSH_SECONDS, shut_down)


def _make_provider() -> Any:
    """An SDK provider that exports in batches over OTLP/HTTP; the SDK reads OTEL_* by itself."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `install` bounds it
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do work, but wait no longer than this: a collector may not answer."""
    thread = threading.Thread(target=work, name="spans", daemon=True)
    thread.start()
    thread.join(seconds)


def _do_nothing() -> None:
    """The embedding program shuts down the provider that it has set."""


class Spans:
    """An observer; a request's spans are made when it ends."""

    def __init__(self, engine: Engine, tracer: Any, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._engine, self._tracer, self._model_name = engine, tracer, model_name
        self._extract = TraceContextTextMapPropagator().extract
        self._epoch = time.time() - engine.clock.now()  # Unix time at which the clock was 0
        self._phases: dict[Request, list[tuple[str, float]]] = {}  # each with its beginning
        self._parents: dict[Request, str] = {}

    def expect(self, message: Submit, requests: list[Request]) -> None:
        """Note the trace context that a request came with."""
        if message.traceparent:
            self._parents.update(dict.fromkeys(requests, message.traceparent))

    def __call__(self, report: StepReport) -> None:
        plan, now = report.plan, report.result.ended or self._engine.clock.now()
        self._phases.update({r: [("queue", r.arrival)] for r in plan.events.added})
        began = [
            (p.request, "preempted", plan.events.schedule_ended) for p in plan.events.preempted
        ]
        began += [(a.request, "prefill", plan.events.schedule_ended) for a in plan.admitted]
        began += [(chunk.request, "decode", now) for chunk in plan.chunks if chunk.is_last]
        for request, phase, start in began:
            if request in self._phases:
                self._phases[request].append((phase, start))
        for request in report.finished:
            self._emit(request, self._phases.pop(request, []), now)

    def _emit(self, request: Request, phases: list[tuple[str, float]], end: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {"traceparent": self._parents.pop(request, "")}
        whole = self._tracer.start_span(
            "llm_request", context=self._extract(carrier), kind=SpanKind.SERVER,
            start_time=self._stamp(request.arrival),
            attributes=self._attributes(request) | _latencies(request, phases, end),
        )  # fmt: skip
        if request.finish_reason == "error":
            whole.set_attribute("error.type", (request.error or "error").partition(":")[0])
            whole.set_status(Status(StatusCode.ERROR, request.error))
        context, ends = set_span_in_context(whole), [begin for _, begin in phases[1:]] + [end]
        for (phase, begin), stop in zip(phases, ends, strict=True):
            span = self._tracer.start_span(phase, context=context, start_time=self._stamp(begin))
            span.end(end_time=self._stamp(max(begin, stop)))
        whole.end(end_time=self._stamp(end))

    def _attributes(self, request: Request) -> dict[str, Any]:
        """What was asked for and what came of it, under the names of the semantic conventions."""
        params, sampling = request.params, request.params.sampling
        found: dict[str, Any] = {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.id,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": request.num_prompt,
            "gen_ai.usage.output_tokens": request.num_generated if params.pooling is None else 0,
            "gen_ai.usage.cache_read.input_tokens": request.history.num_cached,
            "gen_ai.response.finish_reasons": (request.finish_reason or "abort",),
            "headway.num_preemptions": request.history.num_preemptions,
        }
        if params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = params.max_tokens
        if isinstance(sampling, Sampling):
            found["gen_ai.request.temperature"] = float(sampling.temperature)
            found["gen_ai.request.top_p"] = float(sampling.top_p)
        return found

    def _stamp(self, seconds: float) -> int:
        return int((self._epoch + seconds) * 1e9)


def _latencies(
    request: Request, phases: list[tuple[str, float]], end: float
) -> dict[str, float]:  # fmt: skip
    """Seconds, under the names that vLLM gives them."""
    found, begins = {"gen_ai.latency.e2e": end - request.arrival}, dict(reversed(phases))
    if "prefill" in begins:
        found["gen_ai.latency.time_in_queue"] = begins["prefill"] - request.arrival
    if "decode" in begins:
        found["gen_ai.latency.time_to_first_token"] = begins["decode"] - request.arrival
    return found
