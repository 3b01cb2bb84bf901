"""Laws of preemption for priority: whatever the budget and the recipe, a high priority waits little."""

from __future__ import annotations

from typing import Any

import pytest

from headway.config import StepActions
from headway.scheduler import policies
from headway.scheduler.presets import SLOTS
from tests.support.drive import Drive

NUM_LOW = 4
MAX_WAIT = 3  # steps: one in which decodes have their turn, and one to spare
RECIPES = [recipe.__name__ for recipe in SLOTS["recipe"]]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def prefill_last(step: StepActions) -> None:
    """A recipe of a user: mixed, with new requests before prompts that were begun."""
    step.decode()
    step.admit()
    step.prefill()


def world_of(recipe: Any, chunk: str, budget: int, **changes: Any) -> Drive:
    """As many requests of a low priority as fit, decoding; all rows are taken."""
    defers = recipe == "charged_in_full"
    numbers = {"max_num_seqs": NUM_LOW if defers else min(NUM_LOW, budget), "num_blocks": 400}
    slots = {"recipe": recipe, "chunk": chunk, "queue": "priority(preempts=True)"}
    world = Drive("vllm_v1", **{**numbers, **slots, "max_num_batched_tokens": budget, **changes})
    num_output = budget if chunk == "whole" else 200
    for number in range(world.scheduler.config.max_num_seqs):
        world.add(f"low{number}", [number], num_output, priority=5)
    return world


def settle(world: Drive) -> None:
    """Run until all decode, and two steps more: no recipe is still filling its batch."""
    while world.scheduler.queue or world.scheduler.state.prefilling:
        world.step()
    for _ in range(2):
        world.step()


def num_steps_waiting(world: Drive, id: str, most: int = 100) -> int:
    """Steps until the request is admitted."""
    request = world.requests[id]
    for count in range(most):
        if request.history.admission >= 0:
            return count
        world.step()
    return most


@each_recipe
@pytest.mark.parametrize("chunk", ["split_any", "split_first", "at_most(2)"])
def test_a_high_priority_waits_a_few_steps_whatever_the_budget(recipe: str, chunk: str) -> None:
    for budget in range(1, 8 * NUM_LOW + 1):
        for num_prompt in (1, 6, 40):
            world = world_of(recipe, chunk, budget)
            settle(world)
            world.add("high", range(100, 100 + num_prompt), 2, priority=0)
            assert num_steps_waiting(world, "high") <= MAX_WAIT, f"{budget=} {num_prompt=}"
            bumps = [
                request.history.num_priority_preemptions for request in world.requests.values()
            ]
            assert max(bumps) == 1 and (recipe == "static" or sum(bumps) == 1)
    world.run()
    world.check_empty()


@each_recipe
def test_a_prompt_that_may_not_be_cut_does_not_wait_either(recipe: str) -> None:
    for budget in range(16, 8 * NUM_LOW + 1):
        for num_prompt in (1, budget // 2, budget - 2):
            world = world_of(recipe, "whole", budget)
            settle(world)
            world.add("high", range(100, 100 + num_prompt), 2, priority=0)
            assert num_steps_waiting(world, "high") <= MAX_WAIT, f"{budget=} {num_prompt=}"
            world.run()
            world.check_empty()


def test_recipes_that_do_not_mix_preempt_one_where_one_is_enough() -> None:
    """Decodes take nothing of a budget that they never share with a prompt."""
    for recipe in ("prefill_first", "charged_in_full"):
        world = world_of(recipe, "whole", 32)
        settle(world)
        world.add("high", range(100, 130), 2, priority=0)
        assert world.steps(1)[0].preempted.count("low") == 1


def test_recipes_that_mix_preempt_as_many_as_an_uncut_prompt_needs() -> None:
    world = world_of("mixed", "whole", 32)
    settle(world)
    world.add("high", range(100, 130), 2, priority=0)  # 30 of 32 tokens: two decodes fit beside it
    row = world.steps(1)[0]
    assert row.preempted.count("low") == 2 and row.admitted == "high"


def test_a_begun_prompt_of_a_low_priority_gives_way() -> None:
    world = Drive(
        "vllm_v1", queue="priority(preempts=True)", max_num_batched_tokens=8, max_num_seqs=8, num_blocks=400,
        victim="least_work",
    )  # fmt: skip
    for number in range(3):
        world.add(f"low{number}", [number], 50, priority=5)
    world.step()
    world.add("long", range(1000, 1400), 2, priority=5)  # 5 tokens a step beside three decodes
    world.steps(4)
    world.add("high", range(100, 104), 2, priority=0)
    row = world.steps(1)[0]
    assert row.admitted == "high" and row.preempted == "long"  # no decode has to go for it
    world.run()
    world.check_empty()
    assert world.requests["long"].history.num_priority_preemptions == 1


@each_recipe
def test_nothing_is_preempted_for_equals_or_where_there_is_room(recipe: str) -> None:
    world = world_of(recipe, "split_any", 16)
    settle(world)
    world.add("equal", [100], 2, priority=5)
    world.steps(3)
    assert not any(r.history.num_priority_preemptions for r in world.requests.values())
    world = world_of(recipe, "split_any", 16, max_num_seqs=NUM_LOW)
    world.scheduler.abort("low0")
    if recipe != "static":  # which admits nothing beside decodes, so it needs the whole batch
        settle(world)
        world.add("high", [100], 2, priority=0)
        assert num_steps_waiting(world, "high") <= MAX_WAIT
        assert not any(r.history.num_priority_preemptions for r in world.requests.values())


@each_recipe
@pytest.mark.parametrize("chunk", ["whole", "split_any"])
def test_a_stream_of_high_priorities_preempts_a_bounded_number_of_times(
    recipe: str, chunk: str
) -> None:
    for budget in (16, 20):
        world = world_of(recipe, chunk, budget)
        settle(world)
        for number in range(40):
            world.add(f"high{number}", [100 + number], 3, priority=0)
            world.step()
        world.run()
        world.check_empty()
        bumps = [r.history.num_priority_preemptions for r in world.requests.values()]
        assert 1 <= max(bumps) <= 2  # what the rule allows by default


def test_a_recipe_of_a_user_is_asked_like_a_ready_made_one() -> None:
    for budget in (NUM_LOW, NUM_LOW + 1, 32):
        world = world_of(prefill_last, "split_any", budget)
        settle(world)
        world.add("high", range(100, 110), 2, priority=0)
        assert num_steps_waiting(world, "high") <= MAX_WAIT


def test_the_turn_of_the_decodes_costs_a_step_and_not_the_whole_batch() -> None:
    """After 16 prompt steps prefill_first decodes: that is waited for."""
    world = world_of("prefill_first", "split_any", 8, max_num_seqs=NUM_LOW + 1)
    settle(world)
    world.add("long", range(1000, 1400), 20, priority=0)
    world.steps(policies.MAX_PREFILL_STEPS)
    assert world.scheduler.state.prefill_streak == policies.MAX_PREFILL_STEPS
    world.add("high", [100], 2, priority=-1)
    row = world.steps(1)[0]
    assert row.preempted == "" and row.decodes
    assert num_steps_waiting(world, "high") <= MAX_WAIT
    bumps = [r.history.num_priority_preemptions for r in world.requests.values()]
    assert sum(bumps) == 2  # one for the long prompt before, one for this
