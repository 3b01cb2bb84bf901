"""The router: a routing rule, the prefix tracker and the serial number of the next decision.

The gateway and the simulator give it the load of every replica that takes requests; it adds what
the replicas' caches hold of the prompt and calls the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.fleet.prefix_tracker import PrefixTracker
from headway.fleet.routing import ReplicaView, RouteRequest, RouteRule, call_route


class ReplicaLoad(NamedTuple):
    """The fields of a ReplicaView that do not depend on the request."""

    name: str
    waiting_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int


class Router:
    """Chooses a replica for each request. `tracker` must follow the replicas' cache deltas."""

    def __init__(self, rule: RouteRule, block_size: int) -> None:
        self.rule, self.block_size = rule, block_size
        self.tracker = PrefixTracker()
        self._tick = 0

    def choose(
        self,
        id: str,
        num_prompt: int,
        keys: Sequence[bytes],
        client: str,
        loads: Sequence[ReplicaLoad],
    ) -> tuple[int, ReplicaView]:
        """The index of the chosen replica and its view; PolicyError if the rule fails.

        `keys` are the prefix keys of the prompt's full blocks, empty if the request must not read
        the cache. At least one replica must be given.
        """
        views = [self._view(num_prompt, keys, load) for load in loads]
        place = call_route(self.rule, RouteRequest(id, num_prompt, keys, client, self._tick), views)
        self._tick += 1
        return place, views[place]

    def _view(self, num_prompt: int, keys: Sequence[bytes], load: ReplicaLoad) -> ReplicaView:
        name, *rest = load
        cached = self.tracker.num_cached(keys, name) * self.block_size
        # The last token is computed even after a full hit.
        return ReplicaView(name, cached, max(1, num_prompt - cached), *rest)
