"""The longest gap of requests that decode together, found when a request leaves the batch.

All requests of a decode batch have the same gaps. The gaps that are the longest since some step form
a list of decreasing values, so a step costs O(1) and a question O(log) of the list's length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
MIN_KEPT = 64  # gaps; a shorter list is never shortened


class SharedGaps(Generic[Key]):
    """The gaps of a decode batch, and the requests that have had all of them since they joined."""

    def __init__(self) -> None:
        self._first: dict[Key, int] = {}  # number of the first gap of each request
        self._num_added = 0
        self._gaps: list[float] = []  # decreasing
        self._numbers: list[int] = []  # of the gaps

    @property
    def keys(self) -> Iterable[Key]:
        """The requests of the batch."""
        return self._first

    def add(self, gap: float) -> None:
        """All requests of the batch have this gap."""
        gaps, numbers = self._gaps, self._numbers
        while gaps and gaps[-1] <= gap:
            gaps.pop()
            numbers.pop()
        gaps.append(gap)
        numbers.append(self._num_added)
        self._num_added += 1
        if len(gaps) > max(MIN_KEPT, 2 * len(self._first)):
            self._forget()

    def join(self, key: Key) -> None:
        """The request has all gaps from the next one on."""
        self._first[key] = self._num_added

    def leave(self, key: Key) -> float:
        """Remove a request; its longest gap since it joined, 0.0 if there is none."""
        longest = self.longest(key)
        self._first.pop(key, None)
        return longest

    def longest(self, key: Key) -> float:
        """The longest gap of a request since it joined; 0.0 without any."""
        first = self._first.get(key, self._num_added)
        place = bisect_left(self._numbers, first)
        return self._gaps[place] if place < len(self._gaps) else 0.0

    def _forget(self) -> None:
        """Keep only the gaps that are the longest of some request."""
        places = {bisect_left(self._numbers, first) for first in self._first.values()}
        kept = sorted(places - {len(self._numbers)})
        self._gaps = [self._gaps[place] for place in kept]
        self._numbers = [self._numbers[place] for place in kept]
