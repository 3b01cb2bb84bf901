"""Export a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: steps, requests, counters.

The track "engine" shows the steps. Each request is an asynchronous slice with its phases nested:
queued, prefill, decode, preempted, swapped. Counters show running and waiting requests, free blocks
and tokens per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headway.observe.timeline import RequestTimeline, StepRecord, Timeline
from headway.observe.trace import Line, decisions
from headway.observe.trace_reader import TraceReader

Event = dict[str, Any]
MICRO = 1e6


def to_perfetto(trace: Iterable[Line]) -> Iterator[Event]:
    """Trace events in the Chrome JSON format; write them under "traceEvents"."""
    lines, reader, timeline = iter(trace), TraceReader(), Timeline[RequestTimeline]()
    header = next(lines)
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "headway"}}
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "engine"}}
    yield {"ph": "i", "pid": 1, "tid": 1, "ts": 0, "s": "p", "name": "config", "args": header}
    for line in lines:
        record = reader.read(line)
        if record.step >= 0:
            yield from _step(line, record)
        for times, _ in timeline.follow(record).finished:
            yield from _request(times)
    for times in timeline.open:
        yield from _request(times)


def _step(line: Line, record: StepRecord[RequestTimeline]) -> Iterator[Event]:
    start, end = record.started * MICRO, record.ended * MICRO
    kinds = (("prefill", record.num_prefill), ("decode", record.num_decodes))
    shown = {key: value for key, value in decisions(line).items() if key != "added"}
    yield {
        "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": end - start,
        "name": " + ".join(kind for kind, count in kinds if count) or "copies", "args": shown,
    }  # fmt: skip
    counters = {
        "running": record.num_running, "waiting": record.num_waiting,
        "free blocks": record.num_free, "tokens": record.num_prefill + record.num_decodes,
    }  # fmt: skip
    for name, value in counters.items():
        yield {"ph": "C", "pid": 1, "ts": start, "name": name, "args": {name: value}}


def _request(times: RequestTimeline) -> Iterator[Event]:
    """The slice of a request and its phases. A request that never finished stays open."""
    yield _mark("b", times.id, times.id, times.arrival)
    name = ""
    for phase, start in times.phases:
        if name:
            yield _mark("e", times.id, name, start)
        name = phase
        yield _mark("b", times.id, name, start)
    if times.finish_reason:
        yield _mark("e", times.id, name, times.finished)
        yield _mark("e", times.id, times.id, times.finished)


def _mark(kind: str, id: str, name: str, time: float) -> Event:
    return {
        "ph": kind, "cat": "request", "id": id, "pid": 1, "tid": 2, "ts": time * MICRO,
        "name": name,
    }  # fmt: skip
