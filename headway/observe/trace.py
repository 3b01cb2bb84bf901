"""Decision traces: write each step as one line of JSON and read a file back.

docs/trace.md describes the format. The first line is a header with the whole configuration. Each
other line is one completed step. Its size depends on what changed. A line holds all that run
statistics, replay, diff and Perfetto export need.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from headway.config import Config
from headway.errors import FormatError
from headway.plan import Plan, Preemption, StepReport
from headway.record.packing import pack_tokens, unpack_tokens
from headway.request import Request, RequestParams
from headway.scheduler.policies.presets import describe

VERSION = 2
Line = dict[str, Any]
TIMES = frozenset({"t", "start", "end", "swap_in", "builds"})  # not part of the decisions
STEP_FIELDS = ("step", "t", "start", "end", "running", "waiting", "free", "decodes")


def header(config: Config, async_scheduling: bool, **more: Any) -> Line:
    """The first line of a trace."""
    return {
        "headway_trace": VERSION,
        "config": describe(config),
        "async_scheduling": bool(async_scheduling),
        **more,
    }


def describe_step(report: StepReport, *, has_blocks: bool = False, redact: bool = False) -> Line:
    """One completed step as plain data. Empty fields are left out.

    With `has_blocks` the numbers of all blocks are included. With `redact` a trace has lengths in
    place of token ids; such a trace cannot be replayed.
    """
    plan, result, events = report.plan, report.result, report.plan.events
    line: Line = {
        "step": plan.step, "t": events.schedule_ended, "start": result.started, "end": result.ended,
        "running": events.num_running, "waiting": events.num_waiting, "free": events.num_free,
        "added": [describe_request(r, redact) for r in events.added],
        "aborted": [[r.id, r.history.aborted_after] for r in events.aborted],
        "aborted_in_flight": [[r.id, r.history.aborted_after] for r in events.aborted_in_flight],
        "preempted": [
            [p.request.id, _kind(p), p.num_lost, int(p.is_priority)] for p in events.preempted
        ],
        "short_of_blocks": [[p.num_due, p.num_free] for p in events.preempted]
        if any(p.num_due for p in events.preempted) else [],
        "reset": [events.reset.num_preempted, int(events.reset.is_all)] if events.reset else [],
        "admitted": [
            [a.request.id, a.num_cached, a.num_swapped, int(a.is_resume)] for a in plan.admitted
        ],
        "chunks": [[c.request.id, c.start, c.end, int(c.is_last)] for c in plan.chunks],
        "decodes": len(plan.decodes), "num_steps": plan.num_steps if plan.num_steps > 1 else 0,
        "decode_context": plan.decode_context, "new_blocks": len(plan.new_blocks),
        "dropped": _unless_zero(dropped(plan)), "in_flight": events.num_in_flight,
        "num_early": _unless_zero(events.num_early), "deferred": [r.id for r in plan.deferred],
        "copied_out": len(plan.copies_out), "copied_in": len(plan.copies_in),
        "swap_in": result.swap_in, "builds": result.num_builds,
        "blocked": [[b.request.id, b.reason, b.need, b.have] for b in plan.blocked],
        "not_considered": list(plan.not_considered) if plan.not_considered else [],
        "finished": [_describe_end(r, redact) for r in report.finished],
        "blocks": _describe_blocks(plan) if has_blocks else {},
    }  # fmt: skip
    return {key: value for key, value in line.items() if value or key in STEP_FIELDS}


def _kind(preemption: Preemption) -> str:
    """What happens to the victim's KV blocks and output."""
    if preemption.is_swap:
        return "swap"
    return "discard" if preemption.is_discard else "recompute"


def dropped(plan: Plan) -> tuple[int, int]:
    """Decodes that kept no token, and sampled tokens that were not kept."""
    kept = plan.tokens_kept
    if not kept:
        return 0, 0
    counts = [kept[request] for request in plan.places_of(kept)]
    return counts.count(0), sum(plan.num_steps - count for count in counts)


def _unless_zero(counts: tuple[int, int]) -> list[int]:
    return list(counts) if any(counts) else []


def _describe_blocks(plan: Plan) -> dict[str, list[Any]]:
    """Block tables of admissions, new blocks of decodes, and copies; empty lists are left out."""
    blocks: dict[str, list[Any]] = {
        "hits": [a.num_hits for a in plan.admitted],
        "admitted": [pack_tokens(a.blocks) for a in plan.admitted],
        "new": [[request.id, block] for request, block in plan.new_blocks],
        "out": [list(copy) for copy in plan.copies_out],
        "in": [list(copy) for copy in plan.copies_in],
    }
    return {key: value for key, value in blocks.items() if value}


def describe_request(request: Request, redact: bool = False) -> Line:
    """All fields that a replay needs to submit the same request again."""
    params, line = request.params, dict[str, Any](id=request.id, arrival=request.arrival)
    line["prompt"] = request.num_prompt if redact else pack_tokens(request.prompt)
    line["max_tokens"] = params.max_tokens
    parent = request.parent.id if request.parent else None
    optional: list[tuple[str, Any, Any]] = [  # each with the default that is left out
        ("max_total_tokens", params.max_total_tokens, None),
        ("min_tokens", params.min_tokens, 0), ("priority", params.priority, 0),
        ("client", params.client, ""), ("deadline", params.deadline, None),
        ("salt", params.salt, ""), ("stop_ids", sorted(request.stops), []),
        ("parent", parent, None), ("reads_cache", params.reads_cache, True),
        ("pooling", params.pooling, None), ("output", _resumed(request, redact), []),
        ("limit", request.limit, request.num_prompt + (params.max_tokens or 0)),
    ]  # fmt: skip
    return line | {key: value for key, value, default in optional if value != default}


