"""Laws of priority preemption: a high priority waits a few steps, with all budgets and rules."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import StepActions
from headway.errors import PolicyError
from headway.request import Request
from headway.scheduler.policies import queue as queues
from headway.scheduler.policies.batching import MAX_PREFILL_STEPS
from headway.scheduler.policies.presets import SLOTS
from tests.support.drive import Driver

NUM_LOW = 4
MAX_WAIT = 3  # steps; one of them may be a decode step of prefill_first
BATCHING_RULES = [batching.__name__ for batching in SLOTS["batching"]]
each_batching = pytest.mark.parametrize("batching", BATCHING_RULES)


def prefill_last(step: StepActions) -> None:
    """A user's rule: as mixed, but waiting requests go before partially prefilled prompts."""
    step.decode()
    step.admit()
    step.prefill()


def full_batch(batching: Any, chunk: str, budget: int, **changes: Any) -> Driver:
    """A driver whose rows are all taken by requests of low priority."""
    defers = batching == "prefill_first_charge_cached"
    numbers = {"max_num_seqs": NUM_LOW if defers else min(NUM_LOW, budget), "num_blocks": 400}
    slots = {"batching": batching, "chunk": chunk, "queue": "priority(preempts=True)"}
    driver = Driver("vllm_v1", **{**numbers, **slots, "max_num_batched_tokens": budget, **changes})
    num_output = budget if chunk == "whole" else 200
    for number in range(driver.scheduler.config.max_num_seqs):
        driver.add(f"low{number}", [number], num_output, priority=5)
    return driver


def start_decoding(driver: Driver) -> None:
    """Run until all requests decode, and two steps more, so that the batch is complete."""
    while driver.scheduler.queue or driver.scheduler.state.prefilling:
        driver.step()
    for _ in range(2):
        driver.step()


def num_steps_waiting(driver: Driver, id: str, max_steps: int = 100) -> int:
    """Steps until the request is admitted."""
    request = driver.requests[id]
    for count in range(max_steps):
        if request.history.admission >= 0:
            return count
        driver.step()
    return max_steps


@each_batching
@pytest.mark.parametrize("chunk", ["split_any", "split_first", "at_most(2)"])
def test_a_high_priority_waits_at_most_3_steps_for_any_budget(batching: str, chunk: str) -> None:
    for budget in range(1, 8 * NUM_LOW + 1):
        for num_prompt in (1, 6, 40):
            driver = full_batch(batching, chunk, budget)
            start_decoding(driver)
            driver.add("high", range(100, 100 + num_prompt), 2, priority=0)
            assert num_steps_waiting(driver, "high") <= MAX_WAIT, f"{budget=} {num_prompt=}"
            num_preemptions = [
                request.history.num_priority_preemptions for request in driver.requests.values()
            ]
            assert max(num_preemptions) == 1 and (batching == "static" or sum(num_preemptions) == 1)
    driver.run()
    driver.check_empty()


