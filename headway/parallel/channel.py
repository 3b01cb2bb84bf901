"""Shared memory between rank 0 and the others: messages to them, their counters and reports.

The memory is a file without a name, so that nothing is left behind however a process ends. One
writer, several readers; a message is read by every rank. Readers are woken by their sockets.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

MEMORY = Path("/dev/shm")  # in memory if the system has it
NUM_COUNTERS = 768  # 64-bit numbers: written, and for each rank read, beats and position
WRITTEN, READ, BEATS, POSITION = 0, 1, 256, 512  # their places; what is written and read in bytes
MAX_RANKS = BEATS - READ
MAX_REPORT = 1000  # bytes that a rank can leave to say why it ended
REPORTS = 8 * NUM_COUNTERS
HEADER = REPORTS + MAX_REPORT * MAX_RANKS
PREFIX, WRAP = 8, (1 << 32) - 1  # bytes of a message's length; the length that ends a lap
FULL_WAIT = 50e-6  # seconds between two looks at a full buffer


def anonymous_file() -> int:
    """A file descriptor of a new file without a name."""
    with tempfile.TemporaryFile(dir=MEMORY if MEMORY.is_dir() else None) as file:
        return os.dup(file.fileno())


class Channel:
    """The memory as one process sees it. `rank` is 0 for the writer."""

    def __init__(self, file: int, rank: int, size: int, capacity: int) -> None:
        """`capacity` is in bytes, the same in all processes."""
        self.capacity = -(-capacity // PREFIX) * PREFIX
        os.ftruncate(file, HEADER + self.capacity)
        self._memory = mmap.mmap(file, HEADER + self.capacity)
        self._counters = np.frombuffer(self._memory, np.int64, NUM_COUNTERS)
        self._rank, self._size = rank, size

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Add a message; `check` is called while the buffer is full, and may raise."""
        need = PREFIX + -(-len(message) // PREFIX) * PREFIX
        assert 2 * need <= self.capacity, "the capacity is computed from the largest message"
        position = int(self._counters[WRITTEN])
        place = position % self.capacity
        left = self.capacity - place
        skipped = left if left < need else 0
        while position + skipped + need - self._slowest() > self.capacity:
            check()
            time.sleep(FULL_WAIT)
        if skipped:
            self._put(place, WRAP.to_bytes(PREFIX, "little"))
            place = 0
        self._put(place, len(message).to_bytes(PREFIX, "little") + message)
        self._counters[WRITTEN] = position + skipped + need

    def read(self) -> bytes | None:
        """The next message for this rank; None if there is none."""
        position = int(self._counters[READ + self._rank])
        if position == self._counters[WRITTEN]:
            return None
        place = position % self.capacity
        length = int.from_bytes(self._get(place, PREFIX), "little")
        if length == WRAP:
            position, place = position + self.capacity - place, 0
            length = int.from_bytes(self._get(place, PREFIX), "little")
        message = self._get(place + PREFIX, length)
        self._counters[READ + self._rank] = position + PREFIX + -(-length // PREFIX) * PREFIX
        return message

    def beat(self) -> None:
        """Show that this process runs."""
        self._counters[BEATS + self._rank] += 1

    def beats(self, rank: int) -> int:
        return int(self._counters[BEATS + rank])

    def publish(self, position: int) -> None:
        """Show how far this rank is; see progress.py."""
        self._counters[POSITION + self._rank] = position

    def position(self, rank: int) -> int:
        return int(self._counters[POSITION + rank])

    def report(self, text: str) -> None:
        """Leave the reason for which this rank ends."""
        data, start = text.encode()[:MAX_REPORT], REPORTS + MAX_REPORT * (self._rank - 1)
        self._memory[start : start + len(data)] = data

    def report_of(self, rank: int) -> str:
        """The reason that a rank left; empty if there is none."""
        start = REPORTS + MAX_REPORT * (rank - 1)
        left = self._memory[start : start + MAX_REPORT].rstrip(b"\0")
        return left.decode(errors="replace")

    def _slowest(self) -> int:
        return int(self._counters[READ + 1 : READ + self._size].min())

    def _put(self, place: int, data: bytes) -> None:
        self._memory[HEADER + place : HEADER + place + len(data)] = data

    def _get(self, place: int, count: int) -> bytes:
        return self._memory[HEADER + place : HEADER + place + count]
