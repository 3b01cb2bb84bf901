"""Failures that other engines have had: starvation, repeated preemption, wrong counts."""

from __future__ import annotations

import random

import pytest

from headway.errors import InvalidRequest, RequestError, RequestTooLong
from headway.plan import Blocked
from headway.scheduler.policies.batching import MAX_PREFILL_STEPS
from headway.scheduler.policies.presets import PRESETS
from tests.support.drive import Driver, Row, names, small_driver

# Liveness: a blocked request at the head of the queue, and requests that can never run


def blocked_head(queue: str) -> Driver:
    """The first waiting request needs 100 blocks, 20 are free, and 40 others need 5 each."""
    driver = small_driver(queue=queue, num_blocks=121, max_num_seqs=64, max_num_batched_tokens=1024)
    driver.add("runner", 400, 41)  # 100 blocks, 101 with its next token
    driver.step()
    driver.add("head", 400, 4)
    for number in range(40):
        driver.add(f"small{number}", 20, 1)
    return driver


def test_small_requests_overtake_a_blocked_request() -> None:
    driver = blocked_head("fcfs(8)")
    plan = driver.step()
    assert plan.blocked[0] == Blocked(driver.requests["head"], "blocks", 100, 20)
    assert driver.table[-1].admitted == "small0 small1 small2 small3"


def test_a_blocked_request_is_overtaken_at_most_patience_times() -> None:
    driver = blocked_head("fcfs(8)")
    rows = driver.run()
    admitted = " ".join(row.admitted for row in rows).split()
    assert admitted.index("head") == 8
    assert driver.requests["head"].history.num_overtaken == 8
    assert admitted[:8] == [f"small{n}" for n in range(8)]
    driver.check_empty()


def test_without_patience_no_request_overtakes_and_all_finish() -> None:
    driver = blocked_head("fcfs")
    admitted = " ".join(row.admitted for row in driver.run()).split()
    assert admitted == ["head", *(f"small{n}" for n in range(40))]
    driver.check_empty()


@pytest.mark.parametrize("name", PRESETS)
def test_a_request_larger_than_the_cache_is_refused_and_others_continue(name: str) -> None:
    driver = small_driver(name, num_blocks=8)
    driver.add("a", 8, 4)
    with pytest.raises(RequestTooLong, match=r"33.* 8;.*max_tokens.*num_blocks") as refusal:
        driver.add("giant", 129, 2)
    assert (refusal.value.need, refusal.value.limit) == (33, 8)
    assert isinstance(refusal.value, RequestError)
    assert list(driver.scheduler.requests) == ["a"]
    driver.run()
    driver.check_outputs()
    driver.check_empty()


def test_a_request_that_would_outgrow_the_cache_is_refused_when_added() -> None:
    driver = small_driver(num_blocks=8)
    driver.add("just fits", 1, 32)  # stores 32 tokens; the last sampled token is not stored
    with pytest.raises(RequestTooLong):
        driver.add("outgrows", 1, 33)
    driver.run()
    driver.check_outputs()


def test_a_request_whose_recomputation_exceeds_the_budget_is_refused_when_added() -> None:
    driver = small_driver(chunk="whole", num_blocks=64, max_num_batched_tokens=16)
    driver.add("fits", 10, 7)  # at most 16 known tokens when it is recomputed
    with pytest.raises(RequestTooLong, match="max_num_batched_tokens.*16;.*split_any") as refusal:
        driver.add("outgrows", 10, 8)
    assert (refusal.value.need, refusal.value.limit) == (17, 16)


def test_a_prompt_over_the_budget_is_split_or_refused() -> None:
    driver = small_driver(chunk="split_any", num_blocks=64, max_num_batched_tokens=16)
    driver.add("long", 50, 2)
    assert [row.chunks[0][1:] for row in driver.steps(4)] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    with pytest.raises(RequestTooLong):
        small_driver("minivllm", num_blocks=64, max_num_batched_tokens=16).add("long", 50, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [(0, 4, "empty prompt"), (4, 0, "max_tokens.* 1"), (4, -1, "max_tokens")],
)
def test_an_invalid_request_is_refused_and_names_the_field(
    prompt: int, max_tokens: int, message: str
) -> None:
    driver = small_driver(num_blocks=8)
    with pytest.raises(InvalidRequest, match=message):
        driver.add("a", prompt, max_tokens)
    assert not driver.scheduler.requests


