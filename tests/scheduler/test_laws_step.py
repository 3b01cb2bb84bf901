"""Laws of one step: what swapped requests leave to the decodes, and what every plan records."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from headway import Completed, Plan, StepResult
from headway.config import StepActions
from headway.events import Planned
from headway.request import Request, RequestParams
from headway.scheduler.policies.batching import mixed
from headway.scheduler.policies.headroom import back_off
from tests.support.drive import Driver, small_driver

SIZE = 4


def num_due(world: Driver) -> int:
    """Decodes whose blocks are full."""
    return sum(
        request.num_computed == SIZE * len(request.kv.blocks)
        for request in world.scheduler.state.decode_batch.members
    )


def keeping(num_blocks: int) -> Callable[[Request, object], int]:
    """A headroom rule of a user; a negative number must not touch what is reserved for decodes."""
    return lambda request, view: num_blocks


def swapping(seed: int, seen: Counter[str], headroom: int) -> Driver:
    """A tight cache with room on the host; the batching rule checks what `admit_swapped` does."""
    rng, num_kept = random.Random(seed), max(0, headroom)

    def batching(step: StepActions) -> None:
        state = world.scheduler.state
        due, decoding, before = num_due(world), step.num_decoding, step.tokens_left
        waiting = sorted(state.swapped, key=lambda r: r.history.serial)
        free, num_running = state.kv.num_free, len(state.running)
        needs = [-(-r.num_known // SIZE) for r in waiting]  # no two requests share a block
        step.admit_swapped()
        computed = sum(c.end - c.start for c in state.plan.chunks)
        assert step.tokens_left == before - computed, "tokens for the decodes are given back"
        if state.plan.admitted:
            seen["admitted"] += 1
            assert num_running == 0 or state.kv.num_free >= due + num_kept, "they are left"
            assert step.tokens_left >= min(decoding, before)
        elif waiting and num_running < 6 and before > decoding:
            seen["refused"] += 1
            assert needs[0] + (due + num_kept) * (num_running > 0) > free, "it would have fitted"
            seen["refused for decodes"] += needs[0] <= free
        mixed(step)

    world = small_driver(
        "vllm", batching=batching, queue="fcfs(3)", swap="swap", headroom=keeping(headroom),
        num_blocks=rng.randint(14, 20), num_host_blocks=30, max_num_seqs=6,
        max_num_batched_tokens=rng.choice((6, 12, 40)),
    )  # fmt: skip
    return world


@pytest.mark.parametrize("headroom", (0, -3, 2))
def test_swapped_requests_leave_blocks_and_tokens_for_the_decodes(headroom: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(25):
        world, rng = swapping(seed, seen, headroom), random.Random(seed)
        for number in range(8):
            world.add(f"r{number}", rng.randint(1, 16), rng.randint(4, 24))
        while world.scheduler.requests:
            plan = world.step()
            assert not plan.is_empty
            is_swapped_in = bool(plan.copies_in) and any(a.num_swapped for a in plan.admitted)
            assert not (is_swapped_in and plan.deferred), "a decode is deferred for a swapped one"
            # After the decodes nothing is reserved any more: the headroom alone may refuse.
            assert headroom > 0 or not any(b.reason == "headroom" for b in plan.blocked)
            assert all(b.need > b.have for b in plan.blocked if b.reason == "blocks")
        world.check_empty()
    assert seen["admitted"] > 50 and seen["refused for decodes"] >= 3, seen


def test_while_room_is_made_for_a_priority_no_swapped_request_takes_it() -> None:
    world = small_driver(
        "vllm", batching="swapped_first", queue="priority(preempts=True)", swap="swap",
        headroom="watermark(0.0)", num_blocks=10, num_host_blocks=30, max_num_seqs=2,
        victim="newest",
    )  # fmt: skip
    world.add("a", 12, 20, priority=5)
    world.add("b", 12, 20, priority=5)
    world.steps(2)
    world.add("high", 20, 4, priority=0)
    first = world.step()
    assert [a.request.id for a in first.admitted] == ["high"] and world.scheduler.swapped
    world.run()
    world.check_empty()


@pytest.mark.parametrize("seed", range(8))
def test_every_plan_records_the_state_after_it_and_why_requests_wait(seed: int) -> None:
    rng = random.Random(seed)
    world = small_driver(
        num_blocks=16, max_num_seqs=3, max_num_batched_tokens=10, queue=rng.choice(("fcfs",
        "fcfs(2)")),
    )  # fmt: skip
    for number in range(7):
        world.add(f"r{number}", rng.randint(1, 20), rng.randint(1, 12))
    scheduler, step = world.scheduler, 0
    while scheduler.requests:
        plan, planned = world.plan(), scheduler.last_planned
        assert planned.plan is plan and plan.step == step
        assert scheduler.num_steps == step + 1
        assert (planned.num_running, planned.num_waiting) == (
            len(scheduler.running),
            len(scheduler.queue),
        )
        assert planned.num_free == scheduler.num_free
        rest = len(scheduler.queue) - len(plan.blocked)
        if plan.not_considered is None:
            assert rest == 0
        else:
            assert plan.not_considered.num_requests == rest > 0
            if plan.not_considered.reason == "max_num_seqs":
                assert len(scheduler.running) == 3
            if plan.not_considered.reason == "after_preemption":
                assert plan.preempted
        assert plan.decode_context == sum(
            r.num_computed - 1 for r in plan.decodes if r.row >= 0
        ) or any(planned.reaching_limit)
        assert (
            plan.num_tokens == len(plan.decodes) + sum(c.end - c.start for c in plan.chunks) <= 10
        )
        world.finish(plan)
        step += 1


def test_cached_recomputed_and_resumed_tokens_are_counted() -> None:
    world = small_driver(num_blocks=30, max_num_seqs=3)
    first = world.add("a", range(100, 110), 6)
    world.steps(2)
    second = world.add("b", range(100, 110), 4)
    admission = world.step().admitted[0]
    assert (admission.num_cached, admission.num_swapped, admission.is_resume) == (8, 0, False)
    assert (first.history.num_cached, second.history.num_cached) == (0, 8)
    before = first.num_computed, second.num_computed
    assert world.scheduler.reset_cache(force=True)
    plan = world.step()
    assert [(a.request.id, a.is_resume) for a in plan.admitted] == [("a", True), ("b", True)]
    assert [a.num_cached for a in plan.admitted] == [
        0,
        8,
    ]  # the second finds the blocks of the first
    assert (first.history.num_cached, second.history.num_cached) == (0, 8)
    assert first.history.num_preemptions == second.history.num_preemptions == 1
    assert (first.history.num_recomputed, second.history.num_recomputed) == (
        before[0],
        before[1] - 8,
    )


@pytest.mark.parametrize("num_steps", (1, 2, 5))
def test_a_plan_has_as_many_steps_as_set_while_requests_and_blocks_last(num_steps: int) -> None:
    world = Driver(
        "vllm_v1", block_size=SIZE, num_blocks=30, max_num_seqs=3, num_scheduler_steps=num_steps
    )
    world.add_all(a=(4, 1 + 2 * num_steps), b=(4, 1 + 3 * num_steps))
    assert [world.step().num_steps for _ in range(4)] == [1, num_steps, num_steps, num_steps]
    assert not world.scheduler.requests


def test_rows_are_given_from_the_first_one_up() -> None:
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=30, max_num_seqs=5)
    for id in "abc":
        world.add(id, 4, 9)
    world.step()
    assert [world.requests[id].row for id in "abc"] == [0, 1, 2]


def test_a_preemption_that_no_block_caused_has_no_blocks_due() -> None:
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=30, max_num_seqs=3)
    world.add("a", 4, 9)
    world.step()
    assert world.scheduler.reset_cache(force=True)
    (preemption,) = world.events.preempted
    assert (preemption.num_due, preemption.num_free) == (0, 0)


def test_a_request_that_waits_for_a_parent_or_a_token_needs_one_and_has_none() -> None:
    world = Driver(
        "vllm_v1", block_size=SIZE, num_blocks=8, max_num_seqs=4,
        queue="priority(aging=0,preempts=True)",
    )  # fmt: skip
    for id, priority in (("a", 5), ("b", 6)):
        world.add(id, 12, 8, priority=priority)
    world.plan()
    world.add("c", 8, 8, priority=0)
    assert [(b.request.id, *b[1:]) for b in world.plan().blocked] == [("b", "just_preempted", 1, 0)]
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=8, max_num_seqs=4)
    parent = world.add("a", 12, 8, n=2)
    world.add("a/1", 12, 8, n=2, parent=parent, sample=1)
    assert [(b.request.id, *b[1:]) for b in world.plan().blocked] == [("a/1", "parent", 1, 0)]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("num_more", range(4))
@pytest.mark.parametrize("num_base", range(8))
def test_a_request_waits_for_the_back_off_only_if_the_base_rule_would_admit_it(
    num_base: int, num_more: int, is_wrapped: bool
) -> None:
    """The rule says so itself, so it holds for a user's function that calls it as well."""
    rule = back_off(keeping(num_base), share=0.1)
    world = Driver(
        "vllm_v1", headroom=(lambda *given: rule(*given)) if is_wrapped else rule, block_size=SIZE,
        num_blocks=10, max_num_seqs=3,
    )  # fmt: skip
    world.add("running", 10, 9)  # 3 blocks
    world.step()
    world.scheduler.state.outputs.pressure = float(num_more)
    world.add("new", 8, 9)
    free, need = 10 - 3, 2
    if need + num_base + num_more <= free:
        blocked = []
    else:
        reason = "back_off" if need + num_base <= free else "headroom"
        blocked = [("new", reason, need + num_base + num_more, free)]
    assert [(b.request.id, *b[1:]) for b in world.step().blocked] == blocked


