"""Laws of priority preemption: which requests go, that all of them are needed, and how often."""

from __future__ import annotations

import random
from itertools import product

import pytest

from headway.config import StepActions
from headway.request import Request
from headway.scheduler.policies.batching import mixed
from headway.scheduler.policies.presets import SLOTS
from headway.scheduler.preemption import MAX_PREEMPTIONS, TokenCount
from headway.scheduler.step_builder import StepBuilder
from tests.support.drive import Driver, small_driver

SIZE = 4


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // SIZE)


def num_due(world: Driver) -> int:
    """Decodes whose blocks are full."""
    return sum(
        request.num_computed == SIZE * len(request.kv.blocks)
        for request in world.scheduler.state.decode_batch.members
    )


def plain_choice(
    order: list[Request], freed: dict[Request, int], num_missing: int
) -> list[Request]:
    """The shortest prefix of the order that frees enough, less what is not needed of it."""
    chosen: list[Request] = []
    for request in order:
        if sum(freed[r] for r in chosen) >= num_missing:
            break
        chosen.append(request)
    if sum(freed[r] for r in chosen) < num_missing:
        return []
    for request in chosen[-2::-1]:
        others = [r for r in chosen if r is not request]
        if sum(freed[r] for r in others) >= num_missing:
            chosen = others
    return chosen


def num_private(request: Request, others: list[Request]) -> int:
    """Blocks that no other request holds."""
    held = {block for other in others if other is not request for block in other.kv.blocks}
    return sum(block not in held for block in request.kv.blocks)


@pytest.mark.parametrize("batch", range(4))
def test_the_victims_free_enough_blocks_and_none_of_them_could_stay(batch: int) -> None:
    num_chosen = num_spared = 0
    for seed in range(50 * batch, 50 * batch + 50):
        rng = random.Random(seed)
        lengths = [rng.choice((1, 5, 9, 13, 22)) for _ in range(rng.randint(2, 7))]
        num_high = rng.randint(1, 60)
        num_blocks = sum(map(blocks, lengths)) + len(lengths) + rng.randint(0, 3)
        world = small_driver(
            queue="priority(preempts=True, aging=0)", victim="newest", num_blocks=max(num_blocks,
            blocks(num_high) + 1), max_num_seqs=10, max_num_batched_tokens=200,
        )  # fmt: skip
        low = []
        for number, length in enumerate(lengths):
            first = 1000 if rng.random() < 0.3 else 2000 + 100 * number  # some share a prefix
            prompt = range(first, first + length)
            priority = rng.choice((0, 5, 5, 5))
            low.append(world.add(f"low{number}", prompt, 3 + SIZE, priority=priority))
        world.steps(rng.randint(1, 3))
        free, due = world.scheduler.num_free, num_due(world)
        world.add("high", num_high, 1, priority=0)
        outranked = [r for r in low[::-1] if r.params.priority == 5]
        freed = {request: num_private(request, low) for request in outranked}
        num_missing = blocks(num_high) + due - free
        plan = world.step()
        victims = [p.request for p in plan.preempted if p.is_priority]
        wanted = plain_choice(outranked, freed, num_missing) if num_missing > 0 else []
        assert victims == wanted, f"{seed=}"
        if victims:
            assert [a.request.id for a in plan.admitted][:1] == ["high"]
            assert all(r.history.num_priority_preemptions == 1 for r in victims)
        num_chosen += bool(victims)
        num_spared += (
            len(victims) < len(outranked[: outranked.index(victims[-1]) + 1]) if victims else 0
        )
    assert num_chosen > 10 and num_spared > 2


def test_for_a_row_alone_only_the_first_victim_goes() -> None:
    for victim, wanted in (("newest", "low2"), ("least_work", "low1")):
        world = small_driver(
            queue="priority(preempts=True)", victim=victim, num_blocks=100, max_num_seqs=3
        )
        for number, length in enumerate((9, 2, 5)):
            world.add(f"low{number}", length, 20, priority=5)
        world.steps(2)
        world.add("high", 3, 2, priority=0)
        row = world.steps(1)[0]
        assert (row.preempted, row.admitted) == (wanted, "high")


def two_blocks(request: Request, view: object) -> int:
    """A headroom rule of a user."""
    return 2


@pytest.mark.parametrize("headroom", ("watermark(0.0)", two_blocks))
def test_the_room_that_victims_leave_is_for_the_request_that_they_were_preempted_for(
    headroom: object,
) -> None:
    """Neither the headroom nor a swapped request takes it: it is admitted in the same step."""
    num_preempted = num_beside_swapped = 0
    for seed in range(30):
        rng = random.Random(seed)
        world = small_driver(
            "vllm", batching="swapped_first", queue="priority(preempts=True, aging=0)",
            swap="swap", headroom=headroom, num_blocks=rng.randint(14, 18), num_host_blocks=40,
            max_num_batched_tokens=40,
        )  # fmt: skip
        for number in range(6):
            world.add(f"low{number}", rng.randint(4, 16), rng.randint(8, 24), priority=5)
        for number in range(200):
            if not world.scheduler.requests:
                break
            if number % 6 == 5 and number < 40:
                world.add(f"high{number}", rng.randint(4, 30), 2, priority=0)
            had_swapped = bool(world.scheduler.swapped)
            plan = world.step()
            if any(p.is_priority for p in plan.preempted):
                assert plan.admitted and plan.admitted[0].request.params.priority == 0
                num_preempted += 1
                num_beside_swapped += had_swapped
        world.check_empty()
    assert num_preempted > 30 and num_beside_swapped > 10


