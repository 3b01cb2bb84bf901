"""The scheduler's laws hold in random scenarios, above an executor that checks every slot.

`scenarios.ScenarioRun` checks the laws in every scenario. The tests here also check that the
scenarios contain every kind of event, and that a wrong plan is detected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from headway import PRESETS, Plan, Scheduler, preset
from headway.config import Config, SchedulerView, StepActions
from headway.request import Request, RequestParams
from headway.scheduler.policies import queue as queues
from tests.support.scenarios import Scenario, Tamper, random_scenario, run
from tests.support.shadow import ShadowError, oracle

NUM_SEEDS = 240  # each is run with and without a plan in flight

# How often each kind of event occurs at least.
MIN_EVENTS = {
    "preempted, recomputed": 160, "preempted, swapped": 80, "priority preemptions": 40,
    "cache hits": 500, "full hits": 80, "full hits not stored again": 80,
    "resumed from cache": 80, "resumed from host": 80, "resumed from cache and host": 30,
    "swapped without use": 2, "swaps both ways": 2, "deferred decodes": 80,
    "deferred, then preempted": 3, "split prompts": 800, "mixed batches": 160,
    "aborts": 80, "aborts in flight": 10, "stops in flight": 160, "refused": 80,
    "resets while running": 30, "crashes": 15, "multi-step plans": 160,
    "ends within a multi-step plan": 8, "samples of one prompt": 500,
    "plans while another is in flight": 1600,
    "continued requests": 80,
    "blocked: token_budget": 80, "blocked: blocks": 800, "blocked: headroom": 800,
    "blocked: parent": 800, "blocked: back_off": 15, "blocked: just_preempted": 15,
    "not considered: max_num_seqs": 800, "not considered: token_budget": 160,
    "not considered: behind_blocked": 500, "not considered: after_preemption": 30,
    "not considered: not_reached": 30,
    "finish: stop": 500, "finish: length": 800, "finish: abort": 80, "finish: error": 15,
}  # fmt: skip
TOO_RARE = {"crashes while swapping"}  # has a test of its own below


def test_output_depends_neither_on_policy_nor_on_a_plan_in_flight() -> None:
    """In every scenario; together they contain every kind of event."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        for async_scheduling in (0, 1):
            try:
                seen += run(random_scenario(seed, async_scheduling))
            except Exception as error:
                raise AssertionError(
                    f"random_scenario({seed}, {async_scheduling}): {error}"
                ) from error
    rare = {event: seen[event] for event, least in MIN_EVENTS.items() if seen[event] < least}
    assert not rare, f"too few of these events: {rare}"
    assert set(seen) <= {*MIN_EVENTS, *TOO_RARE}


def make(id: str, num_prompt: int, max_tokens: int, **params: object) -> Request:
    each = RequestParams(max_tokens=max_tokens, sampling=int(id), **params)  # type: ignore[arg-type]
    return Request(id, [int(id) + 3] * num_prompt, each, arrival=float(id))


def tight(**changes: object) -> Config:
    return preset("vllm", **{"swap": "swap", "block_size": 1, **changes})


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_partially_prefilled_prompt_from_the_host_leaves_tokens_for_decodes(
    async_scheduling: int,
) -> None:
    """The third prompt is swapped out half computed, and resumes in a batch with a decode."""
    config = tight(num_blocks=13, num_host_blocks=8, max_num_seqs=3, max_num_batched_tokens=5)
    requests = [make("0", 2, 10), make("1", 2, 2), make("2", 8, 2)]
    seen = run(Scenario(config, async_scheduling, {0: requests}))
    assert seen["preempted, swapped"] and seen["resumed from host"]


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_an_executor_failure_at_any_step_of_a_swap_leaks_nothing(async_scheduling: int) -> None:
    config = tight(num_blocks=13, num_host_blocks=8, max_num_seqs=3, max_num_batched_tokens=5)
    seen: Counter[str] = Counter()
    for crash in range(15):
        requests = [make("0", 2, 10), make("1", 2, 2), make("2", 8, 2)]
        seen += run(Scenario(config, async_scheduling, {0: requests}, crash=crash))
    assert seen["crashes"] and seen["crashes while swapping"]