def test_a_prompt_that_no_request_overtakes_keeps_its_place() -> None:
    """A request of another group waits for blocks, so it overtakes nothing."""

    def batching(step: StepActions) -> None:
        step.admit()
        step.prefill()

    world = small_driver(
        batching=batching, queue="fair(5)", chunk="at_most(4)", num_blocks=14,
        max_num_batched_tokens=8, headroom="watermark(0)",
    )  # fmt: skip
    world.add("first", 20, 1, client="a")
    world.step()
    world.add("second", 20, 1, client="a")
    world.add("other", 40, 1, client="b")
    assert [b.reason for b in world.step().blocked] == ["blocks"]
    for start in (4, 8):
        chunks = [(c.request.id, c.start) for c in world.step().chunks]
        assert chunks == [("first", start + 4), ("second", start)]


@pytest.mark.parametrize("batching", ("mixed", "prefill_first", "static"))
def test_a_request_that_is_forced_to_run_is_no_longer_blocked(batching: str) -> None:
    """If the chunk rule grants nothing, the first request is blocked, and then forced."""
    grants = True  # while requests are added: those that could never run are refused
    world = Driver(
        "vllm_v1", batching=batching, chunk=lambda want, left, is_first: want if grants else 0,
        block_size=SIZE, num_blocks=30, max_num_seqs=3,
    )  # fmt: skip
    for number in range(5):
        world.add(f"r{number}", 5, 1)
    grants = False
    for number in range(5):
        plan = world.step()
        assert [a.request.id for a in plan.admitted] == [f"r{number}"]
        num_rest = plan.not_considered.num_requests if plan.not_considered else 0
        assert not plan.blocked and num_rest == len(world.scheduler.queue) == 4 - number
    grants = True
    world.check_empty()


