"""The router's copies of the prefix indexes equal the pools, through evictions, resets and restarts."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from headway.engine.messages import CacheDelta
from headway.fleet.prefixes.key_table import LOAD, KeyTable
from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.fleet.prefixes.tracker import PrefixTracker
from headway.kv.cache import KVCache
from headway.kv.prefix_index import GROUP, extend_keys
from headway.request import Request, RequestParams
from tests.support.scripted_fleet import World
from tests.support.tracked import holds, num_cached, num_keys

PREFIXES = st.lists(st.integers(0, 2), min_size=1, max_size=12)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), PREFIXES),
    st.tuples(st.sampled_from(["end", "reset", "restart", "reconnect"]), st.just([0])),
)


def digests(number: int, salt: int = 0) -> list[bytes]:
    return [xxh3_128_digest(f"{salt}/{place}".encode()) for place in range(number)]


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
        assert holds(tracker, pool.name, pool.kv.pool.index.block_of)
        assert num_keys(tracker) <= sum(pool.num_blocks for pool in pools)


def test_a_match_is_the_longest_prefix_of_each_replica() -> None:
    tracker = PrefixTracker()
    keys = digests(40)
    tracker.apply("a", keys[:17], [], True)
    tracker.apply("b", keys, [])
    assert [num_cached(tracker, keys, name) for name in ("a", "b")] == [17, 40]
    assert list(tracker.leading(keys, 0b11)) == [(17, 0b01), (40, 0b10)]
    tracker.apply("b", [], keys[3:])
    assert num_cached(tracker, keys, "b") == 3 and num_cached(tracker, keys, "unknown") == 0
    tracker.clear("b")
    assert num_cached(tracker, keys, "a") == 17 and tracker.slots.keys() == {"a"}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 1 << 12), st.booleans())
def test_a_match_says_for_each_length_which_replicas_end_there(
    lengths: list[int], asked: int, is_prompt: bool
) -> None:
    prompt = Request("r", range(160), RequestParams())
    keys = PromptKeys(prompt, 4)
    tracker, wanted = PrefixTracker(), dict[int, int]()
    for place, length in enumerate(lengths):
        tracker.apply(str(place), keys[:length], [], True)
        if asked >> place & 1:
            wanted[length] = wanted.get(length, 0) | 1 << place
    among = asked & (1 << len(lengths)) - 1
    found = list(tracker.leading(keys if is_prompt else keys[:], among))
    assert found == sorted(wanted.items())


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
        sizes.append(sum(map(sys.getsizeof, tracker._table._buckets)))
        assert set(tracker.slots) == {"a", "b"}
        assert num_keys(tracker) <= 800 >= len(tracker._table) / 2
    assert max(sizes) <= 2 * sizes[1]


def test_a_fleet_forgets_the_keys_of_replicas_that_left() -> None:
    """Replicas that start again have other names, and late messages change nothing."""
    world = World()
    tracker = world.fleet.router.tracker
    for number in range(50):
        world.add(f"replica-{number}")
        replica = world.fleet.replicas[f"replica-{number}"]
        keys = digests(20, number)
        world.fleet.receive(replica, [CacheDelta(keys, [], True)])
        assert holds(tracker, replica.name, keys)
        leave = (world.fleet.remove, lambda each: world.fleet.lose(each, "killed"))[number % 2]
        leave(replica)
        world.fleet.receive(replica, [CacheDelta(keys, [], True)])
        assert not tracker.slots


@pytest.mark.parametrize("num_tokens", [0, 3, 9, GROUP * 4 - 1, GROUP * 4, 2 * GROUP * 4 + 9])
def test_keys_that_are_computed_when_read_are_the_same(num_tokens: int) -> None:
    known, whole = Request("r", range(num_tokens), RequestParams(salt="s")), list[bytes]()
    extend_keys(whole, known, 4)
    assert list(PromptKeys(known, 4)) == whole == PromptKeys(known, 4)[:]
    assert PromptKeys(known, 4)[-2:] == whole[-2:]
    for length in range(len(whole) + 1):
        tracker = PrefixTracker()
        tracker.apply("a", whole[:length], [], True)
        assert num_cached(tracker, PromptKeys(known, 4), "a") == length
        assert num_cached(tracker, whole, "a") == length


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 90), st.integers(0, 6)), max_size=60))
def test_a_table_is_a_dict(changes: list[tuple[int, int, int]]) -> None:
    """Random changes, with many more keys than a bucket has."""
    table, model = KeyTable(), dict[bytes, int]()
    keys = digests(300)
    for first, length, number in changes:
        changed = keys[first : first + length]
        before = Counter(model.get(key, 0) for key in changed if model.get(key, 0) != number)
        assert table.change(changed, dict.fromkeys(range(7), number)) == before
        model.update(dict.fromkeys(changed, number))
        model = {key: number for key, number in model.items() if number}
        assert {key: table.get(key) for key in keys if table.get(key)} == model
        assert len(table) == len(model)
    rest = Counter(model.values())
    num_removed = Counter(table.sweep({1, 2}, len(table._buckets)))
    assert num_removed == {number: rest[number] for number in (1, 2) if rest[number]}
    assert len(table) == rest.total() - num_removed.total()


def test_a_key_takes_a_quarter_of_a_set_item_even_if_only_one_replica_has_it() -> None:
    tracker, total = PrefixTracker(), 0
    for number in range(8):
        tracker.apply(f"{number}", digests(5000, number), [], True)
        total += 5000
    buckets = tracker._table._buckets
    assert len(tracker._table) == total and len(buckets) >= total / LOAD
    assert sum(map(sys.getsizeof, buckets)) + sys.getsizeof(buckets) < 98 / 4 * total
    assert len(tracker._holders) <= 9


def test_a_replica_that_leaves_is_forgotten_without_its_keys() -> None:
    """Its slot is free at once; the next deltas remove its keys from the table."""
    tracker = PrefixTracker()
    tracker.apply("a", digests(500, 1), [], True)
    tracker.apply("b", digests(500, 2), [], True)
    tracker.clear("a")
    assert tracker.slot("c") == 0 and num_keys(tracker, "c") == 0
    assert holds(tracker, "b", digests(500, 2))
    for number in range(50):
        tracker.apply("b", digests(10, number + 3), [])
        tracker.apply("b", [], digests(10, number + 3))
    assert len(tracker._table) == 500 and len(tracker._holders) < 6
