"""Writes events as lines of a journal file."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from headway.config import Config
from headway.errors import FormatError
from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    Reconfigured,
    Reset,
)
from headway.plan import Plan, Preemption
from headway.record.lines import (
    VERSION,
    AbortedLine,
    AddedLine,
    BlocksLine,
    CompletedLine,
    EndLine,
    FailedLine,
    HeaderLine,
    Line,
    Packed,
    PlannedLine,
    PreemptionLine,
    ReconfiguredLine,
    RequestLine,
    ResetLine,
)
from headway.record.packing import pack_tokens
from headway.request import Request
from headway.scheduler.policies.presets import describe


def header(config: Config, async_scheduling: bool, **more: Any) -> HeaderLine:
    return HeaderLine(
        headway_trace=VERSION, config=describe(config), async_scheduling=bool(async_scheduling),
        **more,
    )  # fmt: skip


class LineMaker:
    """Describes events. With `has_blocks` block numbers are included; `redact` hides token ids."""

    def __init__(self, *, has_blocks: bool = False, redact: bool = False) -> None:
        self._has_blocks, self._redact = has_blocks, redact

    def line(self, event: Event) -> Line:
        match event:
            case Planned():
                return self._planned(event)
            case Completed():
                return self._completed(event)
            case Added():
                return AddedLine(event.time, [self.request(r) for r in event.requests])
            case Aborted():
                return AbortedLine(event.time, self.end(event.request))
            case Reset():
                return ResetLine(event.time, event.is_forced, _preempted(event.preempted))
            case Reconfigured():
                return ReconfiguredLine(event.time, dict(event.settings))
            case Failed():
                return FailedLine(
                    t=event.time, reason=event.reason,
                    ended=[self.end(r) for r in event.ended],
                    preempted=_preempted(event.preempted),
                )  # fmt: skip

    def _planned(self, event: Planned) -> PlannedLine:
        plan = event.plan
        line = PlannedLine(
            step=plan.step, t=event.time, running=event.num_running, waiting=event.num_waiting,
            free=event.num_free, decodes=len(plan.decodes), num_steps=plan.num_steps,
            decode_context=plan.decode_context, not_considered=plan.not_considered,
            has_failed=event.has_failed,
        )  # fmt: skip
        if plan.admitted:
            line.admitted = [
                (a.request.id, a.num_cached, a.num_swapped, a.is_resume) for a in plan.admitted
            ]
        if plan.chunks:
            line.chunks = [(c.request.id, c.start, c.end, c.is_last) for c in plan.chunks]
        if plan.drafts:
            line.drafts = [(d.request.id, d.start, d.count) for d in plan.drafts]
        if plan.preempted:
            line.preempted = _preempted(plan.preempted)
        if plan.copies_out or plan.copies_in:
            line.copied_out, line.copied_in = len(plan.copies_out), len(plan.copies_in)
        if plan.blocked:
            line.blocked = [(b.request.id, b.reason, b.need, b.have) for b in plan.blocked]
        if plan.deferred:
            line.deferred = [request.id for request in plan.deferred]
        if self._has_blocks:
            line.blocks = _blocks(plan)
        return line

    def _completed(self, event: Completed) -> CompletedLine:
        plan, result = event.planned.plan, event.result
        line = CompletedLine(
            step=plan.step, start=result.started, end=result.ended, swap_in=result.swap_in or 0,
            builds=result.num_builds,
        )  # fmt: skip
        if result.draft_tokens:
            line.gained = list(map(len, result.draft_tokens))
        if result.failed:
            line.failed = [(r.id, *failure) for r, failure in result.failed.items()]
        if event.finished:
            kept = plan.tokens_kept if plan.num_steps > 1 else {}
            line.finished = [self.end(r, kept.get(r, 0)) for r in event.finished]
        return line

    def request(self, request: Request) -> RequestLine:
        params, resumed = request.params, request.history.resumed
        return RequestLine(
            id=request.id, arrival=request.arrival, prompt=self._tokens(request.prompt),
            max_tokens=params.max_tokens, limit=request.limit,
            max_total_tokens=params.max_total_tokens, min_tokens=params.min_tokens,
            priority=params.priority, client=params.client, deadline=params.deadline,
            salt=params.salt, stop_ids=sorted(request.stops),
            parent=request.parent.id if request.parent else None, sample=request.sample,
            reads_cache=params.reads_cache, pooling=params.pooling,
            prediction=None if params.prediction is None else self._tokens(params.prediction),
            output=self._tokens(resumed) if resumed else 0,
        )  # fmt: skip

    def end(self, request: Request, num_kept: int = 0) -> EndLine:
        history = request.history
        return EndLine(
            id=request.id, finish_reason=request.finish_reason or "abort",
            output=self._tokens(request.output), kept=num_kept, cached=history.num_cached,
            recomputed=history.num_recomputed, preemptions=history.num_preemptions,
            stop_token=request.stop_token, error=request.error, error_code=request.error_code,
        )  # fmt: skip

    def _tokens(self, tokens: Sequence[int] | array[int]) -> Packed:
        return len(tokens) if self._redact else pack_tokens(tokens)


def _preempted(preemptions: Iterable[Preemption]) -> list[PreemptionLine]:
    lines = []
    for p in preemptions:
        kind = "swap" if p.is_swap else "discard" if p.is_discard else "recompute"
        line = PreemptionLine(p.request.id, kind, p.num_lost, p.is_priority, p.num_due, p.num_free)
        lines.append(line)
    return lines


def _blocks(plan: Plan) -> BlocksLine | None:
    if not (plan.admitted or plan.new_blocks or plan.copies_out or plan.copies_in):
        return None
    return BlocksLine(
        hits=[a.num_hits for a in plan.admitted],
        admitted=[pack_tokens(a.blocks) for a in plan.admitted],
        new=[block for _, block in plan.new_blocks],
        out=[(c.source, c.target) for c in plan.copies_out],
        in_=[(c.source, c.target) for c in plan.copies_in],
    )  # fmt: skip


class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


class JournalWriter:
    """An observer of the engine that writes each event to a file."""

    def __init__(self, file: Writable, head: HeaderLine, *, name: str = "the trace") -> None:
        self._file, self._name = file, name
        self._maker = LineMaker(has_blocks=head.has_blocks, redact=head.is_redacted)
        self._encoder = msgspec.json.Encoder()
        self._write(head)

    def __call__(self, event: Event) -> None:
        self._write(self._maker.line(event))

    def _write(self, line: Line | HeaderLine) -> None:
        """Write one line; FormatError if the disk is full."""
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
        except OSError as error:
            raise FormatError(self._name, None, f"cannot be written: {error.strerror}") from None


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
                self.seek(self.num_written)
            raise
        self.num_written += len(data)
        return len(data)


def open_journal(path: Path) -> BinaryIO:
    """A file without a buffer, so that a crash or a full disk leaves whole lines."""
    try:
        return WholeLines(path, "w")
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None
