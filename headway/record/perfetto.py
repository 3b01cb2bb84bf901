"""Export a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: steps, requests, counters.

The track "engine" shows the steps. Each request is an asynchronous slice with its phases nested:
queued, prefill, decode, preempted, swapped. Counters show running and waiting requests, free blocks
and tokens per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import to_builtins

from headway.events import Completed
from headway.record.lines import HeaderLine, Line, PlannedLine
from headway.record.reader import EventReader, split_header
from headway.record.timeline import RequestTimeline, StepStats, Timeline

Slice = dict[str, object]  # an event in Chrome's format
MICRO = 1e6


def to_perfetto(journal: Iterable[HeaderLine | Line]) -> Iterator[Slice]:
    """Trace events in the Chrome JSON format; write them under "traceEvents"."""
    header, lines = split_header(journal)
    timeline = Timeline()
    reader, plans = EventReader(header), dict[int, PlannedLine]()
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "headway"}}
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "engine"}}
    args = to_builtins(header)
    yield {"ph": "i", "pid": 1, "tid": 1, "ts": 0, "s": "p", "name": "config", "args": args}
    for line in lines:
        event = reader.event(line)
        stats = timeline.follow(event)
        if isinstance(line, PlannedLine):
            plans[line.step] = line
        if isinstance(event, Completed):
            yield from _step(event, stats, plans.pop(event.plan.step))
        for _, times in stats.finished:
            yield from _request(times)
    for times in timeline.open.values():
        yield from _request(times)


def _step(event: Completed, stats: StepStats, line: PlannedLine) -> Iterator[Slice]:
    start, plan, planned = event.result.started * MICRO, event.plan, event.planned
    decodes, drafts = ("decode", len(plan.decodes)), ("drafts", len(plan.drafts))
    kinds = (("prefill", stats.num_prefill), decodes, drafts)
    args = to_builtins(line)
    if plan.drafts:
        args["gained"] = list(map(len, event.result.draft_tokens))
    yield {
        "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": stats.now * MICRO - start,
        "name": " + ".join(kind for kind, count in kinds if count) or "copies", "args": args,
    }  # fmt: skip
    counters = {
        "running": planned.num_running, "waiting": planned.num_waiting,
        "free blocks": planned.num_free, "tokens": plan.num_tokens,
    }  # fmt: skip
    for name, value in counters.items():
        yield {"ph": "C", "pid": 1, "ts": start, "name": name, "args": {name: value}}


def _request(times: RequestTimeline) -> Iterator[Slice]:
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


def _mark(kind: str, id: str, name: str, time: float) -> Slice:
    return {
        "ph": kind, "cat": "request", "id": id, "pid": 1, "tid": 2, "ts": time * MICRO,
        "name": name,
    }  # fmt: skip
