"""Laws of the chunk rule hold_tbt: steps keep their target, prompts always advance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.errors import ConfigError, PolicyError
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate, with_profile
from headway.lab.summary import Summary, summarize
from headway.lab.workload.synthetic import parse_synthetic
from headway.plan import Chunk, Plan
from headway.request import Request, RequestParams
from headway.scheduler.policies.chunk import hold_tbt
from headway.scheduler.policies.presets import describe, preset
from headway.step_cost import StepWork, UnitCosts, work_of
from tests.support.drive import small_driver
from tests.support.events import Events

PROFILE = load_profile("llama3.1-8b-a100-80gb")
WORKLOADS = {
    "chat": "requests=60,arrivals=poisson(8),prompt=lognormal(900,1.0),output=lognormal(80,0.6)",
    "long prompts": "requests=30,arrivals=poisson(2),prompt=lognormal(5000,0.7),output=uniform(20,90)",
    "short": "requests=80,arrivals=poisson(25),prompt=uniform(20,500),output=lognormal(60,0.6)",
}
each_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def run(workload: str, chunk: str, observers: Any = (), **changes: Any) -> Summary:
    config = preset("vllm_v1", chunk=chunk, num_blocks=PROFILE.num_blocks(16), **changes)
    requests = parse_synthetic(workload).generate()
    return summarize(simulate(requests, config, PROFILE, observers=observers).metrics)


@each_workload
@pytest.mark.parametrize("target", [0.03, 0.1])
def test_no_stall_exceeds_the_target_and_the_longest_is_near_it(
    workload: str, target: float
) -> None:
    stalls = run(workload, f"hold_tbt({target})")["longest_stall"]
    assert 0.95 * target < stalls["max"] <= target + 1e-9
    assert run(workload, "split_any")["longest_stall"]["max"] > 1.1 * target


@each_workload
def test_first_tokens_come_earlier_than_with_a_fixed_budget_of_the_same_stall(
    workload: str,
) -> None:
    held = run(workload, "hold_tbt(0.05)")
    low, high = 16, 2048  # the largest fixed budget that keeps the target as well
    while high - low > 8:
        middle = (low + high) // 2
        fixed = run(workload, "split_any", max_num_batched_tokens=middle)
        keeps = fixed["longest_stall"]["max"] <= 0.05
        low, high = (middle, high) if keeps else (low, middle)
    fixed = run(workload, "split_any", max_num_batched_tokens=low)
    assert fixed["longest_stall"]["max"] <= 0.05
    assert held["ttft"]["mean"] < fixed["ttft"]["mean"]
    assert held["ttft"]["p99"] < 1.05 * fixed["ttft"]["p99"]


def test_a_target_below_the_decodes_still_computes_a_block_in_every_step() -> None:
    events = Events()
    summary = run(WORKLOADS["chat"], "hold_tbt(0.001)", observers=[events])
    chunks = [plan.num_prefill for plan in events.plans if plan.decodes and plan.chunks]
    assert summary["completed"] == 60
    assert chunks and max(chunks) == 16


def test_without_decodes_a_prompt_has_the_whole_budget() -> None:
    driver = small_driver("vllm_v1", chunk="hold_tbt(0.0)", num_blocks=32, max_num_batched_tokens=8)
    driver.add("a", 20, 3)
    assert driver.steps(1)[0].chunks == (("a", 0, 8),)
    driver.run()


@pytest.mark.parametrize("start", [0, 700, 5000])
def test_it_grants_the_most_tokens_that_fit(start: int) -> None:
    rule = PROFILE.with_costs(hold_tbt(0.04))
    request = Request("a", [1], RequestParams())
    plan = Plan(0, decodes=[request] * 40, decode_context=40_000)
    plan.chunks = [Chunk(request, 100, 150, 100, False)]
    most = rule.most_tokens(10_000, work_of(plan), start)
    assert 0 < most < 10_000

    def seconds(count: int) -> float:
        more = replace(
            plan, chunks=[*plan.chunks, Chunk(request, start, start + count, start, True)]
        )
        return PROFILE.step_seconds(more) + PROFILE.machine.host_seconds

    assert seconds(most) <= 0.04 < seconds(most + 1)
    assert rule.most_tokens(most - 1, work_of(plan), start) == most - 1


def test_costs_come_from_the_profile_unless_they_are_given() -> None:
    given = with_profile(preset("vllm_v1", chunk="hold_tbt(0.2)"), PROFILE).chunk
    assert isinstance(given, hold_tbt) and given.seconds == 0.2
    expected = PROFILE.unit_costs._replace(
        fixed=PROFILE.unit_costs.fixed + PROFILE.machine.host_seconds
    )
    assert UnitCosts(*(getattr(given, name) for name in UnitCosts._fields)) == expected
    own = preset("vllm_v1", chunk="hold_tbt(0.2, token=1e-3)")
    assert with_profile(own, PROFILE).chunk == own.chunk
    # A trace's header has the costs, so that a replay decides the same.
    written = with_profile(preset("vllm_v1", chunk="hold_tbt(0.2)"), PROFILE)
    assert preset(**describe(written)) == written  # type: ignore[arg-type]


def test_a_wrong_number_or_a_failing_rule_is_named() -> None:
    with pytest.raises(ConfigError, match="hold_tbt: seconds .*-1"):
        preset("vllm_v1", chunk="hold_tbt(-1)")
    driver = small_driver("vllm_v1", chunk=Failing(), num_blocks=32)
    driver.add("a", 4, 3)
    driver.steps(1)
    driver.add("b", 4, 3)
    with pytest.raises(PolicyError, match="most_tokens"):
        driver.steps(1)


@pytest.mark.parametrize("most", [-1000, -1, 0, 3])
def test_a_rule_of_a_user_that_allows_less_than_nothing_allows_nothing(most: int) -> None:
    """The first prompt of a step still gets a block; for the second one nothing is left."""

    class Allowing(Failing):
        def most_tokens(self, want: int, work: StepWork, start: int) -> int:
            return most

    driver = small_driver("vllm_v1", chunk=Allowing(), num_blocks=32)
    driver.add("a", 4, 3)
    driver.steps(1)
    for id in "bc":
        driver.add(id, 9, 3)
    plan = driver.step()
    chunks = {"b": 4, **({"c": most} if most > 0 else {})}
    assert {c.request.id: c.end for c in plan.chunks} == chunks
    assert [(b.request.id, b.have) for b in plan.blocked] == ([] if most > 0 else [("c", 0)])


class Failing:
    def __call__(self, want: int, left: int, is_first: bool) -> int:
        return min(want, left)

    def most_tokens(self, want: int, work: StepWork, start: int) -> int:
        raise ValueError("no")
