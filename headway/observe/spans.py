"""OpenTelemetry spans for every request, with child spans queue, prefill, decode and preempted.

Spans are exported over OTLP/HTTP as the standard OTEL_* environment variables configure it, or
through the tracer provider of the embedding program. The W3C `traceparent` of a request is the
parent of its span. OpenTelemetry is imported only when `install` is called. Times come from the
engine's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from headway import __version__
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import Submit
from headway.errors import ConfigError
from headway.events import Event
from headway.record.timeline import NEVER, RequestTimeline, Timeline
from headway.request import Request
from headway.sampling_params import Sampling

SERVICE_NAME = "headway"  # the default without OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
FLUSH_SECONDS = 1.5  # time limit for the export of the last spans
REQUIRED_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
Attributes = dict[str, str | int | float | tuple[str, ...]]
SPAN_NAMES = {"queued": "queue", "swapped": "preempted"}  # other phases keep their names


def check_installed() -> None:
    """Raise ConfigError with the pip command if OpenTelemetry is not installed."""
    for name in REQUIRED_PACKAGES:
        with suppress(ModuleNotFoundError):  # a parent package is missing
            if find_spec(name) is not None:
                continue
        raise ConfigError(
            f"--spans needs {name}, which is not installed: pip install '.[otel]' in "
            "Headway's folder"
        )


def install(loop: EngineLoop, model_name: str) -> Callable[[], None]:
    """Trace every request of a loop. Return a function that exports the last spans and stops."""
    check_installed()
    from opentelemetry import trace

    provider = None
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        provider = _make_provider()
        trace.set_tracer_provider(provider)
    spans = Spans(loop.engine, trace.get_tracer("headway", __version__), model_name)
    loop.engine.observers.append(spans)
    loop.on_submit.append(spans.expect)
    if provider is None:  # the program shuts down its own provider
        return lambda: None
    return partial(_within, FLUSH_SECONDS, provider.shutdown)


def _make_provider() -> Any:
    """An SDK provider that exports batches over OTLP/HTTP. The SDK reads the OTEL_* variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `install` limits it
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` on a thread and wait at most this long: the collector may not respond."""
    thread = threading.Thread(target=work, name="spans", daemon=True)
    thread.start()
    thread.join(seconds)


class Spans:
    """An observer that creates the spans of a request when it finishes."""

    def __init__(self, engine: Engine, tracer: Any, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._engine, self._tracer, self._model_name = engine, tracer, model_name
        self._extract = TraceContextTextMapPropagator().extract
        self._epoch = time.time() - engine.clock.now()  # Unix time of clock value 0
        self._timeline = Timeline()
        self._parents: dict[Request, str] = {}

    def expect(self, message: Submit, requests: list[Request]) -> None:
        """Keep the trace context of a submitted request."""
        if message.traceparent:
            self._parents.update(dict.fromkeys(requests, message.traceparent))

    def __call__(self, event: Event) -> None:
        for request, times in self._timeline.follow(event).finished:
            self._emit(request, times)

    def _emit(self, request: Request, times: RequestTimeline) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {"traceparent": self._parents.pop(request, "")}
        whole = self._tracer.start_span(
            "llm_request", context=self._extract(carrier), kind=SpanKind.SERVER,
            start_time=self._stamp(times.arrival),
            attributes=self._attributes(request) | _latencies(times),
        )  # fmt: skip
        if request.finish_reason == "error":
            whole.set_attribute("error.type", (request.error or "error").partition(":")[0])
            whole.set_status(Status(StatusCode.ERROR, request.error))
        context = set_span_in_context(whole)
        ends = [phase.start for phase in times.phases[1:]] + [times.finished]
        for (phase, start), end in zip(times.phases, ends, strict=True):
            name = SPAN_NAMES.get(phase, phase)
            span = self._tracer.start_span(name, context=context, start_time=self._stamp(start))
            span.end(end_time=self._stamp(max(start, end)))
        whole.end(end_time=self._stamp(times.finished))

    def _attributes(self, request: Request) -> Attributes:
        """Parameters and results under the names of the OpenTelemetry semantic conventions."""
        params, sampling = request.params, request.params.sampling
        found: Attributes = {
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


def _latencies(times: RequestTimeline) -> dict[str, float]:
    """Seconds from arrival, under vLLM's attribute names."""
    moments = {
        "gen_ai.latency.e2e": times.finished,
        "gen_ai.latency.time_in_queue": times.admitted,
        "gen_ai.latency.time_to_first_token": times.first_token,
    }
    return {name: at - times.arrival for name, at in moments.items() if at != NEVER}
