"""Laws of the block pool, the prefix index and the KV cache."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

from headway.kv.cache import KVCache
from headway.kv.pool import BlockPool
from headway.kv.prefix_index import GROUP, PrefixIndex, extend_keys
from headway.request import Request, RequestParams

SIZE = 4


def request(tokens: Any, *, salt: str = "", reads_cache: bool = True) -> Request:
    return Request("r", tokens, RequestParams(salt=salt, reads_cache=reads_cache))


def keys_of(tokens: Any, *, salt: str = "", size: int = SIZE) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, request(tokens, salt=salt), size)
    return keys


def admit(kv: KVCache, tokens: Any, **params: Any) -> Request:
    """Allocate blocks for a prompt and publish all of it, as a plan that computes it does."""
    admitted = request(tokens, **params)
    cost = kv.admission_cost(admitted)
    kv.allocate(admitted, cost)
    admitted.computed_base = len(admitted.tokens)
    kv.publish(admitted, cost.num_hits, admitted.computed_base // kv.block_size)
    return admitted


def test_taken_blocks_are_held_once_and_no_longer_free() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3 and [pool.refs[b] for b in taken] == [1, 1, 1]
    assert pool.num_free == 1


def test_a_block_is_free_when_its_last_holder_drops_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.drop([block])
    assert pool.num_free == 1
    pool.drop([block])
    assert pool.num_free == 2


def test_dropping_a_free_block_raises() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.drop([block])
    with pytest.raises(AssertionError, match="more often than held"):
        pool.drop([block])


def cached_pool(*keys: bytes) -> tuple[BlockPool, list[int]]:
    """A pool with one blank block, and a cached block for each key, released in this order."""
    pool = BlockPool(len(keys) + 1)
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.index.add([block], [key])
        pool.drop([block])
    return pool, blocks


def test_blank_blocks_are_taken_first_then_the_least_recently_used() -> None:
    pool, blocks = cached_pool(b"a", b"b", b"c")
    blank, first, second, third = pool.take(4)
    assert blank not in blocks
    assert [first, second, third] == blocks


def test_a_hit_makes_a_free_block_the_most_recently_used() -> None:
    pool, (a, b, c) = cached_pool(b"a", b"b", b"c")
    pool.share([a])
    assert pool.num_free == 3
    pool.drop([a])
    assert pool.take(4)[1:] == [b, c, a]


def test_a_reused_block_loses_its_key() -> None:
    pool, (a, b) = cached_pool(b"a", b"b")
    pool.take(2)
    assert pool.index.match([b"a"]) == 0
    assert pool.index.match([b"b"]) == 1
    assert pool.index.key_of[a] is None and pool.index.key_of[b] == b"b"


def test_forget_all_does_not_free_held_blocks() -> None:
    pool, (a, _) = cached_pool(b"a", b"b")
    pool.share([a])
    pool.forget_all()
    assert pool.num_free == 2 and pool.index.match([b"a"]) == 0
    pool.drop([a])
    assert pool.num_free == 3 and sorted(pool.take(3)) == [0, 1, 2]


def test_every_block_is_either_held_or_free_under_random_use() -> None:
    rng, pool, held = random.Random(0), BlockPool(12), list[int]()
    for number in range(3000):
        free = pool.num_free
        if rng.random() < 0.5 and free:
            taken = pool.take(rng.randrange(1, free + 1))
            assert not set(taken) & set(held)
            held += taken
        elif held:
            block = held.pop(rng.randrange(len(held)))
            if pool.index.key_of[block] is None and rng.random() < 0.5:
                pool.index.add([block], [b"%d" % number])
            pool.drop([block])
        if held and rng.random() < 0.2:
            pool.share([held[0]])
            held.append(held[0])
        assert pool.num_free == 12 - len(set(held))
        assert sum(pool.refs) == len(held)


def test_cached_blocks_are_evicted_in_the_order_of_their_latest_use() -> None:
    rng, pool, uses = random.Random(1), BlockPool(8), OrderedDict[int, None]()
    for block in pool.take(8):
        pool.index.add([block], [b"%d" % block])
        pool.drop([block])
        uses[block] = None
    for number in range(2000):
        if rng.random() < 0.7:
            used = rng.sample(range(8), rng.randrange(1, 5))
            pool.share(used)
            assert pool.num_free == 8 - len(used)
            pool.drop(used)
        else:
            used = pool.take(rng.randrange(1, 4))
            assert used == list(uses)[: len(used)]
            pool.index.add(used, [b"%d-%d" % (number, block) for block in used])
            pool.drop(used)
        for block in used:
            uses.move_to_end(block)


@pytest.mark.parametrize("num_blocks", [1, 8, 50])
def test_entries_of_blocks_that_are_held_again_do_not_pile_up(num_blocks: int) -> None:
    """At most one for each block of the pool; and they are searched rarely."""
    rng, pool, num_shared, num_searches = random.Random(2), BlockPool(num_blocks), 0, 0
    for block in pool.take(num_blocks):
        pool.index.add([block], [b"%d" % block])
        pool.drop([block])
    for _ in range(600):
        used, entries = rng.sample(range(num_blocks), rng.randint(1, num_blocks)), pool._cached
        pool.share(used)
        num_shared += len(used)
        num_searches += pool._cached is not entries
        num_stale = len(pool._cached) - pool._num_cached
        assert sum(pool._num_stale) == num_stale <= num_blocks
        pool.drop(used)
        assert len(pool._cached) <= 2 * num_blocks
    assert 0 < num_searches * num_blocks <= num_shared


def test_only_full_blocks_have_keys() -> None:
    assert len(keys_of(range(3))) == 0
    assert len(keys_of(range(4))) == 1
    assert len(keys_of(range(11))) == 2


def test_a_key_depends_on_all_tokens_before_its_block() -> None:
    one, two = keys_of([1, 1, 1, 1, 5, 5, 5, 5]), keys_of([2, 1, 1, 1, 5, 5, 5, 5])
    assert one[0] != two[0] and one[1] != two[1]
    assert keys_of([1] * 8)[0] != keys_of([1] * 8)[1]


def test_keys_depend_only_on_tokens_and_salt() -> None:
    assert keys_of(range(8)) == keys_of(range(8))
    assert not set(keys_of(range(8))) & set(keys_of(range(8), salt="x"))


def test_existing_keys_are_kept_when_keys_are_extended() -> None:
    known = request(range(11))
    keys: list[bytes] = []
    extend_keys(keys, known, SIZE)
    first = list(keys)
    longer = request(range(16))
    extend_keys(keys, longer, SIZE)
    assert all(now is then for now, then in zip(keys, first, strict=False))
    assert keys == keys_of(range(16))


LONG = 2 * GROUP * SIZE + 9  # tokens: two groups, and two full blocks


def test_keys_do_not_depend_on_the_steps_in_which_they_are_extended() -> None:
    whole = keys_of(range(LONG))
    assert len(set(whole)) == len(whole) == 2 * GROUP + 2
    for cut in range(0, LONG, 3):
        keys = keys_of(range(cut))
        extend_keys(keys, request(range(LONG)), SIZE)
        assert keys == whole
    for end in range(len(whole) + 2):
        keys = keys_of(range(9))
        extend_keys(keys, request(range(LONG)), SIZE, end)
        assert keys == whole[: max(2, end)]
        extend_keys(keys, request(range(LONG)), SIZE, 1)
        assert keys == whole[: max(2, end)], "none is removed"
    for place in range(0, LONG - 1, 7):  # one other token changes all keys from its block on
        other = keys_of([-5 if each == place else each for each in range(LONG)])
        same = [one == two for one, two in zip(whole, other, strict=True)]
        assert same == [each < place // SIZE for each in range(len(whole))]


def test_match_returns_the_longest_prefix() -> None:
    index, keys = PrefixIndex(8), keys_of(range(16))
    for length in range(5):
        assert index.match(keys) == length
        assert index.match(keys[:2]) == min(length, 2)
        if length < 4:
            index.add([length], [keys[length]])
    assert index.match([]) == 0


def test_a_duplicate_block_takes_over_the_key_of_an_evicted_one() -> None:
    for evicted in ((0, 1), (1, 0)):
        index = PrefixIndex(2)
        index.add([0], [b"k"])
        index.add([1], [b"k"])
        index.forget([evicted[0]])
        assert index.match([b"k"]) == 1 and index.block_of[b"k"] == evicted[1]
        index.forget([evicted[1]])
        assert index.match([b"k"]) == 0


def test_blocks_without_a_key_do_not_keep_later_ones_from_being_forgotten() -> None:
    index = PrefixIndex(4)
    index.add([1, 3], [b"a", b"b"])
    index.forget([0, 1, 2, 3])
    assert not index.block_of and index.key_of == [None] * 4


def test_every_block_that_is_added_has_a_key() -> None:
    with pytest.raises(ValueError):
        PrefixIndex(4).add([0, 1], [b"a"])


def test_many_duplicates_are_forgotten_in_any_order() -> None:
    for seed in range(20):
        index, blocks = PrefixIndex(5), list(range(5))
        for block in blocks:
            index.add([block], [b"k"])
        random.Random(seed).shuffle(blocks)
        for number, block in enumerate(blocks):
            assert index.key_of[index.block_of[b"k"]] == b"k"
            index.forget([block])
            assert index.match([b"k"]) == (number < 4)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_that_follows_the_journal_equals_the_index(seed: int) -> None:
    rng, pool, held = random.Random(seed), BlockPool(12), list[int]()
    copy, num_drained = set[bytes](), 0
    for number in range(600):
        if number % 200 == 20:  # also in the middle of a run: the first drain is a complete copy
            journal, num_drained = pool.index.start_journal(), 0
            copy = {b"of an earlier index"}
            assert journal.has_changes
        if rng.random() < 0.02:
            pool.forget_all()
        elif rng.random() < 0.5 and pool.num_free:
            held += pool.take(rng.randint(1, pool.num_free))
            pool.index.add(held, [b"%d" % rng.randrange(20) for _ in held])
        elif held:
            rng.shuffle(held)
            pool.drop([held.pop() for _ in range(rng.randint(1, len(held)))])
        if number >= 20:
            present = set(pool.index.block_of)
            assert len(journal._is_present) <= len(copy) + len(present)
            if rng.random() < 0.3:
                has_changes, (added, removed, is_cleared) = journal.has_changes, journal.drain()
                assert has_changes == bool(is_cleared or added or removed)
                before = set() if is_cleared else copy
                assert is_cleared or num_drained
                assert before.isdisjoint(added) and before.issuperset(removed)
                copy = (before | set(added)) - set(removed)
                assert copy == present and len(set(added)) == len(added)
                assert not journal.has_changes
                num_drained += 1


def test_a_request_gets_blocks_for_all_known_tokens() -> None:
    kv = KVCache(8, SIZE)
    a = admit(kv, range(9))
    assert len(a.kv.blocks) == 3 and kv.num_free == 5


def test_a_cached_prefix_is_shared() -> None:
    kv = KVCache(8, SIZE)
    a = admit(kv, range(10))
    b = request([*range(8), 99])
    cost = kv.admission_cost(b)
    assert (cost.num_hits, cost.num_blocks, cost.num_computed) == (2, 3, 8)
    assert kv.num_blocks_needed(b, cost) == 1  # the hits have a holder
    kv.allocate(b, cost)
    assert b.kv.blocks[:2] == a.kv.blocks[:2] and b.kv.blocks[2] not in a.kv.blocks


def test_a_hit_without_a_holder_uses_a_free_block() -> None:
    kv = KVCache(8, SIZE)
    kv.release(admit(kv, range(8)))
    b = request([*range(8), 99])
    assert kv.num_blocks_needed(b, kv.admission_cost(b)) == 3


def test_a_completely_cached_prompt_computes_its_last_token() -> None:
    kv = KVCache(8, SIZE)
    kv.release(admit(kv, range(8)))
    b = request(range(8))
    cost = kv.admission_cost(b)
    assert (cost.num_hits, cost.num_blocks, cost.num_computed) == (2, 2, 7)


def test_a_partially_filled_block_is_never_matched() -> None:
    kv = KVCache(8, SIZE)
    kv.release(admit(kv, range(7)))
    assert kv.admission_cost(request(range(7))).num_hits == 1


def test_release_publishes_only_computed_blocks() -> None:
    kv = KVCache(8, SIZE)
    a = request(range(12))
    kv.allocate(a, kv.admission_cost(a))
    a.computed_base = 6  # only 6 tokens are computed
    kv.release(a)
    assert kv.admission_cost(request(range(12))).num_hits == 1
    assert kv.num_free == 8


def test_blocks_are_evicted_tail_first() -> None:
    kv = KVCache(4, SIZE)
    kv.release(admit(kv, range(16)))
    for left in (3, 2, 1, 0):
        kv.pool.take(1)
        assert kv.admission_cost(request(range(16))).num_hits == left


def test_hits_are_not_evicted_for_their_own_request() -> None:
    kv = KVCache(4, SIZE)
    kv.release(admit(kv, range(8)))
    # no blank block; the first two are the least recently used
    kv.release(admit(kv, range(100, 108)))
    b = request([*range(8), *range(50, 58)])
    cost = kv.admission_cost(b)
    kv.allocate(b, cost)
    assert cost.num_hits == 2 and len(set(b.kv.blocks)) == 4
    assert kv.num_free == 0


def test_different_salts_share_no_blocks() -> None:
    kv = KVCache(8, SIZE)
    kv.release(admit(kv, range(8), salt="one"))
    assert kv.admission_cost(request(range(8), salt="one")).num_hits == 2
    assert kv.admission_cost(request(range(8), salt="two")).num_hits == 0
    assert kv.admission_cost(request(range(8))).num_hits == 0


def test_a_request_that_does_not_read_the_cache_makes_duplicate_blocks() -> None:
    kv = KVCache(8, SIZE)
    a = admit(kv, range(8))
    b = admit(kv, range(8), reads_cache=False)
    assert not set(a.kv.blocks) & set(b.kv.blocks)
    kv.release(a)
    kv.pool.take(kv.num_free)  # overwrites the blocks of a
    assert kv.admission_cost(request(range(8))).num_hits == 2  # in the blocks of b


@pytest.mark.parametrize("num_computed", [0, 4, 11])
@pytest.mark.parametrize("reads_cache", [False, True])
def test_the_blocks_of_a_waiting_request_are_the_hits_of_its_admission(
    reads_cache: bool, num_computed: int
) -> None:
    kv = KVCache(16, SIZE)
    a = admit(kv, range(17))
    b = request(range(17), reads_cache=reads_cache)
    b.history.max_num_computed = num_computed
    num_hits = 4 if reads_cache else num_computed // SIZE
    assert kv.admission_cost(b).num_hits == num_hits
    assert kv.blocks_of(b) == a.kv.blocks[:num_hits]


def test_admission_cost_changes_nothing() -> None:
    kv = KVCache(8, SIZE)
    kv.release(admit(kv, range(8)))
    before = (list(kv.pool.refs), list(kv.pool.index.key_of), kv.num_free)
    b = request([*range(8), 9])
    kv.num_blocks_needed(b, kv.admission_cost(b))
    assert before == (kv.pool.refs, kv.pool.index.key_of, kv.num_free)


def test_private_blocks_become_free_on_release() -> None:
    kv = KVCache(8, SIZE)
    a = admit(kv, range(12))
    b = admit(kv, [*range(8), *range(50, 54)])
    assert kv.num_private_blocks(a) == kv.num_private_blocks(b) == 1
    free = kv.num_free
    kv.release(a)
    assert kv.num_free == free + 1 and kv.num_private_blocks(b) == 3


def test_a_swap_restores_every_block() -> None:
    kv = KVCache(6, SIZE, num_host_blocks=4)
    a = admit(kv, range(10))
    blocks = list(a.kv.blocks)
    copies = kv.swap_out(a)
    assert copies is not None and [c.source for c in copies] == blocks
    assert kv.num_free == 6 and kv.host.num_free == 1
    out = {c.source: c.target for c in copies}
    a.computed_base = 0
    kv.pool.take(3)
    kv.pool.drop(kv.pool.take(3))  # overwrites its blocks on the device
    cost = kv.admission_cost(a)
    assert (cost.num_hits, cost.num_computed, cost.uses_host) == (0, 9, True)
    back = kv.allocate(a, cost)
    assert [c.source for c in back] == [out[block] for block in blocks]
    assert [c.target for c in back] == a.kv.blocks


def test_host_blocks_stay_in_use_until_the_plan_that_reads_them_is_complete() -> None:
    kv = KVCache(6, SIZE, num_host_blocks=3)
    a = admit(kv, range(10))
    kv.swap_out(a)
    a.computed_base = 0
    kv.allocate(a, kv.admission_cost(a))
    assert kv.host.num_free == 0
    kv.free_host_blocks()
    assert kv.host.num_free == 3


def test_a_failed_swap_changes_nothing() -> None:
    kv = KVCache(6, SIZE, num_host_blocks=2)
    a = admit(kv, range(10))
    blocks = list(a.kv.blocks)
    before = (list(kv.pool.refs), list(kv.pool.index.key_of), kv.num_free, kv.host.num_free)
    assert kv.swap_out(a) is None
    after = (kv.pool.refs, kv.pool.index.key_of, kv.num_free, kv.host.num_free)
    assert before == after and a.kv.blocks == blocks and a.kv.host is None


@pytest.mark.parametrize("num_host_blocks", [1, 8], ids=["room for one", "room for all"])
def test_leading_blocks_with_other_holders_are_not_swapped_out(num_host_blocks: int) -> None:
    kv = KVCache(8, SIZE, num_host_blocks=num_host_blocks)
    admit(kv, range(8))
    b = admit(kv, [*range(8), *range(50, 54)])
    copies = kv.swap_out(b)
    assert copies is not None and len(copies) == 1
    assert b.kv.host is not None and b.kv.host.first == 2


def test_a_host_copy_without_its_leading_blocks_is_not_used() -> None:
    kv = KVCache(4, SIZE, num_host_blocks=8)
    a = admit(kv, range(8))
    b = admit(kv, [*range(8), *range(50, 54)])
    kv.swap_out(b)
    kv.release(a)
    b.computed_base = 0
    kv.pool.drop(kv.pool.take(4))
    cost = kv.admission_cost(b)
    assert (cost.num_hits, cost.num_computed, cost.uses_host) == (0, 0, False)
    assert kv.allocate(b, cost) == []
    kv.free_host_blocks()
    assert kv.host.num_free == 8


def test_the_binary_search_finds_the_longest_prefix() -> None:
    """A linear search finds the same: the index stays closed under prefixes."""
    rng = random.Random(1)
    for _ in range(40):
        kv, running = KVCache(10, 2, num_host_blocks=6), list[Request]()
        for _ in range(120):
            new = request([rng.randrange(2) for _ in range(rng.randrange(1, 12))])
            cost = kv.admission_cost(new)
            num_hits = 0
            while num_hits < len(new.kv.keys) and new.kv.keys[num_hits] in kv.pool.index.block_of:
                num_hits += 1
            assert cost.num_hits == num_hits
            if kv.num_blocks_needed(new, cost) <= kv.num_free:
                kv.allocate(new, cost)
                new.computed_base = rng.randrange(cost.num_computed, len(new.tokens)) + 1
                kv.publish(new, cost.num_hits, new.computed_base // 2)
                running.append(new)
            while running and rng.random() < 0.5:
                kv.release(running.pop(rng.randrange(len(running))))


def test_an_imported_prefix_is_matched_and_takes_no_block_twice() -> None:
    kv = KVCache(8, 4)
    kv.import_prefix(request(range(14)))  # 3 full blocks
    assert kv.num_free == 8 and kv.admission_cost(request(range(14))).num_hits == 3
    kv.import_prefix(request([*range(8), *range(20, 28)]))  # 2 of its 4 blocks are there
    assert kv.admission_cost(request([*range(8), *range(20, 28)])).num_hits == 4
    assert kv.admission_cost(request(range(14))).num_hits == 3
    kv.import_prefix(request(range(100, 160)))  # more than fits: the first blocks
    assert kv.admission_cost(request(range(100, 160))).num_hits == 8
    assert kv.num_free == 8


@pytest.mark.parametrize("num_blocks", [1, 4, 10])
def test_an_import_into_a_full_pool_keeps_its_hits_and_all_held_blocks(num_blocks: int) -> None:
    rng, num_cut, num_evicted = random.Random(num_blocks), 0, 0
    for _ in range(150):
        kv, running = KVCache(num_blocks, 2), list[Request]()
        for _ in range(6):
            new = request([rng.randrange(2) for _ in range(rng.randrange(1, 2 * num_blocks + 1))])
            cost = kv.admission_cost(new)
            if kv.num_blocks_needed(new, cost) <= kv.num_free:
                running.append(admit(kv, new.tokens))
            if running and rng.random() < 0.6:
                kv.release(running.pop(rng.randrange(len(running))))
        imported = request([rng.randrange(2) for _ in range(rng.randrange(3 * num_blocks + 1))])
        pool, keys = kv.pool, keys_of(imported.tokens, size=2)
        held = {block: pool.index.key_of[block] for r in running for block in r.kv.blocks}
        hits = [pool.index.block_of[key] for key in keys[: pool.index.match(keys)]]
        num_new = min(len(keys) - len(hits), pool.num_free - len(set(hits) - set(held)))
        before, num_free, num_known = list(pool.refs), pool.num_free, len(pool.index.block_of)
        kv.import_prefix(imported)
        assert pool.refs == before and pool.num_free == num_free
        assert {block: pool.index.key_of[block] for block in held} == held
        num_hits = len(hits) + num_new
        assert pool.index.match(keys) == num_hits
        found = [pool.index.block_of[key] for key in keys[:num_hits]]
        assert found[: len(hits)] == hits
        num_cut += 0 < num_hits < len(keys)
        num_evicted += bool(hits) and len(pool.index.block_of) < num_known + num_new
        # The next blocks that are taken are others, then those of this prefix, tail first.
        own = [block for block in found if block not in held]
        taken = pool.take(num_free)
        assert taken[num_free - len(own) :] == own[::-1]
    assert num_blocks == 1 or (num_cut > 10 and num_evicted > 10)