def test_an_id_in_use_is_refused_until_its_request_ends() -> None:
    driver = small_driver(num_blocks=8)
    driver.add("a", 4, 1)
    with pytest.raises(InvalidRequest, match="'a'.*choose another id"):
        driver.add("a", 4, 1)
    driver.run()
    driver.add("a", 4, 1)
    driver.run()
    driver.check_empty()


def test_max_model_len_is_enforced() -> None:
    driver = small_driver(num_blocks=64, max_model_len=16)
    with pytest.raises(RequestTooLong, match="16;.*shorten the prompt$") as refusal:
        driver.add("no room for one more", 16, 1)
    assert (refusal.value.need, refusal.value.limit) == (17, 16)
    a = driver.add("a", 15, 50)
    driver.run()
    assert a.num_generated == 1 and a.finish_reason == "length"


@pytest.mark.parametrize("name", PRESETS)
def test_max_num_seqs_limits_running_requests_and_not_only_a_batch(name: str) -> None:
    driver = small_driver(name, num_blocks=512, max_num_seqs=8)
    for number in range(64):
        driver.add(str(number), 5, 20)
    while driver.scheduler.requests:
        driver.step()
        assert driver.scheduler.last_planned.num_running <= 8 and len(driver.scheduler.running) <= 8
    driver.check_outputs()


def test_admission_counts_blocks_and_not_tokens() -> None:
    driver = small_driver(block_size=16, num_blocks=2, max_num_seqs=8)
    for number in range(4):
        driver.add(str(number), 1, 2)
    # although four tokens fit in one block
    assert driver.steps(1)[0] == Row("0 1", "", (("0", 0, 1), ("1", 0, 1)), "", (("2", "blocks"),))


def test_a_long_prompt_is_not_admitted_without_blocks_for_all_its_chunks() -> None:
    driver = small_driver(num_blocks=12, max_num_batched_tokens=8)
    driver.add("a", 8, 24)  # 2 blocks, later 8
    driver.step()
    long = driver.add("long", 44, 2)  # 11 blocks; its first chunk would need only 2
    plan = driver.step()
    assert plan.blocked == [Blocked(long, "blocks", 11, 9)]
    driver.run()
    assert long.history.num_preemptions == 0 and long.history.num_recomputed == 0


@pytest.mark.parametrize("victim", ["newest", "served_last", "least_work", "fewest_private_blocks"])
def test_every_admission_makes_progress_despite_preemptions(victim: str) -> None:
    driver = small_driver(victim=victim, num_blocks=7, max_num_seqs=6)
    for number in range(6):
        driver.add(str(number), 4, 24)
    driver.run()
    driver.check_outputs()
    for request in driver.requests.values():
        assert request.history.num_preemptions < request.num_generated
    driver.check_empty()


def test_the_oldest_request_is_never_preempted_with_victim_served_last() -> None:
    driver = small_driver(victim="served_last", num_blocks=8, max_num_seqs=6)
    for number in range(6):
        driver.add(str(number), 4, 24, arrival=float(number))
    order: list[str] = []
    while driver.scheduler.requests:
        driver.step()
        order += [r.id for r in driver.requests.values() if r.is_finished and r.id not in order]
    assert driver.requests["0"].history.num_preemptions == 0
    assert order == sorted(order)  # in the order of arrival


def test_a_preempted_request_returns_to_its_place_in_the_queue() -> None:
    driver = small_driver(num_blocks=4, max_num_seqs=3)
    driver.add("a", 4, 10, arrival=0.0)
    driver.add("b", 4, 9, arrival=1.0)
    driver.step()
    for number in range(3):
        driver.add(f"later{number}", 4, 1, arrival=2.0 + number)
    rows = driver.run()
    assert any(row.preempted == "b" for row in rows)
    after = rows[next(i for i, row in enumerate(rows) if row.preempted == "b") :]
    admitted = " ".join(row.admitted for row in after).split()
    assert admitted[0] == "b"
    assert [name for name in admitted if name != "b"] == sorted(set(admitted) - {"b"})


