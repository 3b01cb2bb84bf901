"""The built-in routing rules and a router, written plainly: a loop over a list of views."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from headway.fleet.router import Choice, ReplicaLoad
from headway.fleet.routing import (
    ReplicaView,
    RouteRequest,
    cells,
    chwbl,
    least_loaded,
    prefix_load,
    round_robin,
    sglang,
)


def plain_choice(rule: Any, request: RouteRequest, views: Sequence[ReplicaView]) -> int:
    """What a built-in rule must return."""
    if rule is round_robin:
        return request.tick % len(views)
    if rule is prefix_load:
        batch = 0.25 * request.num_prompt
        return _least(request.tick, [
            (view.waiting_tokens + 8 * view.num_new + batch * view.num_open, view.num_open)
            for view in views
        ])  # fmt: skip
    if isinstance(rule, cells):
        return _cells(rule, request, views)
    if isinstance(rule, chwbl) and request.keys:
        return _chwbl(rule, request, views)
    if isinstance(rule, sglang):
        loads = [view.num_open for view in views]
        low, high = min(loads), max(loads)
        is_apart = high - low > rule.balance_abs and high > rule.balance_rel * low
        most = max(view.num_cached for view in views)
        if not is_apart and most > rule.cache_threshold * request.num_prompt:
            return _least(request.tick, [(-view.num_cached, view.num_open) for view in views])
    else:
        assert rule is least_loaded or isinstance(rule, chwbl)
    return _least(request.tick, [(view.num_open, view.waiting_tokens) for view in views])


def _chwbl(rule: chwbl, request: RouteRequest, views: Sequence[ReplicaView]) -> int:
    ring = sorted(
        (xxh3_64_intdigest(f"{view.name}/{point}".encode()), place)
        for place, view in enumerate(views)
        for point in range(rule.replication)
    )
    key = request.keys[min(rule.prefix_blocks, len(request.keys)) - 1]
    first = bisect([point for point, _ in ring], int.from_bytes(key[:8], "big"))
    limit = rule.load_factor * (sum(view.num_open for view in views) + 1) / len(views)
    for _, place in ring[first:] + ring[:first]:
        if views[place].num_open + 1 <= max(1.0, limit):
            return place
    return plain_choice(least_loaded, request, views)


def _cells(rule: cells, request: RouteRequest, views: Sequence[ReplicaView]) -> int:
    number = -(-len(views) // rule.size)
    starts = [len(views) * cell // number for cell in range(number + 1)]
    parts = [views[starts[cell] : starts[cell + 1]] for cell in range(number)]
    num_open = [sum(view.num_open for view in part) for part in parts]
    as_views = [ReplicaView(str(cell), 0, 1, 0, num_open[cell], 0, 0, 0) for cell in range(number)]
    limit = max(1.0, rule.load_factor * (sum(num_open) + 1) / number)
    cell = num_open.index(min(num_open))
    if request.keys and any(each + 1 <= limit for each in num_open):
        cell = _chwbl(chwbl(rule.load_factor, rule.prefix_blocks, 256), request, as_views)
    return starts[cell] + plain_choice(prefix_load, request, parts[cell])


def _least(tick: int, keys: list[Any]) -> int:
    places = [place for place, key in enumerate(keys) if key == min(keys)]
    return places[tick % len(places)]


class PlainRouter:
    """A set of keys and a load for each replica; every decision reads all of them."""

    def __init__(self, rule: Any, block_size: int) -> None:
        self.rule, self.block_size, self.tick = rule, block_size, 0
        self.held: dict[str, set[bytes]] = {}
        self.loads: dict[str, ReplicaLoad] = {}

    def choose(
        self, num_prompt: int, keys: Sequence[bytes], avoids: Sequence[str] = ()
    ) -> Choice | None:
        loads = [load for load in self.loads.values() if load.name not in avoids]
        if not loads:
            return None
        views = []
        for load in loads:
            held, num_blocks = self.held.get(load.name, set()), 0
            while num_blocks < len(keys) and keys[num_blocks] in held:
                num_blocks += 1
            cached = num_blocks * self.block_size
            views.append(ReplicaView(load.name, cached, max(1, num_prompt - cached), *load[1:]))
        place = plain_choice(self.rule, RouteRequest("r", num_prompt, keys, "", self.tick), views)
        self.tick += 1
        return Choice(views[place].name, views[place].num_new)