@dataclass(frozen=True)
class all_outrank_all(queues.Rule):
    """Every waiting request may preempt every running one, without a limit."""

    preempts = True

    def key(self, request: Request, view: SchedulerView) -> int:
        return request.history.num_preemptions

    def outranks(self, waiting: Request, running: Request) -> bool:
        return True


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("chunk", ("whole", "split_any", "at_most(1)"))
def test_requests_that_all_outrank_each_other_finish(chunk: str, async_scheduling: int) -> None:
    config = tight(
        queue=all_outrank_all(), chunk=chunk, swap="recompute", block_size=4, num_blocks=2, max_num_seqs=1,
        max_num_batched_tokens=16,
    )  # fmt: skip
    run(Scenario(config, async_scheduling, {0: [make("0", 3, 4), make("1", 3, 4)]}))


def test_a_sample_whose_parent_is_never_added_finishes() -> None:
    parent, other = make("0", 3, 2), make("1", 3, 4)
    sample = Request("2", parent.prompt, replace(parent.params, sampling=2), parent=parent)
    run(Scenario(tight(num_blocks=8), 0, {0: [sample, other]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_decode_that_is_deferred_and_then_forced_gains_one_token(async_scheduling: int) -> None:
    """The first decode takes the budget, finds no block and is preempted; the other decodes."""
    config = tight(
        batching="prefill_first_charge_cached", victim="lowest_priority", swap="recompute", num_blocks=4,
        max_num_seqs=2, max_num_batched_tokens=1,
    )  # fmt: skip
    seen = run(
        Scenario(config, async_scheduling, {0: [make("0", 1, 4, priority=1), make("1", 1, 3)]})
    )
    assert seen["deferred decodes"] and seen["preempted, recomputed"]


def decode_twice(step: StepActions) -> None:
    """Defer all decodes, then decode in the same step."""
    step.prefill()
    step.admit()
    if step.is_idle:
        step.decode(at_most=0)
        step.decode()


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_batching_rule_may_call_decode_twice(async_scheduling: int) -> None:
    config = tight(batching=decode_twice, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=4)
    run(Scenario(config, async_scheduling, {0: [make("0", 1, 4), make("1", 1, 3)]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("num_scheduler_steps", (1, 3))
def test_requests_that_arrive_after_an_executor_failure_lose_nothing(
    async_scheduling: int, num_scheduler_steps: int
) -> None:
    config = tight(
        num_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=4,
        num_scheduler_steps=num_scheduler_steps,
    )
    arrivals = {0: [make("0", 2, 6), make("1", 6, 6)], 4: [make("2", 2, 6)]}
    seen = run(Scenario(config, async_scheduling, arrivals, crash=3))
    assert seen["crashes"] and seen["finish: error"] and seen["finish: length"]


@dataclass(frozen=True)
class by_client(queues.Rule):
    """Groups are named by the client, whose name may be empty."""

    preempts = True

    def key(self, request: Request, view: SchedulerView) -> float:
        return request.arrival

    def group(self, request: Request) -> str:
        return request.params.client


def test_a_group_with_an_empty_name_is_served() -> None:
    config = tight(queue=by_client(), num_blocks=8, max_num_seqs=1, max_num_batched_tokens=4)
    run(Scenario(config, 0, {0: [make("0", 1, 4), make("1", 1, 3, client="a")]}))


@pytest.mark.parametrize("name", PRESETS)
def test_every_waiting_request_has_a_reason(name: str) -> None:
    """Also in steps that admit no request, and in steps that preempt after an admission."""
    config = preset(name, block_size=1, num_blocks=6, max_num_seqs=4, max_num_batched_tokens=4)
    run(Scenario(config, 0, {0: [make(str(i), 1, 5) for i in range(4)]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("num_scheduler_steps", (1, 3))
def test_many_steps_without_changes_deliver_every_token(
    async_scheduling: int, num_scheduler_steps: int
) -> None:
    """Long enough to fill and flush the token buffer more than once."""
    config = preset(
        num_blocks=60, block_size=8, max_num_seqs=4, num_scheduler_steps=num_scheduler_steps
    )
    requests = [make(str(i), 2 + i, 140 + i, ignore_eos=True) for i in range(3)]
    run(Scenario(config, async_scheduling, {0: requests[:2], 70: requests[2:]}))


def swap_two_blocks(plan: Plan, scheduler: Scheduler) -> None:
    for request in plan.decodes:
        blocks = request.kv.blocks
        if len(blocks) > 1:
            blocks[0], blocks[1] = blocks[1], blocks[0]


def forget_copies_in(plan: Plan, scheduler: Scheduler) -> None:
    plan.copies_in.clear()


def forget_copies_out(plan: Plan, scheduler: Scheduler) -> None:
    plan.copies_out.clear()


def store_nothing(plan: Plan, scheduler: Scheduler) -> None:
    plan.chunks = [c._replace(store_from=c.end) for c in plan.chunks]


def start_too_late(plan: Plan, scheduler: Scheduler) -> None:
    plan.chunks = [c._replace(start=min(c.start + 1, c.end - 1)) for c in plan.chunks]


def use_one_row(plan: Plan, scheduler: Scheduler) -> None:
    for request in plan.decodes:
        request.row = plan.decodes[0].row


def forget_new_blocks(plan: Plan, scheduler: Scheduler) -> None:
    plan.new_blocks.clear()


def share_a_new_block(plan: Plan, scheduler: Scheduler) -> None:
    """Two requests get the same new block."""
    if len(plan.new_blocks) > 1:
        (first, block), (second, _), *rest = plan.new_blocks
        second.kv.blocks[-1] = block
        plan.new_blocks[:] = [(first, block), (second, block), *rest]


def publish_under_a_wrong_key(plan: Plan, scheduler: Scheduler) -> None:
    """Publish a block that a decode is about to fill, with the key of another block."""
    index = scheduler.kv.pool.index
    for request, block in plan.new_blocks:
        for key in list(index.block_of):
            if index.key_of[block] is None and block in request.kv.blocks:
                index.add([block], [key])


def ignore_limits(plan: Plan, scheduler: Scheduler) -> None:
    planned = scheduler.last_planned
    planned.reaching_limit = [[] for _ in planned.reaching_limit]


TAMPERS: tuple[Tamper, ...] = (
    swap_two_blocks, forget_copies_in, forget_copies_out, store_nothing, start_too_late,
    use_one_row, forget_new_blocks, share_a_new_block, publish_under_a_wrong_key, ignore_limits,
)  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_a_wrong_plan_is_detected(tamper: Tamper) -> None:
    """In at least 3 of 150 scenarios; not every scenario has a plan that the tamper changes."""
    num_found = 0
    for seed in range(150):
        try:
            run(random_scenario(seed, seed % 2), tamper)
        except ShadowError:
            num_found += 1
        except AssertionError:  # the other checks of a scenario may fail first
            pass
        if num_found == 3:
            return
    raise AssertionError(f"detected in {num_found} scenarios only")


def test_the_oracle_applies_every_stop_condition() -> None:
    free = RequestParams(max_tokens=50, ignore_eos=True, sampling=7)
    output, reason = oracle([1, 2], free, 1000)
    assert len(output) == 50 and reason == "length"
    first = output[0]
    assert oracle([1, 2], replace(free, stop_ids=frozenset({first})), 1000) == ([first], "stop")
    assert oracle([1, 2], replace(free, eos_ids=frozenset({first})), 1000) == (output, "length")
    later = output.index(first, 1) + 1
    waits = replace(free, stop_ids=frozenset({first}), min_tokens=2)
    assert oracle([1, 2], waits, 1000) == (output[:later], "stop")
    assert oracle([1, 2], replace(free, max_tokens=None), 12) == (output[:10], "length")
    assert oracle([1, 2], replace(free, sampling=8), 1000)[0] != output
