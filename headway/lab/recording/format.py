"""The binary form of a recording: a header, chunks of some hundred frames, and an end.

docs/recording.md describes the bytes. A chunk starts with a keyframe, the state before its first
frame, so showing any frame takes one keyframe and the operations of at most one chunk.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

from msgspec import to_builtins

from headway.events import Aborted, Added, Completed, Event, Failed, Planned, ended_by, preempted_by
from headway.lab.recording.builder import FINISH_REASONS, REASONS, RecordingBuilder
from headway.lab.recording.state import Op, RecordedState, Status, split
from headway.lab.recording.texts import RecordingTexts
from headway.plan import Plan
from headway.record.lines import HeaderLine
from headway.request import Request
from headway.scheduler import Scheduler

VERSION = 2
FRAMES_PER_CHUNK = 256
FRAMES_PER_FIRST_CHUNK = 32  # so that the first frames can be shown early


class Record(IntEnum):
    """The kinds of records in a recording."""

    HEADER = 1
    CHUNK = 2
    END = 3
    IDLE = 4  # nothing happened; keeps a connection open


class Mark(IntFlag):
    """What happens in a frame; the page jumps from one to the next."""

    PREEMPTION = 1
    BLOCK = 2  # a request starts to wait for another reason
    HIT = 4  # an admission finds tokens in the cache
    END = 8
    ADMISSION = 16
    ARRIVAL = 32
    ABORT = 64


TIMES = ("planned", "started", "ended")
COLUMNS = (
    "step", "running", "waiting", "swapped", "free", "decodes", "prefill", "num_steps",
    "preempted", "admitted", "blocked", "finished", "cached", "marks", "drafting", "drafted",
    "accepted",
)  # fmt: skip
Text = tuple[int, str, int, str]  # frame, kind, request or -1, sentence


def record(kind: Record, payload: bytes) -> bytes:
    """One record, padded so that the next starts at a multiple of 8 bytes."""
    padding = -len(payload) % 8
    return struct.pack("<II", kind, len(payload)) + payload + bytes(padding)


def header_record(header: HeaderLine, **more: Any) -> bytes:
    """The first record: the header of the trace, and the names of all numbers."""
    names = {
        "recording": VERSION, "reasons": REASONS, "finish_reasons": FINISH_REASONS,
        "columns": COLUMNS, "ops": {op.name: op.value for op in Op},
        "marks": {mark.name: mark.value for mark in Mark},
        "statuses": [status.name.lower() for status in Status],
    }  # fmt: skip
    return record(Record.HEADER, json.dumps({**names, **to_builtins(header), **more}).encode())


FAILED = -1  # in place of the number of drafts that were right
NO_PLAN = Planned(Plan(-1, num_steps=0))


@dataclass(slots=True)
class _Frame:
    """What happens after the previous plan, a plan, and later what its result brings."""

    planned: Planned = NO_PLAN
    ops: list[int] = field(default_factory=list)
    entries: list[Request] = field(default_factory=list)
    num_swapped: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    num_cached: int = 0
    num_accepted: int = 0
    marks: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)  # request, number
    texts: list[tuple[str, int, str]] = field(default_factory=list)  # kind, request or -1, sentence

    def row(self) -> tuple[int, ...]:
        """The values of COLUMNS."""
        planned, plan = self.planned, self.planned.plan
        return (
            plan.step, planned.num_running, planned.num_waiting, self.num_swapped, planned.num_free,
            len(plan.decodes), plan.num_prefill, plan.num_steps, self.num_preempted,
            len(plan.admitted), len(plan.blocked), self.num_finished, self.num_cached, self.marks,
            len(self.drafts), sum(number for _, number in self.drafts), self.num_accepted,
        )  # fmt: skip

    def verify(self, accepted: list[int]) -> None:
        """Add how many of the drafts of each request were right."""
        for draft, number in zip(self.drafts, accepted, strict=True):
            self.ops += (Op.DRAFT, *draft, number)
        self.num_accepted = sum(number for number in accepted if number != FAILED)


class RecordingWriter:
    """Follows a run and returns its recording as chunks. One frame is one plan with work."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.builder = RecordingBuilder(config["block_size"])
        self.num_frames = 0
        self._texts_of = RecordingTexts(config).follow
        self._num_blocks: int = config["num_blocks"]
        self._num_free, self._ended = self._num_blocks, 0.0  # at the end of the latest frame
        self._pending: deque[_Frame] = deque()  # in flight
        self._next = _Frame()
        self._start_chunk()

    def load(self, scheduler: Scheduler) -> None:
        """Start in the middle of a run; call it before the first event."""
        self.builder.load(scheduler)
        self._start_chunk()

    def _start_chunk(self) -> None:
        self._first, state = self.num_frames, self.builder.state
        if self._pending or self.builder.ops:  # then the builder is ahead of the latest frame
            state = RecordedState.restore(self._keyframe, state.block_size)
            for op, args in split(self._ops):
                state.apply(op, args)
        self._keyframe: array[int] = state.keyframe()
        self._times: list[float] = []
        self._rows: list[tuple[int, ...]] = []
        self._ops: list[int] = []
        self._offsets = [0]
        self._entries: list[Request] = []
        self._texts: list[Text] = []

    def follow(self, event: Event) -> bytes:
        """Apply the next event; returns the bytes of a chunk that has become full, or nothing."""
        data = b""
        if isinstance(event, Added):  # the others may end requests, which then have no number
            self.builder.follow(event)
        numbers = self.builder.numbers
        texts: list[tuple[str, int, str]] = [
            (d.kind, numbers.get(d.request, -1) if d.request else -1, d.text)
            for d in self._texts_of(event)
        ]
        if isinstance(event, Completed):  # its operations belong to the next frame
            data = self._complete(event, texts)
        else:
            self._add(event, texts, self._next)
        if not isinstance(event, Added):
            self.builder.follow(event)
        if isinstance(event, Planned) and not event.plan.is_empty:
            self._plan(event)
        elif isinstance(event, Failed):
            self._fail(event)
        return data

    def _add(self, event: Event, texts: list[tuple[str, int, str]], frame: _Frame) -> None:
        frame.texts += texts
        if ended := ended_by(event):
            frame.num_finished += len(ended)
            frame.marks |= Mark.END
        if preempted := preempted_by(event):
            frame.num_preempted += len(preempted)
            frame.marks |= Mark.PREEMPTION
        if isinstance(event, Added):
            frame.marks |= Mark.ARRIVAL
        elif isinstance(event, Aborted):
            frame.marks |= Mark.ABORT

    def _plan(self, event: Planned) -> None:
        plan, frame, self._next = event.plan, self._next, _Frame()
        frame.planned, (frame.ops, frame.entries) = event, self.builder.take()
        frame.num_swapped = self.builder.state.num_swapped
        if self.builder.has_new_block:
            frame.marks |= Mark.BLOCK
        if plan.admitted:
            frame.num_cached = sum(admission.num_cached for admission in plan.admitted)
            frame.marks |= Mark.ADMISSION | Mark.HIT * bool(frame.num_cached)
        for draft in plan.drafts:
            frame.drafts.append((self.builder.numbers[draft.request], draft.count))
        self._pending.append(frame)

    def _complete(self, event: Completed, texts: list[tuple[str, int, str]]) -> bytes:
        if self._pending and self._pending[0].planned is event.planned:
            frame, result = self._pending.popleft(), event.result
            self._add(event, texts, frame)
            frame.verify([len(tokens) - 1 for tokens in result.draft_tokens])
            self._add_frame(frame, event.planned.time, result.started, result.ended or event.time)
        else:  # it was in flight when the recording started
            self._next.texts += texts
        limit = FRAMES_PER_CHUNK if self._first else FRAMES_PER_FIRST_CHUNK
        return self.flush() if self.num_frames - self._first >= limit else b""

    def _fail(self, event: Failed) -> None:
        """Plans in flight have no result; then a frame shows that everything was forgotten."""
        while self._pending:
            frame = self._pending.popleft()
            frame.verify([FAILED] * len(frame.drafts))
            self._add_frame(frame, frame.planned.time, event.time, event.time)
        self._ended = event.time
        self.settle()

    def finish(self, **summary: Any) -> bytes:
        """The frame after the last plan, and the end record."""
        self.settle()
        return self.flush() + record(Record.END, json.dumps(summary).encode())

    def settle(self) -> None:
        """Add a frame with what no later plan has seen, if there is anything."""
        frame, state, last = self._next, self.builder.state, self._ended
        if self._pending or not (self.builder.ops or frame.texts):
            return
        frame.ops, frame.entries = self.builder.take()
        statuses = Counter(request.status for request in state.requests.values())
        running = statuses[Status.PREFILL] + statuses[Status.DECODING]
        if state.refs or not running:  # else it is a trace without block numbers
            self._num_free = self._num_blocks - len(state.refs)
        num_waiting = len(state.requests) - running
        frame.planned = Planned(NO_PLAN.plan, self._num_free, running, num_waiting)
        frame.num_swapped = state.num_swapped
        self._add_frame(frame, last, last, last)
        self._next = _Frame()

    def flush(self) -> bytes:
        """The frames since the last chunk, as a chunk; nothing if there are none."""
        if self.num_frames == self._first:
            return b""
        parts = (*zip(*self._rows, strict=True), self._offsets, self._ops, self._keyframe)
        requests = [_described(request) for request in self._entries]
        names = {"first": self._first, "requests": requests, "texts": self._texts}
        sizes = (self.num_frames - self._first, len(self._ops), len(self._keyframe), 0)
        data = struct.pack("<IIII", *sizes) + array("d", self._times).tobytes()
        data += b"".join(array("i", part).tobytes() for part in parts)
        self._start_chunk()
        return record(Record.CHUNK, data + json.dumps(names).encode())

    def _add_frame(self, frame: _Frame, planned: float, started: float, ended: float) -> None:
        self._times += (planned, started, ended)
        self._rows.append(frame.row())
        self._ops += frame.ops
        self._offsets.append(len(self._ops))
        self._entries += frame.entries
        if frame.texts:
            self._texts += [(self.num_frames, *text) for text in frame.texts]
        self.num_frames += 1
        self._num_free, self._ended = frame.planned.num_free, ended


def _described(request: Request) -> list[str | int | float | None]:
    params, parent = request.params, request.parent.id if request.parent else None
    return [
        request.id, request.num_prompt, request.limit, request.arrival, params.max_tokens,
        params.priority, params.client, parent,
    ]  # fmt: skip
