"""The router's copies of the prefix indexes equal the pools, through evictions, resets and restarts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.fleet.prefix_tracker import PrefixTracker
from headway.kv.cache import KVCache
from headway.request import Request, RequestParams

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
            self.kv.publish(request, cost.num_hits, len(request.kv.keys))
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
        assert tracker.keys_of(pool.name) == set(pool.kv.pool.index.block_of)
        assert tracker.num_keys <= sum(pool.num_blocks for pool in pools)


def test_a_match_is_the_longest_prefix_of_each_replica() -> None:
    tracker = PrefixTracker()
    keys = [bytes([number]) for number in range(40)]
    tracker.apply("a", keys[:17], [], True)
    tracker.apply("b", keys, [])
    assert tracker.match(keys) == {"a": 17, "b": 40}
    tracker.apply("b", [], keys[3:])
    assert tracker.num_cached(keys, "b") == 3 and tracker.num_cached(keys, "unknown") == 0
    tracker.clear("b")
    assert tracker.match(keys) == {"a": 17} and tracker.num_keys == 17


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
