"""Clocks: real time, and virtual time for simulations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since a fixed moment."""


class RealClock:
    """Seconds since the clock was created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start


class VirtualClock:
    """Time that moves only by `advance_to`, and never backwards."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        if time > self._now:
            self._now = time