@pytest.mark.parametrize("num_before", (MAX_PREEMPTIONS - 1, MAX_PREEMPTIONS))
def test_a_request_is_preempted_for_priority_at_most_16_times_whatever_the_rule(
    num_before: int,
) -> None:
    world = small_driver(
        queue="priority(preempts=True, max_preemptions=99)", num_blocks=100, max_num_seqs=1
    )
    low = world.add("low", 5, 20, priority=5)
    world.step()
    low.history.num_priority_preemptions = num_before
    world.add("high", 3, 2, priority=0)
    assert world.steps(1)[0].preempted == ("low" if num_before < 16 else "")


@pytest.mark.parametrize("answers", [*product((False, True), repeat=4)])
def test_a_batching_rule_that_changes_its_mind_causes_no_needless_preemption(
    answers: tuple[bool, ...],
) -> None:
    """It is asked whether all three running requests are enough, then whether 1, 2 or 3 are."""
    all_are_enough, *are_enough = answers
    num_needed = are_enough.index(True) + 1 if all_are_enough and any(are_enough) else 0
    left = [all_are_enough, *are_enough[: num_needed or None]]  # then all of these are needed

    def batching(step: StepActions) -> None:
        if isinstance(step, StepBuilder):
            mixed(step)
        elif left and left.pop(0):
            step.admit()

    world = small_driver(
        queue="priority(preempts=True)", batching=batching, num_blocks=100, max_num_seqs=3
    )
    for id in "abc":
        world.add(id, 5, 20, priority=5)
    world.steps(2)
    world.add("high", 3, 2, priority=0)
    assert len(world.step().preempted) == num_needed


def test_nothing_is_preempted_for_a_request_that_cannot_start_in_this_step() -> None:
    """It was preempted itself, and a token of it is still in flight."""
    world = small_driver(queue="priority(preempts=True)", num_blocks=100, max_num_seqs=1)
    first = world.add("first", 5, 20, priority=3)
    world.step()
    plan = world.plan()  # in flight from now on
    world.scheduler.state.preempt(first)
    world.add("low", 4, 9, priority=5)
    assert world.plan().is_empty  # `first` waits for its token, and blocks the queue
    world.finish(plan)
    assert world.steps(1)[0].admitted == "first"


@pytest.mark.parametrize("batching", [batching.__name__ for batching in SLOTS["batching"]])
@pytest.mark.parametrize("chunk", ("whole", "split_first", "split_any", "at_most(3)"))
def test_the_tokens_counted_for_a_batching_rule_are_those_that_the_step_grants(
    batching: str, chunk: str
) -> None:
    num_admitted = num_refused = 0
    for seed in range(25):
        rng = random.Random(seed)
        budget = rng.randint(4, 24)
        world = small_driver(
            batching=batching, chunk=chunk, queue="fcfs", num_blocks=500, max_num_seqs=30,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        longest = budget - 1 if chunk == "whole" else 2 * budget
        for number in range(rng.randint(0, 6)):
            length = rng.randint(1, longest)
            most = max(1, budget - length) if chunk == "whole" else 30
            world.add(f"r{number}", length, rng.randint(1, most))
        for _ in range(20):
            world.step()
            if not world.scheduler.queue:
                break
        if world.scheduler.queue:
            continue
        state = world.scheduler.state
        computed = [r for r in world.requests.values() if r not in state.prefilling]
        cached = rng.choice([[], *(list(r.prompt) for r in computed)])[: longest - 1]
        new = world.add("new", [*cached, *range(rng.randint(1, longest - len(cached)))], 1)
        granted = TokenCount(new, state, set(), state.prefill_streak).num_granted
        if batching == "prefill_first_charge_cached":
            granted = min(granted or 0, state.view.num_uncached(new))
        plan = world.step()
        num_tokens = sum(c.end - c.start for c in plan.chunks if c.request is new)
        if plan.num_tokens == num_tokens and not granted:
            continue  # the step would have been empty: the first piece of work is forced
        assert num_tokens == (granted or 0), f"{seed=}"
        num_admitted, num_refused = num_admitted + bool(num_tokens), num_refused + (not num_tokens)
    assert num_admitted >= 3 and num_admitted + num_refused >= 10


def test_in_the_count_a_prompt_that_is_granted_nothing_is_not_the_first() -> None:
    def first_alone(num_wanted: int, num_left: int, is_first: bool) -> int:
        """Nothing for the last 20 tokens of a prompt; otherwise the first chunk of a step."""
        return 0 if num_wanted == 20 or not is_first else min(num_wanted, 10)

    world = small_driver(chunk=first_alone, queue="fcfs", num_blocks=100, max_num_batched_tokens=30)
    world.add("decoding", 4, 9)
    world.step()
    world.add("partial", 30, 2)
    world.step()
    new, state = world.add("new", 8, 2), world.scheduler.state
    assert TokenCount(new, state, set(), state.prefill_streak).num_granted == 8
    assert [(c.request.id, c.end) for c in world.step().chunks] == [("new", 8)]


def test_the_count_leaves_out_what_would_be_preempted() -> None:
    world = small_driver(
        batching="mixed", chunk="split_any", queue="fcfs", num_blocks=500, max_num_seqs=30,
        max_num_batched_tokens=12,
    )  # fmt: skip
    decoding = [world.add(f"d{number}", 1, 30) for number in range(3)]
    world.step()
    partial = world.add("p", 100, 3)
    world.step()
    new, state = world.add("new", 40, 3), world.scheduler.state
    for without, granted in (
        (set(), 0), ({partial}, 9), ({partial, decoding[0]}, 10), ({partial, *decoding}, 12),
        ({decoding[0]}, 0),
    ):  # fmt: skip
        assert TokenCount(new, state, without, 0).num_granted == granted
