"""The binary form of a recording: a header, chunks of some hundred frames, and an end.

docs/recording.md describes the bytes. A chunk starts with a keyframe, the state before its first frame,
so showing any frame takes one keyframe and the operations of at most one chunk.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

from msgspec import to_builtins

from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    ended_by,
    preempted_by,
)
from headway.lab.recording.builder import FINISH_REASONS, REASONS, RUNNING, RecordingBuilder
from headway.lab.recording.state import Op, RecordedRequest, RecordedState, Status, split
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
    "preempted", "admitted", "blocked", "finished", "cached", "marks",
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


@dataclass(slots=True)
class _Frame:
    """A frame whose step has not ended."""

    plan: Plan
    ops: list[int]
    entries: list[Request]
    columns: dict[str, int]
    marks: Mark
    texts: list[tuple[str, int, str]]  # kind, request or -1, sentence


class RecordingWriter:
    """Follows a run and gives its recording out as chunks. One frame is one plan with work."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.builder = RecordingBuilder(config["block_size"])
        self.num_frames = 0
        self._sentences = RecordingTexts(config)
        self._num_blocks: int = config["num_blocks"]
        # Free blocks and time, at the latest frame.
        self._num_free, self._ended = self._num_blocks, 0.0
        self._pending: deque[_Frame] = deque()  # in flight
        self._texts_before: list[tuple[str, int, str]]  # of the next frame
        self._start_frame()
        self._start()

    def load(self, scheduler: Scheduler) -> None:
        """Start in the middle of a run; call it before the first event."""
        self.builder.load(scheduler)
        self._start()

    def _start(self) -> None:
        self._first = self.num_frames
        self._keyframe = self._present_keyframe()
        self._times, self._columns = array("d"), [array("i") for _ in COLUMNS]
        self._offsets, self._ops = array("i", [0]), array("i")
        self._entries: list[Request] = []
        self._texts: list[Text] = []

    def _present_keyframe(self) -> array[int]:
        """The state after the latest frame: that of the builder, unless plans are in flight."""
        if not (self._pending or self.builder.ops):
            return keyframe(self.builder.state)
        state = restore(self._keyframe, self.builder.state.block_size)
        for op, args in split(self._ops):
            state.apply(op, args)
        return keyframe(state)

    def follow(self, event: Event) -> bytes:
        """Apply the next event; returns the bytes of a chunk that has become full, or nothing."""
        numbers = self.builder.numbers
        texts = [(d, numbers.get(d.request, -1)) for d in self._sentences.follow(event)]  # type: ignore[arg-type]
        if isinstance(event, Completed):  # its operations belong to the next frame
            data = self._complete(event, [(d.kind, r, d.text) for d, r in texts])
            self.builder.follow(event)
            return data
        self.builder.follow(event)
        self._texts_before += [
            (d.kind, numbers.get(d.request, r) if r < 0 else r, d.text) for d, r in texts  # type: ignore[arg-type]
        ]  # fmt: skip
        self._marks_before |= _mark_of(event)
        self._num_before["finished"] += len(ended_by(event))
        self._num_before["preempted"] += len(preempted_by(event))
        if isinstance(event, Planned) and not event.plan.is_empty:
            self._plan(event.plan)
        elif isinstance(event, Failed):
            self._fail(event)
        return b""

    def _plan(self, plan: Plan) -> None:
        ops, entries = self.builder.take()
        admitted, num_cached = plan.admitted, sum(each.num_cached for each in plan.admitted)
        marks = {
            Mark.PREEMPTION: plan.preempted, Mark.BLOCK: self.builder.has_new_block,
            Mark.HIT: num_cached, Mark.ADMISSION: admitted,
        }  # fmt: skip
        columns = {
            "step": plan.step, "running": plan.num_running, "waiting": plan.num_waiting,
            "swapped": self.builder.state.num_swapped, "free": plan.num_free,
            "decodes": len(plan.decodes), "prefill": plan.num_prefill, "num_steps": plan.num_steps,
            "admitted": len(admitted), "blocked": len(plan.blocked), "cached": num_cached,
            **self._num_before,
        }  # fmt: skip
        mark = self._marks_before
        for each, happened in marks.items():
            mark |= each if happened else Mark(0)
        frame = _Frame(plan, ops, entries, columns, mark, self._texts_before)
        self._pending.append(frame)
        self._start_frame()

    def _complete(self, event: Completed, texts: list[tuple[str, int, str]]) -> bytes:
        if self._pending and self._pending[0].plan is event.plan:
            frame = self._pending.popleft()
            frame.texts += texts
            frame.columns["finished"] += len(event.finished)
            if event.finished:
                frame.marks |= Mark.END
            result = event.result
            self._add_frame(frame, (event.plan.ended, result.started, result.ended or event.time))
        else:  # it was in flight when the recording started
            self._texts_before += texts
        limit = FRAMES_PER_CHUNK if self._first else FRAMES_PER_FIRST_CHUNK
        return self.flush() if self.num_frames - self._first >= limit else b""

    def _fail(self, event: Failed) -> None:
        """Plans in flight have no result; then a frame shows that everything was forgotten."""
        last = event.time
        while self._pending:
            frame = self._pending.popleft()
            self._add_frame(frame, (frame.plan.ended, last, last))
        self._ended = last
        self.settle()

    def finish(self, **summary: Any) -> bytes:
        """The frame after the last plan, and the end record."""
        self.settle()
        return self.flush() + record(Record.END, json.dumps(summary).encode())

    def settle(self) -> None:
        """Add a frame with what no later plan has seen, if there is anything."""
        if self._pending:
            return
        ops, entries = self.builder.take()
        if ops or self._texts_before:
            state, last = self.builder.state, self._ended
            running = sum(request.status in RUNNING for request in state.requests.values())
            is_unknown = running and not state.refs  # a trace without block numbers
            columns = {
                "step": -1, "running": running, "waiting": len(state.requests) - running,
                "swapped": state.num_swapped, **self._num_before,
                "free": self._num_free if is_unknown else self._num_blocks - len(state.refs),
            }  # fmt: skip
            plan = Plan(-1, num_free=columns["free"])
            frame = _Frame(plan, ops, entries, columns, self._marks_before, self._texts_before)
            self._add_frame(frame, (last, last, last))
            self._start_frame()

    def _start_frame(self) -> None:
        """What happens from now on belongs to the frame after the latest one."""
        self._texts_before, self._marks_before = [], Mark(0)
        self._num_before = {"finished": 0, "preempted": 0}

    def flush(self) -> bytes:
        """The frames since the last chunk, as a chunk; nothing if there are none."""
        if self.num_frames == self._first:
            return b""
        parts = (*self._columns, self._offsets, self._ops, self._keyframe)
        requests = [_described(request) for request in self._entries]
        names = {"first": self._first, "requests": requests, "texts": self._texts}
        sizes = struct.pack(
            "<IIII", self.num_frames - self._first, len(self._ops), len(self._keyframe), 0
        )
        data = sizes + self._times.tobytes() + b"".join(part.tobytes() for part in parts)
        self._start()
        return record(Record.CHUNK, data + json.dumps(names).encode())

    def _add_frame(self, frame: _Frame, times: Sequence[float]) -> None:
        self._times.extend(times)
        numbers = {**frame.columns, "marks": int(frame.marks)}
        for name, column in zip(COLUMNS, self._columns, strict=True):
            column.append(numbers.get(name, 0))
        self._ops.extend(frame.ops)
        self._offsets.append(len(self._ops))
        self._entries += frame.entries
        self._texts += [(self.num_frames, *text) for text in frame.texts]
        self.num_frames += 1
        self._num_free, self._ended = frame.plan.num_free, times[-1]


