"""How far a rank is in its plans: the number of the plan, and of its collectives so far.

All ranks run the same plans with the same collectives, so positions can be compared. A rank that is
behind rank 0 while rank 0 waits for it is late; watch.py ends one that stays late.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

PLAN = 1 << 20  # positions of one plan: more than it can have collectives


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
