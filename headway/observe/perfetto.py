"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: steps, requests, counters.

Track "engine" shows the steps; every request is an asynchronous slice with its phases nested:
waiting, prefill, decode, preempted. Counters: running, waiting, free blocks, tokens per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headway.observe.trace import Line, decisions

Event = dict[str, Any]
MICRO = 1e6


def to_perfetto(trace: Iterable[Line]) -> Iterator[Event]:
    """Trace events in the Chrome JSON format; write them under "traceEvents"."""
    lines = iter(trace)
    header = next(lines)
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "headway"}}
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "engine"}}
    yield {"ph": "i", "pid": 1, "tid": 1, "ts": 0, "s": "p", "name": "config", "args": header}
    phases: dict[str, str] = {}
    for line in lines:
        if line["step"] >= 0:
            yield from _step(line)
        yield from _requests(line, phases)


def _step(line: Line) -> Iterator[Event]:
    start, end = line["start"] * MICRO, line["end"] * MICRO
    prefill = sum(stop - first for _, first, stop, _ in line.get("chunks", ()))
    kinds = [k for k, there in (("prefill", prefill), ("decode", line["decodes"])) if there]
    shown = {k: v for k, v in decisions(line).items() if k != "added"}
    yield {
        "ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": end - start,
        "name": " + ".join(kinds) or "copies", "args": shown,
    }  # fmt: skip
    counters = {"running": line["running"], "waiting": line["waiting"], "free blocks": line["free"]}
    for name, value in {**counters, "tokens": prefill + line["decodes"]}.items():
        yield {"ph": "C", "pid": 1, "ts": start, "name": name, "args": {name: value}}


def _requests(line: Line, phases: dict[str, str]) -> Iterator[Event]:
    """Begin and end the phases that this step changes."""
    start, end = line["start"] * MICRO, (line["end"] or line["t"]) * MICRO
    for asked in line.get("added", ()):
        yield _mark("b", asked["id"], asked["id"], asked["arrival"] * MICRO)
        yield from _move(phases, asked["id"], "waiting", asked["arrival"] * MICRO)
    for id, how, *_ in line.get("preempted", ()):
        yield from _move(phases, id, f"preempted ({how})", start)
    for id, *_ in line.get("admitted", ()):
        yield from _move(phases, id, "prefill", start)
    for id, _, _, is_last in line.get("chunks", ()):
        if is_last:
            yield from _move(phases, id, "decode", end)
    for ended in line.get("finished", ()):
        yield from _move(phases, ended["id"], None, end)
        yield _mark("e", ended["id"], ended["id"], end)


def _move(phases: dict[str, str], id: str, phase: str | None, time: float) -> Iterator[Event]:
    if id in phases:
        yield _mark("e", id, phases.pop(id), time)
    if phase is not None:
        phases[id] = phase
        yield _mark("b", id, phase, time)


def _mark(kind: str, id: str, name: str, time: float) -> Event:
    return {"ph": kind, "cat": "request", "id": id, "pid": 1, "tid": 2, "ts": time, "name": name}