def _mark_of(event: Event) -> Mark:
    """The marks of an event that is not a plan with work."""
    if isinstance(event, Added):
        return Mark.ARRIVAL
    if isinstance(event, Aborted):
        return Mark.ABORT | Mark.END
    mark = Mark.PREEMPTION if preempted_by(event) else Mark(0)
    return mark | Mark.END if ended_by(event) else mark


def _described(request: Request) -> list[Any]:
    params = request.params
    return [
        request.id, request.num_prompt, request.limit, request.arrival, params.max_tokens,
        params.priority, params.client, request.parent.id if request.parent else None,
    ]  # fmt: skip


# Keyframes.


def keyframe(state: RecordedState) -> array[int]:
    """The whole state as integers."""
    reason, num_rest = state.rest or (0, 0)
    numbers = array("i", [state.num_finished, reason, num_rest, len(state.requests)])
    for r, request in state.requests.items():
        blocked = request.blocked or (-1, 0, 0)
        numbers.extend(
            (
                r, request.status, state.computed(r), state.generated(r), request.cached,
                request.num_preemptions, *blocked, r in state.joined,
            )
        )  # fmt: skip
        for blocks in (request.blocks, request.host):
            numbers.append(len(blocks))
            numbers.extend(blocks)
    runs = list(_runs(sorted(state.published)))
    numbers.append(len(runs))
    for start, length in runs:
        numbers.extend((start, length))
    return numbers


def restore(numbers: Sequence[int], block_size: int) -> RecordedState:
    """The state of a keyframe."""
    state, rest = RecordedState(block_size), iter(numbers)
    state.num_finished, reason, num_rest, num_requests = (next(rest) for _ in range(4))
    state.rest = (reason, num_rest) if num_rest else None
    for _ in range(num_requests):
        r, status, computed, generated, cached, preemptions = (next(rest) for _ in range(6))
        why, need, have, is_joined = (next(rest) for _ in range(4))
        blocks, host = ([next(rest) for _ in range(next(rest))] for _ in range(2))
        blocked = (why, need, have) if why >= 0 else None
        state.requests[r] = RecordedRequest(
            Status(status), computed, generated, cached, preemptions, blocks, host, blocked
        )
        state.num_swapped += status == Status.SWAPPED
        if is_joined:
            state.joined[r] = None
        for block in blocks:
            state.refs[block] = state.refs.get(block, 0) + 1
    for _ in range(next(rest)):
        start, length = next(rest), next(rest)
        state.published.update(range(start, start + length))
    return state


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, as start and length."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], place - start
            start = place
