"""The binary form of a film: a header, chunks of some hundred frames, and an end.

docs/film.md describes the bytes. A chunk starts with a keyframe, the state before its first frame,
so showing any frame takes one keyframe and the operations of at most one chunk.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any

from headway.lab.film.builder import FINISH_REASONS, REASONS, RUNNING, FilmBuilder, FilmEntry, Frame
from headway.lab.film.state import FilmRequest, FilmState, Op, Status
from headway.observe.trace import Line

VERSION = 2
FRAMES_PER_CHUNK = 256
FRAMES_PER_FIRST_CHUNK = 32  # so that the first frames can be shown early


class Record(IntEnum):
    """The kinds of records in a film."""

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


def header_record(header: Line, **more: Any) -> bytes:
    """The first record: the header of the trace, and the names of all numbers."""
    names = {
        "film": VERSION, "reasons": REASONS, "finish_reasons": FINISH_REASONS,
        "columns": COLUMNS, "ops": {op.name: op.value for op in Op},
        "marks": {mark.name: mark.value for mark in Mark},
        "statuses": [status.name.lower() for status in Status],
    }  # fmt: skip
    return record(Record.HEADER, json.dumps({**names, **header, **more}).encode())


class FilmWriter:
    """Collects frames and gives them out as chunks."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.builder = FilmBuilder(config["block_size"])
        self.num_frames = 0
        self._num_blocks: int = config["num_blocks"]
        self._num_free, self._ended = (
            self._num_blocks,
            0.0,
        )  # free blocks and time, at the last line
        self._start()

    def load(self, state: dict[str, Any]) -> None:
        """Start in the middle of a run; call it before the first line."""
        frame = self.builder.load(state)
        self._start()
        self._entries += frame.added

    def _start(self) -> None:
        self._first = self.num_frames
        self._keyframe = keyframe(self.builder.state)
        self._times, self._columns = array("d"), [array("i") for _ in COLUMNS]
        self._offsets, self._ops = array("i", [0]), array("i")
        self._entries: list[FilmEntry] = []
        self._texts: list[Text] = []

    def add(self, line: Line, texts: Sequence[tuple[str, str, str]] = ()) -> bytes:
        """One line of a trace, with its sentences: kind, request id or "", text.

        Returns the bytes of a chunk that has become full, or nothing.
        """
        frame, numbers = self.builder.add(line), self.builder.numbers
        for kind, id, text in texts:
            r = numbers.get(id, frame.finished.get(id, -1))
            self._texts.append((self.num_frames, kind, r, text))
        self._add_frame(frame, (line["t"], line["start"], line["end"]), self._numbers(line))
        self._num_free, self._ended = line["free"], line["end"] or line["t"]
        limit = FRAMES_PER_CHUNK if self._first else FRAMES_PER_FIRST_CHUNK
        return self.flush() if self.num_frames - self._first >= limit else b""

    def finish(self, **summary: Any) -> bytes:
        """The frame after the last plan, and the end record."""
        self.settle()
        return self.flush() + record(Record.END, json.dumps(summary).encode())

    def settle(self) -> None:
        """Add a frame with the results that no later plan has seen, if there are any."""
        frame, last = self.builder.finish(), self._ended
        if frame.ops:
            self._add_frame(frame, (last, last, last), self._last_numbers())

    def flush(self) -> bytes:
        """The frames since the last chunk, as a chunk; nothing if there are none."""
        if self.num_frames == self._first:
            return b""
        parts = (*self._columns, self._offsets, self._ops, self._keyframe)
        requests = [_described(entry) for entry in self._entries]
        names = {"first": self._first, "requests": requests, "texts": self._texts}
        sizes = struct.pack(
            "<IIII", self.num_frames - self._first, len(self._ops), len(self._keyframe), 0
        )
        data = sizes + self._times.tobytes() + b"".join(part.tobytes() for part in parts)
        self._start()
        return record(Record.CHUNK, data + json.dumps(names).encode())

    def _add_frame(self, frame: Frame, times: Sequence[float], numbers: list[int]) -> None:
        self.num_frames += 1
        self._times.extend(times)
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)
        self._ops.extend(frame.ops)
        self._offsets.append(len(self._ops))
        self._entries += frame.added

    def _last_numbers(self) -> list[int]:
        """The columns of the frame after the last plan, which has no line."""
        state = self.builder.state
        running = sum(request.status in RUNNING for request in state.requests.values())
        is_unknown = running and not state.refs  # a trace without block numbers
        known = {
            "step": -1, "running": running, "waiting": len(state.requests) - running,
            "swapped": state.num_swapped,
            "free": self._num_free if is_unknown else self._num_blocks - len(state.refs),
        }  # fmt: skip
        return [known.get(name, 0) for name in COLUMNS]

    def _numbers(self, line: Line) -> list[int]:
        """The columns of a frame."""
        admitted, finished = line.get("admitted", ()), line.get("finished", ())
        preempted, blocked = line.get("preempted", ()), line.get("blocked", ())
        marks = {
            Mark.PREEMPTION: preempted, Mark.BLOCK: self.builder.has_new_block,
            Mark.HIT: any(num_cached for _, num_cached, *_ in admitted), Mark.END: finished,
            Mark.ADMISSION: admitted, Mark.ARRIVAL: line.get("added"),
            Mark.ABORT: line.get("aborted") or line.get("aborted_in_flight"),
        }  # fmt: skip
        return [
            line["step"], line["running"], line["waiting"], self.builder.state.num_swapped, line["free"],
            line["decodes"], sum(end - start for _, start, end, _ in line.get("chunks", ())),
            line.get("num_steps", 1), len(preempted), len(admitted), len(blocked), len(finished),
            sum(num_cached for _, num_cached, *_ in admitted),
            sum(mark for mark, happened in marks.items() if happened),
        ]  # fmt: skip


def _described(entry: FilmEntry) -> list[Any]:
    line = entry.line
    return [
        entry.id, entry.num_prompt, entry.limit, line["arrival"], line["max_tokens"],
        line.get("priority", 0), line.get("client", ""), line.get("parent"),
    ]  # fmt: skip


# Keyframes.


def keyframe(state: FilmState) -> array[int]:
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


def restore(numbers: Sequence[int], block_size: int) -> FilmState:
    """The state of a keyframe."""
    state, rest = FilmState(block_size), iter(numbers)
    state.num_finished, reason, num_rest, num_requests = (next(rest) for _ in range(4))
    state.rest = (reason, num_rest) if num_rest else None
    for _ in range(num_requests):
        r, status, computed, generated, cached, preemptions = (next(rest) for _ in range(6))
        why, need, have, is_joined = (next(rest) for _ in range(4))
        blocks, host = ([next(rest) for _ in range(next(rest))] for _ in range(2))
        blocked = (why, need, have) if why >= 0 else None
        state.requests[r] = FilmRequest(
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
