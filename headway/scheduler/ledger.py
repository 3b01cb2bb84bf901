"""How much service every client has had: the virtual token counters behind fair queueing.

A prompt is charged when it is admitted, an output when it leaves its seat. A client that comes
back from a pause starts level with the least served active one: idling saves up no credit.
"""

from __future__ import annotations

from collections import Counter

OUTPUT_WEIGHT = 2.0  # an output token costs about twice a prompt token
MOST_IDLE = 1024  # idle clients remembered


class Ledger:
    """Weighted tokens served, by client group."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._active: Counter[str] = Counter()

    def arrive(self, group: str) -> None:
        if not self._active[group]:
            floor = min((self.served[g] for g in self._active if self._active[g]), default=0.0)
            self.served[group] = max(self.served.get(group, 0.0), floor)
        self._active[group] += 1

    def depart(self, group: str) -> None:
        self._active[group] -= 1
        if not self._active[group]:
            del self._active[group]
            if len(self.served) > len(self._active) + MOST_IDLE:
                self._forget_idle()

    def charge(self, group: str, num_prompt: int, num_output: int) -> None:
        self.served[group] += num_prompt + OUTPUT_WEIGHT * num_output

    def _forget_idle(self) -> None:
        """Idle clients below the least served active one would start level with it anyway."""
        floor = min((self.served[g] for g in self._active), default=0.0)
        self.served = {
            g: tokens for g, tokens in self.served.items() if g in self._active or tokens > floor
        }
