"""Routing rules: which replica gets a request. The gateway and the simulator call the same rules.

A rule is called with a request and a view of every replica that takes requests, and returns an
index into the views. A rule without numbers is a function. A rule with numbers is a callable frozen
dataclass. Neither keeps state: the serial number of the decision and the views have what it needs.
The rules here read columns, so that a decision among a thousand replicas takes a few array operations.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headway.checks import Checked, count, number
from headway.errors import bad_result, policy_failed
from headway.scheduler.policies import text as policy_text


class RouteRequest(NamedTuple):
    """What a rule may read of a request."""

    id: str
    num_prompt: int
    keys: Sequence[bytes]  # prefix keys of the full blocks of its prompt
    client: str
    tick: int  # serial number of the decision


class ReplicaView(NamedTuple):
    """What a rule may read of a replica."""

    name: str
    num_cached: int  # prompt tokens of this request that its cache holds
    num_new: int  # prompt tokens left to compute after these hits, at least 1
    waiting_tokens: int  # prompt tokens not yet computed of requests sent to it
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int

    @property
    def num_open(self) -> int:
        """Requests that were sent to it and have not ended."""
        return self.num_running + self.num_waiting


Column = NDArray[np.float64]


class ReplicaViews(Sequence[ReplicaView]):
    """The views of all replicas that take requests; each field of them is also a column, an array.

    `names` and the columns have one item for each replica. The numbers of columns are whole, but
    floats, with which arrays are computed faster.
    """

    def __init__(
        self, names: tuple[str, ...], num_cached: Column, num_new: Column, loads: Column
    ) -> None:
        """`loads` has a row for each other field of a ReplicaView, in their order."""
        self.names, self.num_cached, self.num_new, self._loads = names, num_cached, num_new, loads
        self.num_open: Column = loads[1] + loads[2]

    waiting_tokens = property(lambda self: self._loads[0])
    num_running = property(lambda self: self._loads[1])
    num_waiting = property(lambda self: self._loads[2])
    num_free_blocks = property(lambda self: self._loads[3])
    num_blocks = property(lambda self: self._loads[4])

    @cached_property
    def _views(self) -> list[ReplicaView]:
        columns = np.array([self.num_cached, self.num_new, *self._loads]).astype(np.int64).tolist()
        return list(map(ReplicaView, self.names, *columns))

    def part(self, start: int, end: int) -> ReplicaViews:
        """The replicas [start, end)."""
        where = slice(start, end)
        columns = self.num_cached[where], self.num_new[where], self._loads[:, where]
        return ReplicaViews(self.names[where], *columns)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> ReplicaView: ...
    @overload
    def __getitem__(self, place: slice) -> list[ReplicaView]: ...
    def __getitem__(self, place: int | slice) -> ReplicaView | list[ReplicaView]:
        return self._views[place]


RouteRule = Callable[[RouteRequest, ReplicaViews], int]


NEW, BATCH = 8, 0.25  # see prefix_load


def prefix_load(request: RouteRequest, replicas: ReplicaViews) -> int:
    """Least delay that the request has and causes, in prompt tokens; ties to the fewest requests.

    It waits for the prompt tokens before it. Each of its new tokens delays it and requests after it,
    about NEW in all on a busy replica. Its decodes read its whole context in every step, beside those
    of all open requests: BATCH of its prompt for each of them. So a cached prefix attracts requests
    until its replica has a longer queue or a larger batch than computing the prefix elsewhere costs.
    """
    batch = BATCH * request.num_prompt
    costs = replicas.waiting_tokens + NEW * replicas.num_new + batch * replicas.num_open
    return _least(request.tick, costs, replicas.num_open)


def least_loaded(request: RouteRequest, replicas: ReplicaViews) -> int:
    """Fewest open requests, then fewest prompt tokens to compute; ties in turn."""
    return _least(request.tick, replicas.num_open, replicas.waiting_tokens)


def round_robin(request: RouteRequest, replicas: ReplicaViews) -> int:
    """Each replica in turn."""
    return request.tick % len(replicas)


@dataclass(frozen=True)
class chwbl(Checked):
    """Consistent hashing with bounded loads, of the first blocks of the prompt.

    A request goes to the first replica on the ring, from the hash of its first `prefix_blocks`
    blocks on, that then has at most `load_factor` times the mean of open requests. A prompt without
    a full block goes to the least loaded replica. `replication` is the number of points of each
    replica on the ring. Does not read the caches.
    """

    load_factor: float = number(1.25, 1)
    prefix_blocks: int = count(8, 1)
    replication: int = count(256, 1, 4096)

    def __call__(self, request: RouteRequest, replicas: ReplicaViews) -> int:
        place = self.first_with_room(request, replicas.names, replicas.num_open)
        return least_loaded(request, replicas) if place is None else place

    def first_with_room(
        self, request: RouteRequest, names: tuple[str, ...], num_open: NDArray[Any]
    ) -> int | None:
        """The index of the first name on the ring with room; None without room or a full block."""
        limit = self.load_factor * (int(num_open.sum()) + 1) / len(names)
        has_room = num_open + 1 <= max(1.0, limit)
        if not (request.keys and has_room.any()):
            return None
        points, owners = _ring(names, self.replication)
        key = request.keys[min(self.prefix_blocks, len(request.keys)) - 1]
        first = bisect(points, int.from_bytes(key[:8], "big"))
        order = (owners[(first + step) % len(owners)] for step in range(len(owners)))
        return next(place for place in order if has_room[place])


@lru_cache(maxsize=64)
def _ring(names: tuple[str, ...], replication: int) -> tuple[list[int], list[int]]:
    """Points on the ring in order, and for each the index of its replica."""
    points = sorted(
        (xxh3_64_intdigest(f"{name}/{point}".encode()), place)
        for place, name in enumerate(names)
        for point in range(replication)
    )
    return [point for point, _ in points], [place for _, place in points]


@dataclass(frozen=True)
class sglang(Checked):
    """The longest cached prefix, unless the numbers of open requests are too far apart.

    Too far apart means that the largest exceeds the smallest by more than `balance_abs` requests
    and by more than `balance_rel` times. Then, and if less than `cache_threshold` of the prompt is
    cached, the request goes to the least loaded replica. SGLang's gateway sends such requests to
    the replica with the smallest cache, however busy it is.
    """

    cache_threshold: float = number(0.3, 0, 1)
    balance_abs: int = count(64, 0)
    balance_rel: float = number(1.5, 1)

    def __call__(self, request: RouteRequest, replicas: ReplicaViews) -> int:
        low, high = int(replicas.num_open.min()), int(replicas.num_open.max())
        is_apart = high - low > self.balance_abs and high > self.balance_rel * low
        most = int(replicas.num_cached.max())
        if is_apart or most <= self.cache_threshold * request.num_prompt:
            return least_loaded(request, replicas)
        return _least(request.tick, -replicas.num_cached, replicas.num_open)


@dataclass(frozen=True)
class cells(Checked):
    """Consistent hashing of the first blocks of the prompt to a cell of replicas; there, prefix_load.

    The replicas are divided, as they joined, into as few cells as possible of at most `size`. Cells
    with more than `load_factor` times the mean of open requests are skipped, as in chwbl. A prompt
    without a full block goes to the cell with the fewest.
    """

    size: int = count(64, 1)
    load_factor: float = number(1.25, 1)
    prefix_blocks: int = count(8, 1)

    def __call__(self, request: RouteRequest, replicas: ReplicaViews) -> int:
        number = -(-len(replicas) // self.size)
        starts = [len(replicas) * cell // number for cell in range(number + 1)]
        num_open = np.add.reduceat(replicas.num_open, starts[:-1])
        ring, names = chwbl(self.load_factor, self.prefix_blocks), tuple(map(str, range(number)))
        cell = ring.first_with_room(request, names, num_open)
        if cell is None:
            cell = int(num_open.argmin())
        inside = replicas.part(starts[cell], starts[cell + 1])
        return starts[cell] + prefix_load(request, inside)


def _least(tick: int, first: NDArray[Any], second: NDArray[Any]) -> int:
    """The index with the least first number, then second; equal ones are taken in turn."""
    (places,) = (first == np.minimum.reduce(first)).nonzero()
    if len(places) > 1:
        others = second[places]
        places = places[others == np.minimum.reduce(others)]
    return int(places[tick % len(places)])


ROUTES: tuple[Any, ...] = (prefix_load, least_loaded, round_robin, chwbl, sglang, cells)
DEFAULT_ROUTE = "prefix_load"


def parse_route(text: str) -> RouteRule:
    """The rule that a user's text names; ConfigError if it is unknown or takes other arguments."""
    known = policy_text.named(ROUTES)
    rule: Any = policy_text.parse_policy("route", text, known, {}, policy_text.ANY)
    policy_text.check_arguments("route", rule, "request replicas")
    return rule  # type: ignore[no-any-return]


def format_route(rule: RouteRule) -> str:
    """The text that `parse_route` reads as this rule."""
    return policy_text.format_policy(rule, ROUTES)


def call_route(rule: RouteRule, request: RouteRequest, replicas: ReplicaViews) -> int:
    """The index of the chosen replica; PolicyError if a rule raises or returns no valid index."""
    try:
        place: Any = rule(request, replicas)
    except Exception as error:
        raise policy_failed("route", rule, f"for request {request.id!r}", error) from error
    try:
        number = index(place)
    except TypeError:
        number = -1
    if not 0 <= number < len(replicas):
        wanted = f"for request {request.id!r}; return an index from 0 to {len(replicas) - 1}"
        raise bad_result("route", rule, place, wanted)
    return number
