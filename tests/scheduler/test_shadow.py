"""The scheduler is right: random worlds against a fake KV cache that knows what every slot holds.

Each law is checked in every world by `worlds.Run`. The last tests here turn on the proof itself:
that the worlds reach what they are for, and that a wrong plan does not pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest

from headway.config import Config, StepActions
from headway.config import SchedulerView as View
from headway.plan import Plan
from headway.request import Params, Request
from headway.scheduler import PRESETS, Scheduler, preset, queues
from tests.support.shadow import ShadowError, oracle
from tests.support.worlds import Tamper, World, any_world, run

NUM_BATCHES = 12
BATCH = 150  # worlds at each async_scheduling


@cache
def run_batch(number: int, async_scheduling: int) -> Counter[str]:
    """What happened in the worlds of a batch; a failure names the world's seed."""
    seen: Counter[str] = Counter()
    for seed in range(number * BATCH, (number + 1) * BATCH):
        try:
            seen += run(any_world(seed, async_scheduling))
        except Exception as error:
            raise AssertionError(f"any_world({seed}, {async_scheduling}): {error}") from error
    return seen


@pytest.mark.parametrize("number", range(NUM_BATCHES))
def test_output_never_depends_on_policy(number: int) -> None:
    assert run_batch(number, 0)


@pytest.mark.parametrize("number", range(NUM_BATCHES))
def test_output_never_depends_on_a_plan_in_flight(number: int) -> None:
    assert run_batch(number, 1)


LEAST = {
    "preempted, recomputed": 1000, "preempted, swapped": 500, "priority preemptions": 300,
    "cache hits": 3000, "full hits": 500, "full hits not stored again": 500,
    "resumed from cache": 500, "resumed from host": 500, "resumed from cache and host": 200,
    "swapped in vain": 5, "swaps both ways": 15, "deferred decodes": 1000,
    "deferred, then preempted": 50, "cut prompts": 5000, "mixed batches": 1000,
    "aborts": 500, "aborts in flight": 100, "stops in flight": 1000, "refused": 500,
    "resets while running": 200, "crashes": 100, "crashes while swapping": 3,
    "multi-step plans": 1000, "ends within a multi-step plan": 50,
    "samples of one prompt": 3000, "plans while another is in flight": 10000,
    "blocked: token_budget": 500, "blocked: blocks": 5000, "blocked: headroom": 5000,
    "blocked: order": 5000, "blocked: back_off": 300, "blocked: just_preempted": 200,
    "not considered: max_num_seqs": 5000, "not considered: token_budget": 1000, "not considered: order": 5000, "not considered: back_off": 200,
    "finish: stop": 3000, "finish: length": 5000, "finish: abort": 500, "finish: error": 100,
}  # fmt: skip


def test_the_worlds_reach_every_corner() -> None:
    seen: Counter[str] = Counter()
    for number in range(NUM_BATCHES):
        for async_scheduling in (0, 1):
            seen += run_batch(number, async_scheduling)
    missed = {what: seen[what] for what, least in LEAST.items() if seen[what] < least}
    assert not missed, f"too rare to prove anything: {missed}"
    assert set(seen) <= set(LEAST), "something is counted that nobody asks for"


# Corners that random worlds find too seldom.


def make(id: str, num_prompt: int, max_tokens: int, **params: object) -> Request:
    each = Params(max_tokens=max_tokens, sampling=int(id), **params)  # type: ignore[arg-type]
    return Request(id, [int(id) + 3] * num_prompt, each, arrival=float(id))


def tight(**changes: object) -> Config:
    return preset("vllm", **{"swap": "swap", "block_size": 1, **changes})


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_prompt_swapped_back_in_leaves_tokens_for_the_decodes(async_scheduling: int) -> None:
    """The third prompt is swapped out half computed, and comes back beside a decode."""
    config = tight(num_blocks=13, num_host_blocks=8, max_num_seqs=3, max_num_batched_tokens=5)
    requests = [make("0", 2, 10), make("1", 2, 2), make("2", 8, 2)]
    seen = run(World(config, async_scheduling, {0: requests}))
    assert seen["preempted, swapped"] and seen["resumed from host"]


@dataclass(frozen=True)
class haughty(queues.Rule):
    """Everybody outranks everybody, as often as you like."""

    preempts = True

    def key(self, request: Request, world: View) -> int:
        return request.history.num_preemptions

    def outranks(self, waiting: Request, running: Request) -> bool:
        return True


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("chunk", ("whole", "split_any", "at_most(1)"))
def test_requests_that_all_outrank_each_other_still_end(chunk: str, async_scheduling: int) -> None:
    config = tight(
        queue=haughty(), chunk=chunk, swap="recompute", block_size=4, num_blocks=2, max_num_seqs=1,
        max_num_batched_tokens=16,
    )  # fmt: skip
    run(World(config, async_scheduling, {0: [make("0", 3, 4), make("1", 3, 4)]}))