def test_a_request_is_preempted_again_after_a_prefix_hit() -> None:
    driver = small_driver(num_blocks=8, max_num_seqs=3)
    _, _, c = driver.add_all(a=(4, 20), b=(4, 6), c=(9, 16))
    driver.run()
    assert c.history.num_preemptions == 2
    # It resumes twice with its generated tokens, each time from its two cached full blocks.
    chunks = [chunk for row in driver.table for chunk in row.chunks if chunk[0] == "c"]
    assert chunks == [("c", 0, 9), ("c", 8, 14), ("c", 8, 17)]
    driver.check_outputs()
    driver.check_empty()


def test_a_step_that_preempts_for_blocks_admits_no_request() -> None:
    driver = small_driver(num_blocks=3)
    driver.add_all(a=(4, 4), b=(4, 4))
    driver.step()
    driver.add("c", 1, 1)
    row = driver.steps(1)[0]
    assert row.preempted == "b" and row.admitted == ""


def test_recomputed_tokens_are_counted() -> None:
    driver = small_driver(num_blocks=3, max_num_seqs=2)
    _, b = driver.add_all(a=(4, 6), b=(4, 4))
    driver.run()
    assert b.history.num_recomputed == 4  # its only block, with 4 tokens, was reused


def test_mixed_batches_never_skip_a_decode_for_prompts() -> None:
    driver = small_driver(num_blocks=512, max_num_seqs=64, max_num_batched_tokens=64)
    driver.add("a", 4, 100)
    driver.step()
    for step in range(98):
        driver.add(str(step), 60, 1)
        assert "a" in driver.steps(1)[0].decodes.split()


@pytest.mark.parametrize("name", ["nano_vllm", "minivllm"])
def test_a_stream_of_prompts_delays_decodes_by_at_most_16_steps(name: str) -> None:
    driver = small_driver(name, num_blocks=512, max_num_seqs=8)
    driver.add("a", 4, 20)
    driver.step()
    has_decoded: list[bool] = []
    for step in range(98):
        driver.add(str(step), 60, 1)
        has_decoded.append("a" in driver.steps(1)[0].decodes.split())
    waits = "".join("x" if decoded else "." for decoded in has_decoded).split("x")
    assert max(len(wait) for wait in waits) == MAX_PREFILL_STEPS == 16
    assert sum(has_decoded) == 98 // 17


def test_a_short_prompt_does_not_overtake_a_long_one_without_chunking() -> None:
    driver = small_driver(chunk="whole", num_blocks=64, max_num_batched_tokens=16, queue="fcfs(8)")
    driver.add_all(first=(10, 1), long=(12, 1), short=(2, 1))
    assert driver.steps(2) == [
        Row("first", "", (("first", 0, 10),), "", (("long", "token_budget"),)),
        Row("long short", "", (("long", 0, 12), ("short", 0, 2))),
    ]


def test_shortest_first_counts_uncached_tokens_and_not_prompt_length() -> None:
    driver = small_driver(queue="shortest_first(aging=1.0)", num_blocks=64, max_num_seqs=1)
    shared = list(range(48))
    driver.add("warm", shared, 1)
    driver.run()
    driver.add("short prompt", 8, 1)
    driver.add("short residual", [*shared, 1, 2], 1)
    assert driver.steps(1)[0].admitted == "short residual"