def _resumed(request: Request, redact: bool) -> list[Any] | int:
    """The output that a continued request arrived with; empty for a new one."""
    resumed = request.history.resumed
    return len(resumed) if redact and resumed else pack_tokens(resumed)


def request_of(line: Line, known: dict[str, Request]) -> Request:
    """The request that an entry of `added` describes. `known` has the requests added before it."""
    params = RequestParams(
        max_tokens=line["max_tokens"], max_total_tokens=line.get("max_total_tokens"),
        min_tokens=line.get("min_tokens", 0),
        stop_ids=frozenset(line.get("stop_ids", ())), priority=line.get("priority", 0),
        client=line.get("client", ""), deadline=line.get("deadline"), salt=line.get("salt", ""),
        reads_cache=line.get("reads_cache", True), pooling=line.get("pooling"),
    )  # fmt: skip
    parent = known.get(line.get("parent", ""))
    return Request(
        line["id"], unpack_tokens(line["prompt"]), params, arrival=line["arrival"], parent=parent,
        output=unpack_tokens(line.get("output", ())),
    )  # fmt: skip


def _describe_end(request: Request, redact: bool = False) -> Line:
    history, line = request.history, {"id": request.id, "finish_reason": request.finish_reason}
    optional: list[tuple[str, Any, Any]] = [
        ("cached", history.num_cached, 0), ("recomputed", history.num_recomputed, 0),
        ("preemptions", history.num_preemptions, 0), ("stop_token", request.stop_token, None),
        ("error", request.error, None),
    ]  # fmt: skip
    known = {key: value for key, value, default in optional if value != default}
    output = request.num_generated if redact else pack_tokens(request.output)
    return {**line, "output": output, **known}


def decisions(line: Line) -> Line:
    """A step without its times. Two runs with equal decisions are the same run."""
    return {key: value for key, value in line.items() if key not in TIMES}


class TraceWriter:
    """An observer of the engine that writes each step to a file."""

    def __init__(
        self,
        file: IO[str],
        config: Config,
        async_scheduling: bool,
        *,
        has_blocks: bool = False,
        redact: bool = False,
        **more: Any,
    ) -> None:
        self._file, self._has_blocks, self._redact = file, has_blocks, redact
        more |= {"has_blocks": True} if has_blocks else {}
        more |= {"is_redacted": True} if redact else {}
        self.write(header(config, async_scheduling, **more))

    def __call__(self, report: StepReport) -> None:
        self.write(describe_step(report, has_blocks=self._has_blocks, redact=self._redact))

    def write(self, line: Line) -> None:
        """Write one line; FormatError if the disk is full."""
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            name = getattr(self._file, "name", "the trace")
            raise FormatError(name, None, f"cannot be written: {error.strerror}") from None


def read_trace(path: Path) -> Iterator[Line]:
    """Yield the header, then the steps. FormatError names the file and the line that is wrong."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from parse_trace(path, file)
    except OSError as error:
        raise FormatError(path, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FormatError(path, None, "not a Headway trace: not UTF-8 text") from None


def parse_trace(name: object, texts: Iterable[str]) -> Iterator[Line]:
    """Yield the header, then the steps, of lines of text. FormatError has the name and the line."""
    number = 0
    for number, text in enumerate(texts, start=1):
        yield _checked(name, number, text)
    if not number:
        raise FormatError(name, 1, "not a Headway trace: the file is empty")


def _checked(path: object, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        is_cut = number > 1 and not text.endswith("\n")
        problem = "the file ends within this line" if is_cut else f"not JSON: {error}"
        raise FormatError(path, number, problem) from None
    if number == 1:
        _check_header(path, line)
    elif missing := [f for f in STEP_FIELDS if not isinstance(line, dict) or f not in line]:
        raise FormatError(path, number, f"not a step: the field {missing[0]!r} is missing")
    return dict(line)


def _check_header(path: object, line: Any) -> None:
    if not isinstance(line, dict) or "headway_trace" not in line:
        raise FormatError(path, 1, "not a Headway trace: the header line is missing")
    if line["headway_trace"] != VERSION:
        problem = (
            f"trace version {line['headway_trace']} cannot be read, only version {VERSION}; "
            "record the run again"
        )
        raise FormatError(path, 1, problem)
    if not isinstance(line.get("config"), dict) or line.get("async_scheduling") not in (0, 1):
        raise FormatError(path, 1, "the header needs the fields 'config' and 'async_scheduling'")


class WholeLines(io.FileIO):
    """An unbuffered file that holds all of a write or, if the disk is full, nothing of it."""

    num_written = 0

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except OSError:
            with suppress(OSError):  # only a regular file has a part to remove
                self.truncate(self.num_written)
            raise
        self.num_written += len(data)
        return len(data)


def open_trace(path: Path) -> IO[str]:
    """A file without a buffer, so that a crash or a full disk leaves whole lines."""
    try:
        return io.TextIOWrapper(WholeLines(path, "w"), "utf-8", write_through=True)
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None
