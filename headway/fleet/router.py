"""The router: a routing rule, the prefix tracker, the replicas' loads and the serial number of the
next decision.

The gateway and the simulator tell it every change of a replica's load; it adds what the replicas'
caches hold of the prompt and calls the rule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.fleet.prefixes.tracker import PrefixTracker
from headway.fleet.routing import ReplicaViews, RouteRequest, RouteRule, call_route


class ReplicaLoad(NamedTuple):
    """The fields of a ReplicaView that do not depend on the request."""

    name: str
    waiting_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int


class Choice(NamedTuple):
    """The name of the chosen replica, and the tokens of the prompt that it has to compute."""

    replica: str
    num_new: int


class Router:
    """Chooses a replica for each request. `tracker` must follow the replicas' cache deltas."""

    def __init__(self, rule: RouteRule, block_size: int) -> None:
        self.rule, self.block_size = rule, block_size
        self.tracker = PrefixTracker()
        self._tick = 0
        self._slots: dict[str, int] = {}  # of the replicas that take requests, as they joined
        self._loads = np.zeros((len(ReplicaLoad._fields) - 1, 8))  # by slot
        self._ready: _Ready | None = None  # of all of them; None after one has come or gone

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return len(self._slots)

    def update(self, load: ReplicaLoad) -> None:
        """A replica takes requests from now on, and has this load."""
        name, *numbers = load
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self.tracker.slot(name)
            self._ready = None
            while slot >= self._loads.shape[1]:
                self._loads = np.hstack([self._loads, np.zeros_like(self._loads)])
        self._loads[:, slot] = numbers

    def remove(self, name: str) -> None:
        """A replica takes no requests from now on."""
        if self._slots.pop(name, None) is not None:
            self._ready = None

    def forget(self, name: str) -> None:
        """A replica has left, with its cache."""
        self.remove(name)
        self.tracker.clear(name)

    def choose(
        self,
        id: str,
        num_prompt: int,
        keys: Sequence[bytes],
        client: str,
        avoids: Collection[str] = (),
    ) -> Choice | None:
        """The replica for a request, none of `avoids`; None if there is none.

        `keys` are the prefix keys of the prompt's full blocks, empty if the request must not read
        the cache. PolicyError if the rule fails.
        """
        ready = self._ready = self._ready or _Ready(self._slots)
        if avoids:
            ready = _Ready({name: n for name, n in self._slots.items() if name not in avoids})
        if not ready.names:
            return None
        cached = self._num_cached(keys, ready)
        # The last token is computed even after a full hit.
        num_new = np.maximum(1, num_prompt - cached)
        replicas = ReplicaViews(ready.names, cached, num_new, self._loads[:, ready.slots])
        request = RouteRequest(id, num_prompt, keys, client, self._tick)
        place = call_route(self.rule, request, replicas)
        self._tick += 1
        return Choice(ready.names[place], int(num_new[place]))

    def _num_cached(self, keys: Sequence[bytes], ready: _Ready) -> NDArray[np.float64]:
        """Tokens in the leading blocks of a prompt that each replica holds."""
        found = list(self.tracker.leading(keys, ready.bits))
        if len(found) == 1:  # all hold equally many
            return np.full(len(ready.names), float(found[0][0] * self.block_size))
        width = (self._loads.shape[1] + 7) // 8
        packed = b"".join([bits.to_bytes(width, "little") for _, bits in found])
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        num_tokens = np.array([number * self.block_size for number, _ in found], np.float64)
        cached: NDArray[np.float64] = num_tokens.dot(bits.reshape(len(found), width * 8))
        return cached[ready.slots]


class _Ready:
    """Replicas to choose from: names and slots in one order, and the bits of all slots."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.names = tuple(slots)
        in_order = list(slots.values()) == list(range(len(slots)))  # then no copy is needed
        self.slots: slice | NDArray[np.int64] = slice(len(slots))
        if not in_order:
            self.slots = np.array(list(slots.values()))
        self.bits = sum(1 << slot for slot in slots.values())