@pytest.mark.parametrize("name", PRESETS)
def test_no_step_computes_more_than_its_token_budget(name: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        driver = small_driver(
            name, swap="swap", num_blocks=10, num_host_blocks=20, max_num_batched_tokens=6, max_num_seqs=5,
            chunk="split_any",
        )  # fmt: skip
        for number in range(12):
            driver.add(str(number), rng.randrange(1, 20), rng.randrange(1, 20))
        while driver.scheduler.requests:
            plan = driver.step()
            assert plan.num_tokens <= 6, f"seed {seed} step {plan.step}: {driver.table[-1]}"


def test_a_swapped_prompt_resumes_with_the_tokens_that_decodes_leave() -> None:
    sizes = {"num_blocks": 6, "num_host_blocks": 6, "max_num_batched_tokens": 4, "max_num_seqs": 3}
    driver = small_driver("vllm", swap="swap", **sizes)
    for name, prompt, max_tokens in (("a", 4, 4), ("c", 4, 4), ("b", 12, 2)):
        driver.add(name, prompt, max_tokens)
    driver.steps(4)  # b is swapped out after 2 tokens of its prompt; then a ends
    assert driver.table[3] == Row("", "a c", (), "b", ())
    # 3 tokens and 1 token of a budget of 4
    assert driver.steps(1) == [Row("b", "c", (("b", 2, 5),))]


def test_a_high_priority_preempts_at_once() -> None:
    driver = small_driver(queue="priority(preempts=True)", num_blocks=64, max_num_seqs=1)
    driver.add("low", 4, 210, priority=9)
    driver.steps(3)
    driver.add("high", 4, 2, priority=0)
    assert driver.steps(1)[0] == Row("high", "", (("high", 0, 4),), "low", ())
    driver.run()
    driver.check_outputs()


def test_aging_admits_a_low_priority_despite_a_stream_of_high_ones() -> None:
    driver = small_driver(queue="priority(aging=5.0)", num_blocks=64, max_num_seqs=1)
    driver.add("low", 4, 1, priority=2, arrival=0.0)
    admitted = []
    for step in range(20):
        driver.add(f"high{step}", 4, 1, priority=0, arrival=float(step))
        admitted.append(driver.steps(1)[0].admitted)
    assert admitted.index("low") == 10  # two levels equal ten seconds


def test_a_high_priority_preempts_as_many_requests_as_its_blocks_need() -> None:
    driver = small_driver(
        queue="priority(preempts=True)", victim="served_last", num_blocks=8, max_num_seqs=8
    )
    for number in range(4):
        driver.add(str(number), 7, 8, priority=number + 1)  # 2 blocks each: none is free
    driver.step()
    driver.add("urgent", 14, 2, priority=0)  # 4 blocks
    row = driver.steps(1)[0]
    assert row.admitted == "urgent" and row.preempted == "3 2" and row.decodes == "0 1"
    driver.run()
    driver.check_outputs()


def test_counts_of_unfinished_requests_are_exact_after_add_and_abort() -> None:
    driver = small_driver(num_blocks=16, max_num_seqs=2)
    for number in range(5):
        driver.add(str(number), 4, 3)
        assert len(driver.scheduler.requests) == number + 1
    driver.step()
    planned = driver.scheduler.last_planned
    assert (planned.num_running, planned.num_waiting) == (2, 3)
    assert driver.scheduler.abort("0") and driver.scheduler.abort("4")
    assert not driver.scheduler.abort("unknown")
    assert set(driver.scheduler.requests) == {"1", "2", "3"}
    driver.step()
    planned = driver.scheduler.last_planned
    assert (planned.num_running, planned.num_waiting) == (2, 1)
    assert names(driver.events.ended) == "0 4"
    driver.run()
    driver.check_empty()


def test_blocks_are_free_in_the_step_after_their_request_ends() -> None:
    driver = small_driver(num_blocks=4)
    driver.add_all(a=(16, 1), b=(16, 1))
    assert [row.admitted for row in driver.run()] == ["a", "b"]


def test_no_two_requests_hold_one_block_unless_they_share_its_content() -> None:
    driver = small_driver(num_blocks=8, max_num_seqs=4)
    for number in range(8):
        driver.add(str(number), 5, 9)
    while driver.scheduler.requests:
        driver.step()
        held: list[int] = []
        for request in driver.scheduler.running:
            held += request.kv.blocks
        assert len(held) == len(set(held)) == 8 - driver.scheduler.num_free


def test_samples_of_a_prompt_wait_for_the_parent_that_computes_it() -> None:
    driver = small_driver(num_blocks=16, max_num_batched_tokens=8)
    parent = driver.add("0", range(12), 2)
    for name in "12":
        driver.add(name, range(12), 2, parent=parent)
    assert driver.steps(2) == [
        Row("0", "", (("0", 0, 8),), "", ()),
        Row("", "", (("0", 8, 12),), "", (("1", "parent"), ("2", "parent"))),
    ]
    assert driver.steps(1)[0].chunks == (("1", 11, 12), ("2", 11, 12))
    driver.run()
    driver.check_empty()


def test_a_finished_request_cannot_be_added_again() -> None:
    driver = small_driver(num_blocks=16)
    a = driver.add("a", 4, 1)
    driver.run()
    with pytest.raises(RequestError):
        driver.scheduler.add(a)