@each_batching
def test_a_prompt_that_must_not_be_split_waits_at_most_3_steps(batching: str) -> None:
    for budget in range(16, 8 * NUM_LOW + 1):
        for num_prompt in (1, budget // 2, budget - 2):
            driver = full_batch(batching, "whole", budget)
            start_decoding(driver)
            driver.add("high", range(100, 100 + num_prompt), 2, priority=0)
            assert num_steps_waiting(driver, "high") <= MAX_WAIT, f"{budget=} {num_prompt=}"
            driver.run()
            driver.check_empty()


def test_batching_rules_that_do_not_mix_preempt_only_one_request_for_its_row() -> None:
    """Decodes never share the budget with a prompt, so their tokens do not count."""
    for batching in ("prefill_first", "prefill_first_charge_cached"):
        driver = full_batch(batching, "whole", 32)
        start_decoding(driver)
        driver.add("high", range(100, 130), 2, priority=0)
        assert driver.steps(1)[0].preempted.count("low") == 1


def test_batching_rules_that_mix_preempt_as_many_requests_as_a_whole_prompt_needs() -> None:
    driver = full_batch("mixed", "whole", 32)
    start_decoding(driver)
    driver.add("high", range(100, 130), 2, priority=0)  # 30 of 32 tokens: two decodes fit too
    row = driver.steps(1)[0]
    assert row.preempted.count("low") == 2 and row.admitted == "high"


def test_a_partially_prefilled_prompt_of_low_priority_is_preempted() -> None:
    driver = Driver(
        "vllm_v1", queue="priority(preempts=True)", max_num_batched_tokens=8, max_num_seqs=8, num_blocks=400,
        victim="least_work",
    )  # fmt: skip
    for number in range(3):
        driver.add(f"low{number}", [number], 50, priority=5)
    driver.step()
    driver.add("long", range(1000, 1400), 2, priority=5)  # 5 tokens per step, with three decodes
    driver.steps(4)
    driver.add("high", range(100, 104), 2, priority=0)
    row = driver.steps(1)[0]
    assert row.admitted == "high" and row.preempted == "long"  # and no decode
    driver.run()
    driver.check_empty()
    assert driver.requests["long"].history.num_priority_preemptions == 1


@each_batching
def test_no_preemption_for_equal_priorities_or_with_free_rows(batching: str) -> None:
    driver = full_batch(batching, "split_any", 16)
    start_decoding(driver)
    driver.add("equal", [100], 2, priority=5)
    driver.steps(3)
    assert not any(r.history.num_priority_preemptions for r in driver.requests.values())
    driver = full_batch(batching, "split_any", 16, max_num_seqs=NUM_LOW)
    driver.scheduler.abort("low0")
    if batching != "static":  # it admits nothing while it decodes, so it preempts the whole batch
        start_decoding(driver)
        driver.add("high", [100], 2, priority=0)
        assert num_steps_waiting(driver, "high") <= MAX_WAIT
        assert not any(r.history.num_priority_preemptions for r in driver.requests.values())


@each_batching
@pytest.mark.parametrize("chunk", ["whole", "split_any"])
def test_a_request_is_preempted_at_most_twice_by_a_stream_of_high_priorities(
    batching: str, chunk: str
) -> None:
    for budget in (16, 20):
        driver = full_batch(batching, chunk, budget)
        start_decoding(driver)
        for number in range(40):
            driver.add(f"high{number}", [100 + number], 3, priority=0)
            driver.step()
        driver.run()
        driver.check_empty()
        num_preemptions = [r.history.num_priority_preemptions for r in driver.requests.values()]
        assert 1 <= max(num_preemptions) <= 2  # the default max_preemptions is 2


def test_a_users_batching_rule_is_handled_like_a_ready_made_one() -> None:
    for budget in (NUM_LOW, NUM_LOW + 1, 32):
        driver = full_batch(prefill_last, "split_any", budget)
        start_decoding(driver)
        driver.add("high", range(100, 110), 2, priority=0)
        assert num_steps_waiting(driver, "high") <= MAX_WAIT


def decode_alone(step: StepActions) -> None:
    """A user's rule: decodes first, and prompts only in steps without decodes."""
    step.decode()
    if step.is_idle:
        step.prefill()
    if step.is_idle:
        step.admit()


def test_a_preemption_makes_room_in_the_same_step() -> None:
    """Also if the batching rule admits only into idle steps, so that all others must leave first."""
    driver = full_batch(decode_alone, "split_any", 16)
    start_decoding(driver)
    driver.add("high", range(100, 110), 2, priority=0)
    row = driver.steps(1)[0]
    assert row.admitted == "high" and row.preempted.count("low") == NUM_LOW and not row.decodes
    # Prompts that are partially computed keep a step from being idle, too.
    driver = full_batch(decode_alone, "split_any", 2)
    driver.add("long", range(1000, 1400), 2, priority=5)
    while "long" not in {request.id for request in driver.scheduler.state.prefilling}:
        driver.step()
    driver.add("high", range(100, 110), 2, priority=0)
    row = driver.steps(1)[0]
    assert row.admitted == "high" and row.preempted == "long"


def test_a_decode_step_of_prefill_first_does_not_preempt_the_batch() -> None:
    """After 16 prompt steps prefill_first decodes; the high priority waits for that step."""
    driver = full_batch("prefill_first", "split_any", 8, max_num_seqs=NUM_LOW + 1)
    start_decoding(driver)
    driver.add("long", range(1000, 1400), 20, priority=0)
    driver.steps(MAX_PREFILL_STEPS)
    assert driver.scheduler.state.prefill_streak == MAX_PREFILL_STEPS
    driver.add("high", [100], 2, priority=-1)
    row = driver.steps(1)[0]
    assert row.preempted == "" and row.decodes
    assert num_steps_waiting(driver, "high") <= MAX_WAIT
    num_preemptions = [r.history.num_priority_preemptions for r in driver.requests.values()]
    assert sum(num_preemptions) == 2  # one for the long prompt before, one for this


class Unranked(queues.Rule):
    """A user's rule with a mistake."""

    preempts = True

    def key(self, request: Request, view: object) -> int:
        return request.params.priority

    def outranks(self, waiting: Request, running: Request) -> bool:
        return bool(running.params.deadline < 1)  # type: ignore[operator]  # it has no deadline


def test_a_rule_that_cannot_compare_priorities_is_named_with_the_request() -> None:
    driver = full_batch("mixed", "split_any", 16, queue=Unranked())
    start_decoding(driver)
    driver.add("high", [1], 2, priority=0)
    with pytest.raises(PolicyError, match=r"outranks\(\).*'high'") as found:
        driver.plan()
    assert found.value.request_id == "high"
