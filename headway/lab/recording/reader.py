"""Reads a recording: the numbers of every frame, and the state at any of them."""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import HeadwayError
from headway.lab.recording.format import COLUMNS, TIMES, VERSION, Record, Text
from headway.lab.recording.state import Op, RecordedState, split

Ints = npt.NDArray[np.int32]
Entry = tuple[str, int, int, float, int | None, int, str, str | None]  # as docs/recording.md says


@dataclass(slots=True)
class Chunk:
    """Consecutive frames, and the state before the first of them."""

    first: int
    times: npt.NDArray[np.float64]  # [frame, planned started ended]
    columns: dict[str, Ints]
    offsets: Ints  # of each frame's operations
    ops: Ints
    keyframe: Ints
    texts: list[Text]


class RunRecording:
    """A recording that is read record by record."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.end: dict[str, Any] | None = None
        self.chunks: list[Chunk] = []
        self.requests: list[Entry] = []

    @property
    def num_frames(self) -> int:
        return self.chunks[-1].first + len(self.chunks[-1].times) if self.chunks else 0

    def read(self, data: bytes) -> int:
        """Read all complete records; returns the number of bytes that were used."""
        place = 0
        while place + 8 <= len(data):
            kind, length = struct.unpack_from("<II", data, place)
            end = place + 8 + length + -length % 8
            if end > len(data):
                break
            self._read_record(Record(kind), data[place + 8 : place + 8 + length])
            place = end
        return place

    def _read_record(self, kind: Record, payload: bytes) -> None:
        if kind is Record.CHUNK:
            self._read_chunk(payload)
        elif kind is Record.END:
            self.end = json.loads(payload)
        elif kind is Record.HEADER:
            self.header = json.loads(payload)
            if (version := self.header.get("recording")) != VERSION:
                raise HeadwayError(f"recording version {version} cannot be read")

    def _read_chunk(self, payload: bytes) -> None:
        num_frames, num_ops, num_key, _ = struct.unpack_from("<IIII", payload)
        times = np.frombuffer(payload, "<f8", num_frames * len(TIMES), 16)
        sizes = [*[num_frames] * len(COLUMNS), num_frames + 1, num_ops, num_key]
        ints = np.frombuffer(payload, "<i4", sum(sizes), 16 + times.nbytes)
        *columns, offsets, ops, keyframe = np.split(ints, np.cumsum(sizes)[:-1])
        names = json.loads(payload[16 + times.nbytes + ints.nbytes :])
        self.requests += [tuple(each) for each in names["requests"]]
        self.chunks.append(
            Chunk(
                names["first"], times.reshape(-1, len(TIMES)),
                dict(zip(COLUMNS, columns, strict=True)), offsets, ops, keyframe,
                [tuple(text) for text in names["texts"]],
            )
        )  # fmt: skip

    def chunk_of(self, frame: int) -> Chunk:
        return self.chunks[bisect_right(self.chunks, frame, key=lambda chunk: chunk.first) - 1]

    def ops(self, frame: int) -> list[int]:
        """The operations of a frame."""
        chunk = self.chunk_of(frame)
        start, end = chunk.offsets[frame - chunk.first : frame - chunk.first + 2]
        ops: list[int] = chunk.ops[start:end].tolist()
        return ops

    def column(self, name: str, frame: int) -> int:
        chunk = self.chunk_of(frame)
        return int(chunk.columns[name][frame - chunk.first])

    def drafts(self, frame: int) -> list[tuple[int, int, int]]:
        """Requests with drafts in a frame, the drafts, and those that were right (-1: unknown)."""
        found = (tuple(args) for op, args in split(self.ops(frame)) if op is Op.DRAFT)
        return [(r, number, accepted) for r, number, accepted in found]

    def texts(self, frame: int) -> Iterator[Text]:
        return (text for text in self.chunk_of(frame).texts if text[0] == frame)

    def state(self, frame: int) -> RecordedState:
        """The state right after the plan of a frame."""
        chunk = self.chunk_of(frame)
        state = RecordedState.restore(chunk.keyframe.tolist(), self.header["config"]["block_size"])
        end = chunk.offsets[frame - chunk.first + 1]
        for op, args in split(chunk.ops[:end].tolist()):
            state.apply(op, args)
        return state


def read_recording(pieces: Iterable[bytes]) -> RunRecording:
    """A recording from pieces of any size."""
    recording, data = RunRecording(), b""
    for piece in pieces:
        data += piece
        data = data[recording.read(data) :]
    return recording
