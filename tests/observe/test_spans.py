"""Spans cover each request from arrival to end, within the trace context of the request."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headway.engine.loop import EngineLoop
from headway.engine.messages import Submit
from headway.errors import ConfigError
from headway.observe.spans import Spans, _make_provider, _within, check_installed, install
from headway.server.http.middleware import RequestContextMiddleware, traceparent_of
from tests.support.collector import HEADER, PARENT, TRACE
from tests.support.gated import gated_engine, scripted
from tests.support.served import server
from tests.support.waiting import LIMIT, on_loop


def test_the_service_name_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given in (("headway", None), ("chat", "chat")):
        if given:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        provider = _make_provider()
        assert provider.resource.attributes["service.name"] == name
        provider.shutdown()


def test_the_tracer_provider_of_the_program_is_used_and_not_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    engine, _ = gated_engine()
    stop = install(EngineLoop(engine, lambda _: None), "tiny")
    for id in "ab":
        engine.add(id, [1] * 9, scripted())
        engine.run()
        stop()  # the provider stays open, so the second request is traced too
    assert [s.name for s in memory.get_finished_spans()].count("llm_request") == 2


def test_an_unreachable_collector_does_not_delay_shutdown() -> None:
    is_reached, ended = threading.Event(), list[bool]()
    _within(0.05, lambda: ended.append(is_reached.wait(LIMIT)))
    assert not ended
    is_reached.set()


@on_loop
async def test_a_trace_context_belongs_to_its_request_only() -> None:
    async with server() as s:
        seen: list[str] = []
        s.engine_client.loop.on_submit.append(lambda message, _: seen.append(message.traceparent))
        transport = httpx.ASGITransport(RequestContextMiddleware(s.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for headers in ({"traceparent": HEADER}, {}, {"traceparent": "invalid"}):
                for stream in (False, True):
                    body = {"prompt": ["ab", "cd"], "stream": stream}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200
            assert seen == [HEADER] * 4 + [""] * 8
            seen.clear()
            for headers in ({"traceparent": HEADER}, {}):
                body = {"input": ["ab", "cd"]}
                answer = await client.post("/v1/embeddings", json=body, headers=headers)
                assert answer.status_code == 200
            assert seen == [HEADER] * 2 + [""] * 2


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_child_spans_cover_a_request_without_overlap(async_scheduling: int) -> None:
    engine, gate = gated_engine(num_blocks=12, max_num_seqs=4)
    engine.async_scheduling = async_scheduling
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    spans = Spans(engine, provider.get_tracer("test"), "tiny")
    engine.observers.append(spans)
    for id in "abcd":
        requests = engine.add(id, [ord(id)] * 9, scripted(20))
        spans.expect(Submit(id, [], scripted(20), HEADER if id == "a" else ""), requests)
    engine.step()
    engine.abort("d")
    engine.run()
    gate.num_faults = 1
    engine.add("e", [1] * 9, scripted(20))
    engine.run()
    assert not spans._timeline.open and not spans._parents
    found = memory.get_finished_spans()
    wholes = {str(attribute(s, "gen_ai.request.id")): s for s in found if s.name == "llm_request"}
    assert set(wholes) == set("abcde")
    assert wholes["a"].parent is not None and f"{wholes['a'].parent.span_id:016x}" == PARENT
    assert not wholes["e"].status.is_ok and attribute(wholes["e"], "error.type") == "OSError"
    for whole in wholes.values():
        check_parts(whole, [s for s in found if s.parent == whole.context])
    assert "preempted" in {span.name for span in found}


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[name]


def check_parts(whole: ReadableSpan, parts: list[ReadableSpan]) -> None:
    """The parts start with the whole, do not overlap, and end with it."""
    assert parts[0].name == "queue" and parts[0].start_time == whole.start_time
    for before, after in pairwise(parts):
        assert before.start_time is not None and before.end_time is not None
        assert after.start_time is not None
        assert before.start_time <= before.end_time <= after.start_time + 1
    assert parts[-1].end_time is not None and whole.end_time is not None
    assert parts[-1].end_time <= whole.end_time
    if attribute(whole, "gen_ai.response.finish_reasons") == ("length",):
        assert parts[-1].name == "decode"


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (HEADER, True),
        (HEADER.replace("00-4", "cc-4") + "-more", True),
        (HEADER.upper(), False),
        (HEADER[:-1], False),
        (f"ff{HEADER[2:]}", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (HEADER + "\n", False),
        ("é" * 55, False),
        ("", False),
    ],
)
def test_a_malformed_traceparent_is_ignored(header: str, is_valid: bool) -> None:
    scope = {"headers": [(b"traceparent", header.encode())]}
    assert traceparent_of(scope) == (header if is_valid else "")
    assert traceparent_of({"headers": [(b"traceparent", HEADER.encode())] * 2}) == ""


def test_the_error_for_missing_packages_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_installed()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        check_installed()
