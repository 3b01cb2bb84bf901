"""The router's copies of the prefix indexes equal the pools, through evictions, resets and restarts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.messages import CacheDelta
from headway.fleet.prefix_tracker import PrefixTracker, PromptKeys, num_leading_blocks
from headway.kv.cache import KVCache
from headway.kv.prefix_index import GROUP, extend_keys
from headway.request import Request, RequestParams
from tests.support.scripted_fleet import World

PREFIXES = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), PREFIXES),
    st.tuples(st.sampled_from(["end", "reset", "restart", "reconnect"]), st.just([0])),
)


class Pool:
    """A cache whose requests come and go, and the tracker's copy of it."""

    def __init__(self, name: str, tracker: PrefixTracker, num_blocks: int = 12) -> None:
        self.name, self.tracker, self.num_blocks = name, tracker, num_blocks
        self.restart()

    def restart(self) -> None:
        self.kv, self.open = KVCache(self.num_blocks, 2), list[Request]()
        self.kv.pool.index.start_journal()

    def run(self, tokens: list[int]) -> None:
        request = Request("r", tokens * 2, RequestParams(max_tokens=1))
        cost = self.kv.admission_cost(request)
        if self.kv.num_blocks_needed(request, cost) <= self.kv.num_free:
            self.kv.allocate(request, cost)
            request.computed_base = request.num_prompt
            self.kv.publish(request, cost.num_hits, request.num_prompt // 2)
            self.open.append(request)

    def end(self, _: list[int]) -> None:
        if self.open:
            self.kv.release(self.open.pop(0))

    def drain(self) -> None:
        journal = self.kv.pool.index.journal
        assert journal is not None
        self.tracker.apply(self.name, *journal.drain())

    def act(self, what: str, tokens: list[int]) -> None:
        if what in ("run", "end"):
            getattr(self, what)(tokens)
        elif what == "reset":
            self.kv.pool.forget_all()
        elif what == "restart":
            self.restart()
        else:
            self.tracker.clear(self.name)
            self.kv.pool.index.start_journal()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), ACTIONS), max_size=40))
def test_the_copies_equal_the_pools_after_every_batch(
    actions: list[tuple[int, tuple[str, list[int]]]],
) -> None:
    tracker = PrefixTracker()
    pools = [Pool(name, tracker) for name in ("a", "b")]
    for which, (what, tokens) in actions:
        pools[which].act(what, tokens)
        if what == "run":  # several changes in one batch
            continue
        pools[which].drain()
        pool = pools[which]
        assert tracker.held.get(pool.name, set()) == set(pool.kv.pool.index.block_of)
        assert sum(map(len, tracker.held.values())) <= sum(pool.num_blocks for pool in pools)


def test_a_match_is_the_longest_prefix_of_each_replica() -> None:
    tracker = PrefixTracker()
    keys = [bytes([number]) for number in range(40)]
    tracker.apply("a", keys[:17], [], True)
    tracker.apply("b", keys, [])
    assert [tracker.num_cached(keys, name) for name in ("a", "b")] == [17, 40]
    tracker.apply("b", [], keys[3:])
    assert tracker.num_cached(keys, "b") == 3 and tracker.num_cached(keys, "unknown") == 0
    tracker.clear("b")
    assert tracker.num_cached(keys, "a") == 17 and tracker.held.keys() == {"a"}


def test_a_journal_that_is_not_read_stays_as_small_as_the_pool() -> None:
    pool = Pool("a", PrefixTracker())
    for number in range(200):
        pool.run([number % 3, number, number % 7])
        pool.end([])
    added, removed, is_cleared = pool.kv.pool.index.start_journal().drain()
    assert is_cleared and not removed and len(added) <= pool.num_blocks
    for number in range(200):
        pool.run([number, number % 7])
        pool.end([])
    journal = pool.kv.pool.index.journal
    assert journal is not None
    added, removed, _ = journal.drain()
    assert len(added) + len(removed) <= 2 * pool.num_blocks


def test_memory_stays_that_of_the_pools_however_often_they_change() -> None:
    """Other content fills both pools forty times, and one replica connects again each time."""
    tracker, sizes = PrefixTracker(), list[int]()
    pools = [Pool(name, tracker, num_blocks=400) for name in ("a", "b")]
    for number in range(40):
        for pool in pools:
            for place in range(4):
                pool.run([number, place, *range(98)])
                pool.end([])
            if pool.name == "b":
                pool.act("reconnect", [])
            pool.drain()
        sizes.append(sum(sys.getsizeof(held) for held in tracker.held.values()))
        assert set(tracker.held) == {"a", "b"} and sum(map(len, tracker.held.values())) <= 800
    assert max(sizes) <= 2 * sizes[1]


def test_a_fleet_forgets_the_keys_of_replicas_that_left() -> None:
    """Replicas that start again have other names, and late messages change nothing."""
    world = World()
    tracker = world.fleet.router.tracker
    for number in range(50):
        world.add(f"replica-{number}")
        replica = world.fleet.replicas[f"replica-{number}"]
        keys = [bytes([number, place]) for place in range(20)]
        world.fleet.receive(replica, [CacheDelta(keys, [], True)])
        assert tracker.held.get(replica.name, set()) == set(keys)
        leave = (world.fleet.remove, lambda each: world.fleet.lose(each, "killed"))[number % 2]
        leave(replica)
        world.fleet.receive(replica, [CacheDelta(keys, [], True)])
        assert not tracker.held


@pytest.mark.parametrize("num_tokens", [0, 3, 9, GROUP * 4 - 1, GROUP * 4, 2 * GROUP * 4 + 9])
def test_keys_that_are_computed_when_read_are_the_same(num_tokens: int) -> None:
    known, whole = Request("r", range(num_tokens), RequestParams(salt="s")), list[bytes]()
    extend_keys(whole, known, 4)
    assert list(PromptKeys(known, 4)) == whole == PromptKeys(known, 4)[:]
    assert PromptKeys(known, 4)[-2:] == whole[-2:]
    for length in range(len(whole) + 1):
        assert num_leading_blocks(PromptKeys(known, 4), set(whole[:length])) == length
        assert num_leading_blocks(whole, set(whole[:length])) == length
