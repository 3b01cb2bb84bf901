"""Laws of plans in flight: late stops, aborts, executor failures and cache resets."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headway import Plan, RequestState
from tests.support.drive import Driver, Row, count_up, names, small_driver


def run_async(driver: Driver, max_steps: int = 10_000) -> None:
    """Run to the end with one plan in flight while the next is made."""
    in_flight: deque[Plan] = deque()
    for _ in range(max_steps):
        if not driver.scheduler.requests and not in_flight:
            return
        plan = driver.plan()
        if not plan.is_empty:
            in_flight.append(plan)
        assert in_flight, "the plan is empty although there is work"
        if plan.is_empty or len(in_flight) == 2:
            driver.finish(in_flight.popleft())
    raise AssertionError("requests are still unfinished")


def test_a_preempted_request_gets_its_token_in_flight() -> None:
    driver = small_driver(num_blocks=3)
    _, b = driver.add_all(a=(4, 6), b=(4, 4))
    first = driver.plan()
    second = driver.plan()  # preempts b while its first token is in flight
    assert driver.table[-1] == Row("", "a", (), "b")
    assert b.state is RequestState.WAITING and b.num_generated == 0
    driver.finish(first)
    assert b.num_generated == 1
    driver.finish(second)
    run_async(driver)
    driver.check_outputs()
    driver.check_empty()


def test_a_preempted_request_is_not_resumed_before_its_token_is_known() -> None:
    driver = small_driver(num_blocks=3)
    _, b = driver.add_all(a=(4, 2), b=(4, 4))
    first = driver.plan()
    second = driver.plan()  # a gets its last token, b is preempted
    driver.finish(first)
    third = driver.plan()
    assert names(p.request for p in third.preempted) == "" and not third.admitted
    driver.finish(second)
    run_async(driver)
    driver.check_outputs()
    assert b.finish_reason == "length"


def test_a_late_stop_drops_the_extra_token() -> None:
    driver = small_driver(num_blocks=8, sample=lambda r, place: 7 if place == 5 else 1)
    a = driver.add("a", 4, 8, eos_ids=frozenset({7}))
    first, second = driver.plan(), driver.plan()  # the second samples place 5
    driver.finish(first)
    third = driver.plan()
    driver.finish(second)
    assert a.is_finished and a.tokens.tolist()[4:] == [1, 7]
    completed = driver.finish(third)
    assert list(completed.outputs()) == [] and completed.finished == []
    assert a.num_generated == 2
    driver.check_empty()


def test_max_tokens_is_never_exceeded_with_a_plan_in_flight() -> None:
    driver = small_driver(num_blocks=8)
    a = driver.add("a", 4, 2)
    driver.plan()
    driver.plan()
    while driver.scheduler.in_flight:
        assert driver.plan().is_empty if len(driver.scheduler.in_flight) < 2 else True
        driver.finish(driver.scheduler.in_flight[0].plan)
    assert a.num_generated == 2


@pytest.mark.parametrize("num_done", [0, 1])
def test_an_abort_in_flight_frees_each_block_once(num_done: int) -> None:
    driver = small_driver(num_blocks=8, max_num_batched_tokens=8)
    a, b = driver.add_all(a=(12, 4), b=(4, 4))
    plans = [driver.plan(), driver.plan()]
    for plan in plans[:num_done]:
        driver.finish(plan)
    assert driver.scheduler.abort("a")
    assert driver.scheduler.num_free == 8 - len(b.kv.blocks)
    assert not driver.scheduler.abort("a")
    for plan in plans[num_done:]:
        assert a not in dict(driver.finish(plan).outputs())
    run_async(driver)
    assert a.finish_reason == "abort" and b.finish_reason == "length"
    driver.check_outputs()
    driver.check_empty()


def test_a_chunk_in_flight_is_not_scheduled_twice() -> None:
    driver = small_driver(num_blocks=16, max_num_batched_tokens=8)
    driver.add("a", 20, 1)
    first, second = driver.plan(), driver.plan()
    assert [row.chunks for row in driver.table] == [(("a", 0, 8),), (("a", 8, 16),)]
    driver.finish(first)
    driver.finish(second)
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize("is_async", [False, True])
def test_random_policies_aborts_and_resets_deliver_each_token_once_and_leak_nothing(
    is_async: bool,
) -> None:
    for seed in range(60):
        driver, in_flight = random_driver(seed), deque[Plan]()
        rng = random.Random(seed)
        for step in range(5_000):
            if step % 2 == 0 and step < 40:
                add_random(driver, str(step), rng)
            if rng.random() < 0.03 and driver.scheduler.requests:
                driver.scheduler.abort(rng.choice(list(driver.scheduler.requests)))
            if rng.random() < 0.03:
                driver.scheduler.reset_cache(force=True)
            if not driver.scheduler.requests and not in_flight and step >= 40:
                break
            plan = driver.plan()
            assert driver.scheduler.last_planned.num_running <= driver.scheduler.config.max_num_seqs
            if not plan.is_empty:
                in_flight.append(plan)
            if in_flight and (plan.is_empty or len(in_flight) == 1 + is_async):
                driver.finish(in_flight.popleft())
            elif plan.is_empty:
                assert not driver.scheduler.requests, f"seed {seed}: stuck"
        else:
            raise AssertionError(f"seed {seed}: requests are still unfinished")
        driver.check_outputs()
        driver.check_empty()


def random_driver(seed: int) -> Driver:
    rng = random.Random(seed)
    return small_driver(
        batching=rng.choice(("mixed", "swapped_first", "prefill_first", "prefill_first_charge_cached", "static")),
        queue=rng.choice(
            ("fcfs", "fcfs(3)", "priority(preempts=True)", "shortest_first", "fair(2)", "earliest_deadline")
        ),
        chunk=rng.choice(("split_first", "split_any", "at_most(3)")),
        headroom=rng.choice(
            ("watermark(0.1)", "reserve_outputs(0.5)", "future_peak", "back_off(share=0.2)")
        ),
        victim=rng.choice(
            ("newest", "least_work", "lowest_priority", "fewest_private_blocks", "served_last")
        ),
        swap=rng.choice(("recompute", "swap", "swap_if_cheaper")),
        block_size=rng.choice((1, 2, 4)), num_blocks=24, num_host_blocks=rng.choice((0, 9, 40)),
        max_num_seqs=5, max_num_batched_tokens=rng.choice((5, 12, 40)), num_scheduler_steps=rng.choice((1, 1, 3)),
    )  # fmt: skip


def add_random(driver: Driver, name: str, rng: random.Random) -> None:
    stem = range(rng.choice((0, 3, 8)))
    own = range(100 * len(driver.requests), 100 * len(driver.requests) + rng.randrange(1, 8))
    driver.add(
        name, [*stem, *own], rng.randrange(1, 9), priority=rng.randrange(3),
        client=rng.choice("xyz"), arrival=float(len(driver.requests)),
        deadline=rng.choice((None, 5.0)), reads_cache=rng.random() < 0.8,
    )  # fmt: skip


def test_an_executor_failure_ends_only_requests_in_flight() -> None:
    driver = small_driver(num_blocks=8, max_num_seqs=2)
    a, b, c = driver.add_all(a=(4, 4), b=(4, 4), c=(4, 4))
    driver.step()
    driver.plan()
    driver.scheduler.fail("device lost")
    assert driver.events.ended == [a, b]
    assert all(r.finish_reason == "error" and r.error == "device lost" for r in (a, b))
    assert not c.is_finished and driver.scheduler.num_free == 8
    driver.run()
    assert c.finish_reason == "length"
    driver.check_outputs()
    driver.check_empty()


def test_an_executor_failure_empties_the_prefix_cache() -> None:
    driver = small_driver(num_blocks=16)
    driver.add("a", range(8), 4)
    driver.step()
    driver.plan()
    driver.scheduler.fail("device lost")
    driver.add("b", range(8), 1)
    assert driver.steps(1)[0].chunks == (("b", 0, 8),)


def test_a_failure_with_two_plans_in_flight_and_a_swap_leaks_nothing() -> None:
    driver = small_driver("vllm", swap="swap", num_blocks=6, num_host_blocks=6)
    driver.add_all(a=(10, 5), b=(10, 4))
    driver.steps(2)
    driver.plan()
    driver.plan()  # b is being swapped out
    assert driver.requests["b"].state is RequestState.SWAPPED
    driver.scheduler.fail("device lost")
    driver.add("c", 4, 2)
    driver.run()
    driver.check_empty()


def test_a_failure_leaves_no_request_swapped_out() -> None:
    driver = small_driver("vllm", swap="swap", num_blocks=6, num_host_blocks=6)
    driver.add_all(a=(10, 6), b=(10, 4))
    while not driver.scheduler.swapped:
        driver.step()
    b = driver.requests["b"]
    driver.plan()
    driver.scheduler.fail("device lost")
    assert not driver.scheduler.swapped and b.state is RequestState.WAITING
    driver.run()
    driver.check_outputs()
    driver.check_empty()


def test_a_cache_reset_is_refused_while_requests_run() -> None:
    driver = small_driver(num_blocks=16)
    driver.add("a", range(8), 3)
    driver.step()
    assert not driver.scheduler.reset_cache()
    driver.run()
    assert driver.scheduler.reset_cache()
    driver.add("b", range(8), 1)
    assert driver.steps(1)[0].chunks == (("b", 0, 8),)


def test_a_forced_cache_reset_keeps_the_order_and_every_token() -> None:
    driver = small_driver(num_blocks=32, max_num_seqs=3)
    for name in "abcd":
        driver.add(name, 6, 5)
    driver.steps(2)
    assert driver.scheduler.reset_cache(force=True)
    assert not driver.scheduler.running and driver.scheduler.num_free == 32
    row = driver.steps(1)[0]
    assert row.admitted == "a b c" and row.chunks == (("a", 0, 8), ("b", 0, 8), ("c", 0, 8))
    driver.run()
    driver.check_outputs()


def test_a_cache_reset_is_refused_with_a_plan_in_flight() -> None:
    driver = small_driver(num_blocks=32)
    driver.add("a", 6, 5)
    plan = driver.plan()
    assert not driver.scheduler.reset_cache(force=True)
    driver.finish(plan)
    assert driver.scheduler.reset_cache(force=True)
    driver.run()
    driver.check_outputs()


def test_a_request_added_after_a_failure_gets_all_its_tokens() -> None:
    driver = small_driver(num_blocks=16, max_num_seqs=2)
    driver.add("a", 4, 4)
    driver.step()
    driver.plan()
    driver.scheduler.fail("device lost")
    c = driver.add("c", 4, 4)
    driver.run()
    assert c.tokens.tolist()[4:] == [count_up(c, place) for place in range(4, 8)]