def test_pressure_grows_with_preemptions_for_blocks_and_decays_with_every_step() -> None:
    """Not with those for a priority, for a reset of the cache or after a failed step."""
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=30, max_num_seqs=3)
    for id in "ab":
        world.add(id, 8, 20)
    world.step()
    state, requests = world.scheduler.state, world.requests
    state.preempt(requests["a"], num_due=1)
    state.preempt(requests["b"], is_priority=True)
    assert state.outputs.pressure == state.view.pressure == 1.0
    world.step()
    assert state.outputs.pressure == 0.97
    assert world.scheduler.reset_cache(force=True)
    world.step()
    world.scheduler.fail("lost")
    assert requests["a"].history.num_preemptions == 3
    assert state.outputs.pressure == pytest.approx(0.97**2)


def test_a_view_shows_the_state_of_the_scheduler() -> None:
    world = small_driver(num_blocks=30, max_num_seqs=3, max_num_batched_tokens=8)
    assert world.scheduler.state.view.tokens_left == 8  # also before the first step
    running = world.add("a", range(50, 62), 6)
    world.step()
    waiting = world.add("b", range(50, 60), 6)
    view: Any = world.scheduler.state.view
    assert list(view.running) == [running] and view.num_free == 27
    assert (view.num_blocks, view.block_size, view.max_num_batched_tokens) == (30, 4, 8)
    assert view.num_uncached(running) == 4 and view.num_uncached(waiting) == 2
    assert view.blocks_of(running) == running.kv.blocks and len(view.blocks_of(running)) == 3
    assert view.blocks_of(waiting) == running.kv.blocks[:2]
    assert view.num_private_blocks(running) == 3 and view.num_private_blocks(waiting) == 0
    assert view.tokens_left == 0 and view.queue_key(waiting) > view.queue_key(running)
    world.run()
    assert list(view.output_shares) == [1.0, 1.0] and not view.output_lengths


def test_a_prefill_streak_counts_steps_without_decodes() -> None:
    world = small_driver("nano_vllm", num_blocks=100, max_num_seqs=9, max_num_batched_tokens=4)
    world.add("a", 12, 3)
    streaks = []
    while world.scheduler.requests:
        plan = world.step()
        streaks.append((bool(plan.decodes), world.scheduler.state.prefill_streak))
    assert streaks == [(False, 1), (False, 2), (False, 3), (True, 0), (True, 0)]