def test_a_sample_whose_leader_never_comes_still_ends() -> None:
    parent, other = make("0", 3, 2), make("1", 3, 4)
    follower = Request("2", parent.prompt, replace(parent.params, sampling=2), parent=parent)
    run(World(tight(num_blocks=8), 0, {0: [follower, other]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_decode_put_off_and_then_forced_gains_one_token(async_scheduling: int) -> None:
    """The first decode takes the budget, finds no block and is sent back: the other one decodes."""
    config = tight(
        recipe="charged_in_full", victim="lowest_priority", swap="recompute", num_blocks=4,
        max_num_seqs=2, max_num_batched_tokens=1,
    )  # fmt: skip
    seen = run(World(config, async_scheduling, {0: [make("0", 1, 4, priority=1), make("1", 1, 3)]}))
    assert seen["deferred decodes"] and seen["preempted, recomputed"]


def never(step: StepActions) -> None:
    """Put off every decode, and then have one all the same."""
    step.prefill()
    step.admit()
    if step.is_idle:
        step.decode(at_most=0)
        step.decode()


@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_decode_may_be_asked_for_twice(async_scheduling: int) -> None:
    config = tight(recipe=never, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=4)
    run(World(config, async_scheduling, {0: [make("0", 1, 4), make("1", 1, 3)]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("num_scheduler_steps", (1, 3))
def test_nothing_is_lost_by_who_comes_after_a_crash(
    async_scheduling: int, num_scheduler_steps: int
) -> None:
    config = tight(
        num_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=4,
        num_scheduler_steps=num_scheduler_steps,
    )
    arrivals = {0: [make("0", 2, 6), make("1", 6, 6)], 4: [make("2", 2, 6)]}
    seen = run(World(config, async_scheduling, arrivals, crash=3))
    assert seen["crashes"] and seen["finish: error"] and seen["finish: length"]


@dataclass(frozen=True)
class by_client(queues.Rule):
    """Groups named by the client, whose name may well be empty."""

    preempts = True

    def key(self, request: Request, world: View) -> float:
        return request.arrival

    def group(self, request: Request) -> str:
        return request.params.client


def test_a_group_without_a_name_is_served() -> None:
    config = tight(queue=by_client(), num_blocks=8, max_num_seqs=1, max_num_batched_tokens=4)
    run(World(config, 0, {0: [make("0", 1, 4), make("1", 1, 3, client="a")]}))


@pytest.mark.parametrize("name", PRESETS)
def test_whoever_waits_is_told_why(name: str) -> None:
    """Also in steps that admit nobody, and those that send somebody back after admitting."""
    config = preset(name, block_size=1, num_blocks=6, max_num_seqs=4, max_num_batched_tokens=4)
    run(World(config, 0, {0: [make(str(i), 1, 5) for i in range(4)]}))


@pytest.mark.parametrize("async_scheduling", (0, 1))
@pytest.mark.parametrize("num_scheduler_steps", (1, 3))
def test_many_steady_steps_hand_out_every_token(
    async_scheduling: int, num_scheduler_steps: int
) -> None:
    """Long enough for whatever is kept back between steps to be written more than once."""
    config = preset(
        num_blocks=60, block_size=8, max_num_seqs=4, num_scheduler_steps=num_scheduler_steps
    )
    requests = [make(str(i), 2 + i, 140 + i, ignore_eos=True) for i in range(3)]
    run(World(config, async_scheduling, {0: requests[:2], 70: requests[2:]}))


# The proof, put to the proof: plans with one thing wrong.


def swap_two_blocks(plan: Plan, scheduler: Scheduler) -> None:
    for request in plan.decodes:
        blocks = request.kv.blocks
        if len(blocks) > 1:
            blocks[0], blocks[1] = blocks[1], blocks[0]


def forget_copies_in(plan: Plan, scheduler: Scheduler) -> None:
    plan.copies_in.clear()


def forget_copies_out(plan: Plan, scheduler: Scheduler) -> None:
    plan.copies_out.clear()


def store_too_little(plan: Plan, scheduler: Scheduler) -> None:
    plan.chunks = [c._replace(store_from=c.end) for c in plan.chunks]


def start_too_late(plan: Plan, scheduler: Scheduler) -> None:
    plan.chunks = [c._replace(start=min(c.start + 1, c.end - 1)) for c in plan.chunks]


def take_the_same_seat(plan: Plan, scheduler: Scheduler) -> None:
    for request in plan.decodes:
        request.row = plan.decodes[0].row


def forget_growth(plan: Plan, scheduler: Scheduler) -> None:
    plan.new_blocks.clear()


def grow_into_another(plan: Plan, scheduler: Scheduler) -> None:
    """Two requests get one block."""
    if len(plan.new_blocks) > 1:
        (first, block), (second, _), *rest = plan.new_blocks
        second.kv.blocks[-1] = block
        plan.new_blocks[:] = [(first, block), (second, block), *rest]


def publish_too_early(plan: Plan, scheduler: Scheduler) -> None:
    """A block that a decode is about to fill, under the key of another."""
    index = scheduler.kv.pool.index
    for request, block in plan.new_blocks:
        for key in list(index.block_of):
            if index.key_of[block] is None and block in request.kv.blocks:
                index.add([block], [key])


def end_too_late(plan: Plan, scheduler: Scheduler) -> None:
    plan.reaching_limit = [[] for _ in plan.reaching_limit]


TAMPERS: tuple[Tamper, ...] = (
    swap_two_blocks, forget_copies_in, forget_copies_out, store_too_little, start_too_late,
    take_the_same_seat, forget_growth, grow_into_another, publish_too_early, end_too_late,
)  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_a_wrong_plan_is_found_out(tamper: Tamper) -> None:
    num_found = 0
    for seed in range(150):
        try:
            run(any_world(seed, seed % 2), tamper)
        except ShadowError:
            num_found += 1
        except AssertionError:  # the scheduler's own laws may notice first
            pass
    assert num_found >= 3


def test_the_oracle_honours_every_stop() -> None:
    free = Params(max_tokens=50, ignore_eos=True, sampling=7)
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
