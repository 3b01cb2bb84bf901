"""Routing rules: their choices, and the failures of other routers that they must not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from headway.errors import ConfigError, PolicyError
from headway.fleet.router import Choice, ReplicaLoad, Router
from headway.fleet.routing import (
    DEFAULT_ROUTE,
    ROUTES,
    ReplicaView,
    ReplicaViews,
    RouteRequest,
    call_route,
    cells,
    chwbl,
    format_route,
    parse_route,
    sglang,
)
from tests.support.plain_routing import plain_choice

RULES = {rule.__name__: parse_route(rule.__name__) for rule in ROUTES}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def view(name: str, num_cached: int = 0, num_prompt: int = 1000, **more: int) -> ReplicaView:
    fields = {"waiting_tokens": 0, "num_running": 0, "num_waiting": 0, "num_free_blocks": 100}
    new = max(1, num_prompt - num_cached)
    return ReplicaView(name, num_cached, new, **{**fields, "num_blocks": 100, **more})


def choose(rule: Any, request: RouteRequest, views: Sequence[ReplicaView]) -> int:
    """The index that a rule returns for these views."""
    names, *columns = zip(*views, strict=True)
    cached, new, *loads = np.array(columns, np.float64)
    return call_route(rule, request, ReplicaViews(names, cached, new, np.array(loads)))


def request(tick: int = 0, num_prompt: int = 1000) -> RouteRequest:
    keys = [xxh3_128_digest(f"{tick}/{block}".encode()) for block in range(num_prompt // 16)]
    return RouteRequest(f"r{tick}", num_prompt, keys, "", tick)


@st.composite
def many_views(draw: st.DrawFn) -> list[ReplicaView]:
    numbers = st.integers(0, 5000)
    return [
        ReplicaView(f"replica-{place}", *draw(st.tuples(numbers, st.integers(1, 5000), *[numbers] * 5)))
        for place in range(draw(st.integers(1, 9)))
    ]  # fmt: skip


@each_rule
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3000), many_views())
def test_every_rule_returns_an_index(
    rule: Any, tick: int, num_prompt: int, views: list[ReplicaView]
) -> None:
    asked = request(tick, num_prompt)
    assert 0 <= choose(rule, asked, views) < len(views)
    assert choose(rule, asked, views) == choose(rule, asked, views)  # no state
    assert choose(rule, asked, views) == plain_choice(rule, asked, views)


@each_rule
def test_a_miss_does_not_go_to_an_empty_cache_however_busy(rule: Any) -> None:
    """A router that sends misses to the smallest cache picks the new replica every time."""
    busy = {"num_running": 40, "num_waiting": 40, "waiting_tokens": 200_000}
    views = [view("new", num_free_blocks=100, **busy), *(view(f"r{i}") for i in range(3))]
    if rule is not RULES["round_robin"]:
        assert all(choose(rule, request(tick), views) != 0 for tick in range(20))


@each_rule
def test_an_idle_fleet_uses_all_replicas(rule: Any) -> None:
    """A router that breaks ties by index sends everything to replica 0 at low load."""
    views = [view(f"r{i}") for i in range(8)]
    chosen = Counter(choose(rule, request(tick), views) for tick in range(400))
    assert set(chosen) == set(range(8)) and max(chosen.values()) <= 2 * 400 / 8


def spread(rule: Any, num_requests: int, num_replicas: int = 4) -> list[int]:
    """Requests for each replica, if all share a prompt that the first one holds."""
    sent = [0] * num_replicas
    hot = request(num_prompt=1000).keys
    for tick in range(num_requests):
        views = [
            view(f"r{i}", 960 if i == 0 or sent[i] else 0, num_running=n, waiting_tokens=40 * n)
            for i, n in enumerate(sent)
        ]
        sent[choose(rule, RouteRequest("hot", 1000, hot, "", tick), views)] += 1
    return sent


@pytest.mark.parametrize("text", ["prefix_load", "chwbl", "sglang(balance_abs=8)"])
def test_a_hot_prefix_does_not_saturate_one_replica(text: str) -> None:
    sent = spread(parse_route(text), 200)
    assert max(sent) <= 1.6 * sum(sent) / len(sent), sent


def test_sglang_without_a_limit_saturates_one_replica() -> None:
    """The check above can fail."""
    assert max(spread(sglang(balance_abs=10_000), 200)) == 200


def test_prefix_load_prefers_the_cached_prefix_until_the_queue_costs_more() -> None:
    rule = RULES["prefix_load"]
    for waiting, chosen in ((0, 0), (200, 0), (50_000, 1)):
        views = [view("a", 960, waiting_tokens=waiting, num_running=1), view("b", num_running=1)]
        assert choose(rule, request(), views) == chosen, waiting


def test_chwbl_sends_a_prefix_to_one_replica_within_its_bound_and_moves_few() -> None:
    rule, views = chwbl(), [view(f"r{i}") for i in range(8)]
    homes = [choose(rule, request(tick), views) for tick in range(200)]
    assert homes == [choose(rule, request(tick)._replace(tick=0), views) for tick in range(200)]
    without = [each for each in views if each.name != "r3"]
    moved = [
        without[choose(rule, request(tick), without)].name != views[home].name
        for tick, home in enumerate(homes)
    ]
    assert moved == [home == 3 for home in homes]
    full = [each._replace(num_running=10 if each.name == "r3" else 5) for each in views]
    assert all(choose(rule, request(tick), full) != 3 for tick in range(200))


def test_a_prefix_stays_in_its_cell_until_the_cell_is_busier_than_the_others() -> None:
    rule, views = cells(size=4), [view(f"r{i}") for i in range(16)]
    homes = [choose(rule, request(tick), views) // 4 for tick in range(200)]
    assert set(homes) == set(range(4))
    again = [choose(rule, request(tick)._replace(tick=0), views) // 4 for tick in range(200)]
    assert homes == again
    busy = [each._replace(num_running=10 if i < 4 else 5) for i, each in enumerate(views)]
    assert all(choose(rule, request(tick), busy) >= 4 for tick in range(200))
    assert choose(cells(16), request(5), busy) == choose(RULES["prefix_load"], request(5), busy)


@pytest.mark.parametrize("text", ["prefix_load", "chwbl(load_factor=1.5)", "sglang(0.5, 10, 2.0)"])
def test_a_rule_is_printed_as_it_is_written(text: str) -> None:
    rule = parse_route(text)
    assert parse_route(format_route(rule)) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefix_lod", "did you mean prefix_load"),
        ("chwbl(0.5)", "load_factor must be a number of at least 1, not 0.5"),
        ("least_loaded(3)", "takes no arguments"),
        ("headway.errors:shorten", "must take (request, replicas)"),
        ("tests.fleet.test_routing:RULES", "must be a name"),
        ("no_such_module:rule", "cannot load"),
    ],
)
def test_a_wrong_rule_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_route(text)
    assert said in str(error.value) and "\n" not in str(error.value)


def beyond(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    return len(replicas)


def nothing(request: RouteRequest, replicas: Sequence[ReplicaView]) -> None:
    return None


def broken(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    raise KeyError("r9")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (beyond, "returned 2 for request 'r0'; return an index from 0 to 1"),
        (nothing, "returned None"),
        (broken, "KeyError: 'r9'"),
    ],
)
def test_a_rule_that_fails_is_named(rule: Any, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        choose(rule, request(), [view("a"), view("b")])
    assert said in str(error.value) and rule.__name__ in str(error.value)


def test_the_router_shows_what_each_cache_holds() -> None:
    seen: list[Sequence[ReplicaView]] = []

    def rule(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
        seen.append(replicas)
        return request.tick % 2

    router, keys = Router(rule, 16), request(num_prompt=64).keys
    router.tracker.apply("a", keys, [], True)
    router.tracker.apply("b", keys[:2], [])
    for name in ("a", "b", "c"):
        router.update(ReplicaLoad(name, 7, 1, 2, 3, 4))
    assert [router.choose("r", 64, keys, "") for _ in range(2)] == [
        Choice("a", 1), Choice("b", 32)  # the serial number of the decision grows
    ]  # fmt: skip
    assert [(each.num_cached, each.num_new) for each in seen[0]] == [(64, 1), (32, 32), (0, 64)]
    assert seen[0][0][3:] == (7, 1, 2, 3, 4) and [each.name for each in seen[0][1:]] == ["b", "c"]


def test_the_default_is_a_rule() -> None:
    assert DEFAULT_ROUTE in RULES