def test_a_new_request_has_no_history() -> None:
    request = Request("a", [1, 2], RequestParams())
    counts = {f.name: getattr(request.history, f.name) for f in fields(request.history)}
    assert (counts.pop("serial"), counts.pop("admission"), counts.pop("group")) == (-1, -1, None)
    assert counts.pop("resumed") == () and counts.pop("acceptance") == 0.5
    assert set(counts.values()) == {0} and len(counts) == 11
    assert (request.row, request.num_computed) == (-1, 0)
    assert (request.num_generated, request.num_known) == (0, 2)
    assert (request.sample, request.arrival, request.limit, request.prefill_end) == (0, 0.0, 0, 0)
    assert not request.is_finished and request.tokens.tolist() == [1, 2] and not request.output


def test_only_outputs_that_ended_by_themselves_teach_a_length() -> None:
    """Not aborted ones, and not the unused token of an embedding."""
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=100, max_num_seqs=9)
    world.add("embedding", 5, 1, pooling="last")
    world.add_all(aborted=(5, 8), whole=(5, 8), stopped=(5, 8))
    world.steps(4)
    world.scheduler.abort("aborted")
    world.scheduler.abort("stopped", "stop")
    world.run()
    assert list(world.scheduler.state.outputs.shares) == [0.5, 1.0]


def test_a_new_plan_and_a_new_result_have_nothing_in_them() -> None:
    plan, answer = Plan(7), StepResult()
    planned = Planned(plan)
    assert plan.is_empty and plan.num_tokens == 0 and (plan.step, plan.num_steps) == (7, 1)
    assert (plan.decode_context, len(plan.rows), plan.not_considered) == (0, 0, None)
    assert (planned.num_free, planned.num_running, planned.num_waiting) == (0, 0, 0)
    assert (planned.began, planned.time, planned.answers) == (0.0, 0.0, None)
    assert (answer.started, answer.ended, answer.extra) == (0.0, 0.0, None)
    assert list(Completed(planned, answer, []).outputs()) == []


@pytest.mark.parametrize("num_requests", [0, 1, 8, 9, 40])
def test_places_are_found_for_any_number_of_requests(num_requests: int) -> None:
    requests = [Request(str(i), [1], RequestParams()) for i in range(80)]
    plan = Plan(0, decodes=requests[::-2])  # the odd ones, last first
    wanted = random.Random(num_requests).sample(requests, num_requests)
    places = {plan.decodes[place]: place for place in range(40) if plan.decodes[place] in wanted}
    assert plan.places_of(wanted) == places


def test_a_request_keeps_its_own_copy_of_the_prompt() -> None:
    prompt = array("i", [1, 2, 3])
    request = Request("a", prompt, RequestParams())
    prompt[0] = 9
    assert list(request.prompt) == [1, 2, 3]


def test_a_request_without_parameters_has_the_defaults() -> None:
    params = RequestParams()
    assert (params.max_tokens, params.min_tokens, params.priority, params.n) == (128, 0, 0, 1)
    assert params.reads_cache and not params.ignore_eos and params.deadline is None


def test_the_view_counts_the_known_tokens_without_kv() -> None:
    """Of a decoding request none; of others those of the prompt that are not computed or cached."""
    world = Driver("vllm_v1", block_size=SIZE, num_blocks=40, max_num_batched_tokens=8)
    view = world.scheduler.state.view
    world.add("decoding", [1, 2, 3], 9)
    world.step()
    for _ in range(2):
        world.step()
        assert view.num_uncached(world.requests["decoding"]) == 0
    world.add_all(partial=(range(100, 120), 9), waiting=(range(100, 113), 9))
    world.step()
    partial = world.requests["partial"]
    assert 0 < partial.num_computed < 20
    assert view.num_uncached(partial) == 20 - partial.num_computed
    num_cached = partial.num_computed // SIZE * SIZE
    assert view.num_uncached(world.requests["waiting"]) == 13 - num_cached < 13


def test_a_result_without_measurements_reports_no_times_and_no_builds() -> None:
    result = StepResult()
    assert (result.started, result.ended, result.swap_in, result.num_builds) == (0.0, 0.0, 0.0, 0)
    assert not (result.decode_tokens or result.first_tokens or result.failed or result.extra)


def test_no_third_plan_is_made_while_two_are_in_flight() -> None:
    world = Driver("vllm_v1", num_blocks=40, block_size=SIZE)
    world.add("a", 5, 9)
    scheduler = world.scheduler
    assert [scheduler.schedule().is_empty for _ in range(2)] == [False, False]
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()
    assert len(scheduler.in_flight) == 2
