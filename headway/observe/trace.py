"""Every decision as a line of JSON: write it, read it back. The format is in docs/trace.md.

The first line is a header with the whole configuration; every other line is one step, sized by
what changed. A line holds all that metrics, replay, diff and the step-through page need.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.config import Config
from headway.errors import FormatError
from headway.plan import Plan, StepReport
from headway.request import Params, Request
from headway.scheduler.presets import describe

VERSION = 1
Line = dict[str, Any]
TIMES = frozenset({"t", "start", "end"})  # what a decision log leaves out


def header(config: Config, async_scheduling: bool, **more: Any) -> Line:
    """The first line of a trace."""
    return {
        "headway_trace": VERSION,
        "config": describe(config),
        "async_scheduling": bool(async_scheduling),
        **more,
    }


def describe_step(report: StepReport) -> Line:
    """One settled step as plain data; empty fields are left out."""
    plan, result = report.plan, report.result
    line: Line = {
        "step": plan.step, "t": plan.events.schedule_ended, "start": result.started, "end": result.ended,
        "running": plan.events.num_running, "waiting": plan.events.num_waiting, "free": plan.events.num_free,
        "added": [describe_request(r) for r in plan.events.added],
        "aborted": [[r.id, r.history.aborted_after] for r in plan.events.aborted],
        "interrupted": [[r.id, r.history.aborted_after] for r in plan.events.aborted_in_flight],
        "preempted": [
            [p.request.id, "swap" if p.is_swap else "recompute", p.num_lost, int(p.is_priority)]
            for p in plan.events.preempted
        ],
        "admitted": [
            [a.request.id, a.num_cached, a.num_swapped, int(a.is_resume)] for a in plan.admitted
        ],
        "chunks": [[c.request.id, c.start, c.end, int(c.is_last)] for c in plan.chunks],
        "decodes": len(plan.decodes), "context": plan.decode_context, "grown": len(plan.new_blocks),
        "dropped": _dropped(plan), "in_flight": plan.events.num_in_flight,
        "early": list(plan.events.num_early) if any(plan.events.num_early) else [],
        "deferred": [r.id for r in plan.deferred],
        "copied_out": len(plan.copies_out), "copied_in": len(plan.copies_in),
        "blocked": [[b.request.id, b.reason, b.need, b.have] for b in plan.blocked],
        "behind": list(plan.not_considered) if plan.not_considered else [],
        "finished": [_describe_end(r) for r in report.finished],
    }  # fmt: skip
    if plan.num_steps > 1:
        line["steps"] = plan.num_steps
    return {key: value for key, value in line.items() if value or key in STEP_FIELDS}


def _dropped(plan: Plan) -> list[int]:
    """Decodes that took nothing, and tokens sampled in vain: they were over, or past their end."""
    kept = (
        [plan.tokens_kept[r] for r in plan.decodes if r in plan.tokens_kept]
        if plan.tokens_kept
        else []
    )
    unused = sum(plan.num_steps - count for count in kept)
    return [kept.count(0), unused] if unused else []


STEP_FIELDS = ("step", "t", "start", "end", "running", "waiting", "free", "decodes")


def describe_request(request: Request) -> Line:
    """All that a replay needs to ask for the same thing again."""
    params, line = request.params, dict[str, Any](id=request.id, arrival=request.arrival)
    line["prompt"] = runs(request.prompt)
    line["max_tokens"] = params.max_tokens
    parent = request.parent.id if request.parent else None
    optional: list[tuple[str, Any, Any]] = [  # left out if they are the default
        ("min_tokens", params.min_tokens, 0), ("priority", params.priority, 0),
        ("client", params.client, ""), ("deadline", params.deadline, None),
        ("salt", params.salt, ""), ("stops", sorted(request.stops), []),
        ("parent", parent, None), ("reads_cache", params.reads_cache, True),
        ("pooling", params.pooling, None),
    ]  # fmt: skip
    return line | {key: value for key, value, default in optional if value != default}


def request_of(line: Line, known: dict[str, Request]) -> Request:
    """The request that a trace line describes."""
    params = Params(
        max_tokens=line["max_tokens"], min_tokens=line.get("min_tokens", 0),
        stop_ids=frozenset(line.get("stops", ())), priority=line.get("priority", 0),
        client=line.get("client", ""), deadline=line.get("deadline"), salt=line.get("salt", ""),
        reads_cache=line.get("reads_cache", True), pooling=line.get("pooling"),
    )  # fmt: skip
    parent = known.get(line.get("parent", ""))
    return Request(
        line["id"], unruns(line["prompt"]), params, arrival=line["arrival"], parent=parent
    )


def _describe_end(request: Request) -> Line:
    history, line = request.history, {"id": request.id, "reason": request.finish_reason}
    optional: list[tuple[str, Any, Any]] = [
        ("cached", history.num_cached, 0), ("recomputed", history.num_recomputed, 0),
        ("preemptions", history.num_preemptions, 0), ("stop", request.stop_token, None),
        ("error", request.error, None),
    ]  # fmt: skip
    known = {key: value for key, value, default in optional if value != default}
    return {**line, "output": runs(request.output), **known}


def runs(tokens: array[int]) -> list[Any]:
    """Tokens, with three or more equal or consecutive ones as [first, count, 0 or 1]."""
    strides = np.diff(np.frombuffer(tokens, dtype=np.intc)) if len(tokens) > 2 else np.zeros(0)
    changes = np.flatnonzero(strides[1:] != strides[:-1]) + 1
    starts, ends = np.append(0, changes), np.append(changes, len(strides))  # of equal strides
    is_long = ends - starts >= 2
    packed: list[Any] = []
    place = 0
    for start, last in zip(starts[is_long].tolist(), ends[is_long].tolist(), strict=True):
        first = max(start, place)  # the token at `start` may have ended the run before
        if last - first >= 2 and strides[first] in (0, 1):
            packed.extend(tokens[place:first])
            packed.append([tokens[first], last - first + 1, int(strides[first])])
            place = last + 1
    packed.extend(tokens[place:])
    return packed


def unruns(packed: Iterable[Any]) -> array[int]:
    """The tokens that `runs` packed."""
    tokens = array("i")
    for item in packed:
        if isinstance(item, int):
            tokens.append(item)
        else:
            first, count, stride = item
            tokens.extend(range(first, first + count) if stride else [first] * count)
    return tokens


def decisions(line: Line) -> Line:
    """A step without its times: what two runs must have in common to be the same run."""
    return {key: value for key, value in line.items() if key not in TIMES}


class TraceWriter:
    """An observer that writes every step to a file."""

    def __init__(self, file: IO[str], config: Config, async_scheduling: bool, **more: Any) -> None:
        self._file = file
        self.write(header(config, async_scheduling, **more))

    def __call__(self, report: StepReport) -> None:
        self.write(describe_step(report))

    def write(self, line: Line) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Iterator[Line]:
    """The header, then the steps; raises FormatError with the line that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            for number, text in enumerate(file, start=1):
                yield _checked(path, number, text)
    except OSError as error:
        raise FormatError(path, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FormatError(path, None, "not a Headway trace: not UTF-8 text") from None
    if not number:
        raise FormatError(path, 1, "not a Headway trace: the file is empty")


def _checked(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise FormatError(path, number, f"not JSON: {error}") from None
    if number > 1:
        missing = [f for f in STEP_FIELDS if not isinstance(line, dict) or f not in line]
        if missing:
            raise FormatError(path, number, f"not a step: it has no field {missing[0]!r}")
    elif not isinstance(line, dict) or "headway_trace" not in line:
        raise FormatError(path, 1, "not a Headway trace: the header line is missing")
    elif line["headway_trace"] != VERSION:
        problem = f"trace version {line['headway_trace']}; this reads version {VERSION}"
        raise FormatError(path, 1, problem)
    elif not isinstance(line.get("config"), dict) or line.get("async_scheduling") not in (0, 1):
        raise FormatError(path, 1, "the header needs the fields 'config' and 'async_scheduling'")
    return dict(line)
