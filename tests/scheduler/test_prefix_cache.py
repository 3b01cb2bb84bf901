"""Laws of the prefix cache as the scheduler uses it: hits, full hits, salts, prompt logprobs."""

from __future__ import annotations

import pytest

from headway.plan import Blocked
from headway.request import RequestState
from tests.support.drive import Row, small_driver


def test_the_last_token_of_a_prompt_is_a_chunk_and_not_a_decode() -> None:
    driver = small_driver(num_blocks=16, max_num_batched_tokens=8)
    a = driver.add("a", 9, 2)
    driver.step()
    plan = driver.plan()
    assert a.state is RequestState.DECODING and not plan.decodes
    assert plan.chunks[0][1:] == (8, 9, 8, True)
    driver.finish(plan)
    assert a.num_generated == 1
    driver.run()
    driver.check_outputs()


def test_a_one_token_prompt_is_a_chunk() -> None:
    driver = small_driver(num_blocks=16)
    driver.add("a", 1, 2)
    assert driver.run() == [Row("a", "", (("a", 0, 1),)), Row("", "a")]


def test_a_full_hit_computes_one_token_and_stores_nothing() -> None:
    driver = small_driver(num_blocks=16)
    prompt = list(range(12))
    driver.add("a", prompt, 1)
    driver.run()
    b = driver.add("b", prompt, 1)
    free = driver.scheduler.num_free
    plan = driver.plan()
    assert plan.chunks[0][1:] == (11, 12, 12, True)
    assert driver.scheduler.last_planned.num_free == free - 3  # only the three blocks that it hits
    driver.finish(plan)
    assert b.history.num_cached == 11


def test_equal_prompts_in_one_step_share_their_blocks() -> None:
    driver = small_driver(num_blocks=16)
    prompt = list(range(10))
    driver.add_all(a=(prompt, 2), b=(prompt, 2))
    driver.step()
    assert driver.table[-1].chunks == (("a", 0, 10), ("b", 8, 10))
    assert driver.scheduler.last_planned.num_free == 16 - 3 - 1


def test_a_shared_block_is_not_freed_while_another_request_uses_it() -> None:
    driver = small_driver(num_blocks=16)
    prompt = list(range(8))
    _, b = driver.add_all(a=(prompt, 1), b=(prompt, 6))
    driver.step()
    assert driver.requests["a"].is_finished
    assert all(driver.scheduler.kv.pool.refs[block] == 1 for block in b.kv.blocks)
    driver.run()
    driver.check_empty()


def test_generated_tokens_are_cached_for_the_next_turn_of_a_conversation() -> None:
    driver = small_driver(num_blocks=32)
    a = driver.add("a", 6, 11)
    driver.run()
    driver.add("b", [*a.tokens, 1, 2, 3], 1)  # 20 tokens; 16 of the 17 tokens of a are stored
    plan = driver.step()
    assert plan.admitted[0].num_cached == 16


def test_different_salts_share_no_prefix() -> None:
    driver = small_driver(num_blocks=32)
    for name, salt in (("a", ""), ("b", "x"), ("c", "x")):
        driver.add(name, range(9), 1, salt=salt)
        driver.run()
    starts = [row.chunks[0][1] for row in driver.table]
    assert starts == [0, 0, 8]


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    driver = small_driver(num_blocks=32)
    driver.add("a", range(12), 1)
    driver.run()
    b = driver.add("b", range(12), 1, reads_cache=False)
    assert driver.run() == [Row("b", "", (("b", 0, 12),))]
    assert b.history.num_cached == 0


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt_even_if_preempted() -> None:
    driver = small_driver(num_blocks=16, max_num_batched_tokens=8)
    driver.add("a", range(16), 1)
    driver.run()  # 4 blocks are cached
    b = driver.add("b", range(16), 1, reads_cache=False)
    computed: set[int] = set()
    preempted_at: list[int] = []
    while not b.is_finished:
        plan = driver.step()
        computed |= {p for c in plan.chunks if c.request is b for p in range(c.start, c.end)}
        if b.state is RequestState.PREFILL and not preempted_at:
            preempted_at.append(b.num_computed)
            driver.scheduler.state.preempt(b)
    assert preempted_at == [8]
    assert computed == set(range(16))


def test_cache_hits_are_counted_once_per_admission() -> None:
    driver = small_driver(num_blocks=6, max_num_seqs=3)
    driver.add("warm", range(8), 1)
    driver.run()
    _, b = driver.add_all(a=([*range(8), 50], 12), b=([*range(8), 60], 12))
    seen = []
    while driver.scheduler.requests:
        seen += [(a.request.id, a.is_resume) for a in driver.step().admitted]
    assert seen.count(("b", False)) == 1
    assert seen.count(("b", True)) == b.history.num_preemptions > 0
    assert b.history.num_cached == 8  # of the first admission only


@pytest.mark.parametrize(("num_shared", "num_keys"), [(4, 11), (0, 1)])
def test_a_blocked_request_is_hashed_once(num_shared: int, num_keys: int) -> None:
    """All blocks if the first one is cached, and otherwise that one only."""
    driver = small_driver(num_blocks=12)
    driver.add("a", range(8), 20)
    driver.step()
    head = driver.add("head", [*range(num_shared), *range(100, 144 - num_shared)], 2)
    driver.step()
    keys, objects = head.kv.keys, list(head.kv.keys)
    driver.steps(5)
    assert not head.kv.blocks, "it is blocked"
    assert head.kv.keys is keys and len(keys) == num_keys
    assert all(now is before for now, before in zip(keys, objects, strict=True))


def test_a_failed_admission_changes_nothing() -> None:
    driver = small_driver(num_blocks=6)
    driver.add("warm", range(8), 1)
    driver.run()
    driver.add("a", 12, 8)
    driver.step()
    pool = driver.scheduler.kv.pool
    before = (list(pool.refs), list(pool.index.key_of))
    head = driver.add("head", [*range(8), *range(50, 58)], 1)  # 2 hits and 2 new blocks; 3 are free
    plan = driver.plan()
    assert plan.blocked == [Blocked(head, "blocks", 4, 2)]  # a has taken one more block
    driver.finish(plan)
    assert sum(pool.refs) == sum(before[0]) + 1 and head.kv.blocks == []
    kept = [key for key in before[1] if key is not None]
    assert all(key in pool.index.block_of for key in kept)
