"""How much service every client has had: the virtual token counters behind fair queueing.

A request is charged when it leaves its seat. A client that comes back from a pause starts level with
the least served active one, seats aside: idling saves up no credit, but it may have as much in
seats as that one has before it is served more.
"""

from __future__ import annotations

from heapq import nsmallest

OUTPUT_WEIGHT = 2.0  # an output token costs about twice a prompt token
MAX_IDLE = 1024  # idle clients remembered


class Ledger:
    """Weighted tokens served to requests that have left their seats, by client group."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._active: dict[str, int] = {}  # requests in the system
        self._level = 0.0  # of the last one to leave an empty system

    def arrive(self, group: str) -> None:
        if group not in self._active:
            floor = min((self.served[g] for g in self._active), default=self._level)
            self.served[group] = max(self.served.get(group, 0.0), floor)
        self._active[group] = self._active.get(group, 0) + 1

    def depart(self, group: str) -> None:
        self._active[group] -= 1
        if not self._active[group]:
            del self._active[group]
            if not self._active:
                self._level = max(self._level, self.served[group])
            if len(self.served) > len(self._active) + MAX_IDLE:
                self._forget_idle()

    def charge(self, group: str, service: float) -> None:
        self.served[group] += service

    def _forget_idle(self) -> None:
        """The least served of the idle ones: they would start level with the active anyway."""
        idle = [group for group in self.served if group not in self._active]
        for group in nsmallest(MAX_IDLE // 2, idle, key=self.served.__getitem__):
            del self.served[group]
