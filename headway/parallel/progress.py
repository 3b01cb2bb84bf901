"""How far each rank is in its plans, and memory in which all ranks of a group show it.

A position is the number of a plan, and of its collectives so far. All ranks run the same plans with
the same collectives, so positions can be compared. A rank that is behind rank 0 while rank 0 waits
for it is late; watch.py ends one that stays late.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np

PLAN = 1 << 20  # positions of one plan: more than it can have collectives
MEMORY = Path("/dev/shm")  # in memory if the system has it
MAX_RANKS = 255
MAX_REPORT = 1000  # bytes that a rank can leave to say why it ended


class Progress:
    """The position of this rank, and whether it waits for the other ranks."""

    def __init__(self, publish: Callable[[int], None] = lambda _: None) -> None:
        """`publish` shows a position to the other ranks."""
        self.position = 0
        self.is_waiting = False
        self.seconds = 0.0  # that this rank computed, from the collective before to this position
        self._publish = publish
        self._plan_begun = self._since = monotonic()

    def begin_plan(self) -> None:
        self._plan_begun = self._since = monotonic()
        self._reach((self.position // PLAN + 1) * PLAN)

    def enter(self) -> None:
        """Wait in a collective from now on."""
        self.seconds = monotonic() - self._since
        self._reach(self.position + 1)
        self.is_waiting = True

    def leave(self) -> None:
        self.is_waiting = False
        self._since = monotonic()

    def end_plan(self) -> None:
        """The plan is launched. Its captured collectives do not count one by one."""
        self.seconds = monotonic() - self._plan_begun
        self._reach(self.position | (PLAN - 1))

    def _reach(self, position: int) -> None:
        self.position = position
        self._publish(position)


def anonymous_file() -> int:
    """A file descriptor of a new file without a name: nothing is left when its processes end."""
    with tempfile.TemporaryFile(dir=MEMORY if MEMORY.is_dir() else None) as file:
        return os.dup(file.fileno())


class SharedState:
    """Heartbeats, positions and reports of all ranks, as `rank` sees and changes them."""

    def __init__(self, file: int, rank: int) -> None:
        counters = 8 * 2 * (MAX_RANKS + 1)
        size = counters + MAX_REPORT * (MAX_RANKS + 1)
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        self._beats, self._positions = np.frombuffer(memory, np.int64, counters // 8).reshape(2, -1)
        self._reports = np.frombuffer(memory, f"S{MAX_REPORT}", offset=counters)
        self._rank = rank

    def beat(self) -> None:
        """Show that this process runs."""
        self._beats[self._rank] += 1

    def beats(self, rank: int) -> int:
        return int(self._beats[rank])

    def publish(self, position: int) -> None:
        self._positions[self._rank] = position

    def position(self, rank: int) -> int:
        return int(self._positions[rank])

    def report(self, text: str) -> None:
        """Leave the reason for which this rank ends."""
        self._reports[self._rank] = text.encode()[:MAX_REPORT]

    def report_of(self, rank: int) -> str:
        """The reason that a rank left; empty if there is none."""
        return bytes(self._reports[rank]).decode(errors="replace")
