"""The measured cost of a step: hold_tbt with it keeps the target on the machine that was measured."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from headway.executor.gpu.costs import measured_step
from headway.lab.cost import Profile, load_profile
from headway.llm import with_measured_costs
from headway.plan import Chunk, Plan
from headway.request import Request, RequestParams
from headway.scheduler import preset
from headway.scheduler.policies.chunk import hold_tbt
from headway.scheduler.policies.swap import swap_if_cheaper
from headway.step_cost import work_of
from tests.executor.test_swap_cost import Pretended

NAMES = ("qwen3-0.6b-h200-headway", "llama3.1-8b-a100-80gb", "llama3-70b-4xa100")
CONFIG = preset("vllm_v1", num_blocks=4096, max_model_len=40960)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_num_batched_tokens", [512, 8192])
def test_the_measured_cost_predicts_mixed_steps(name: str, max_num_batched_tokens: int) -> None:
    profile, random = load_profile(name), Random(0)
    config = replace(CONFIG, max_num_batched_tokens=max_num_batched_tokens)
    costs = measured_step(Pretended(profile), config, 1.0)
    request = Request("a", [1], RequestParams())
    for _ in range(60):
        num_decodes, start = random.randrange(1, 64), random.choice([0, random.randrange(8000)])
        end = start + random.randrange(1, max_num_batched_tokens - 64)
        plan = Plan(0, decodes=[request] * num_decodes, decode_context=num_decodes * 800)
        plan.chunks = [Chunk(request, start, end, start, True)]
        assert costs.seconds(*work_of(plan)) == pytest.approx(profile.step_seconds(plan), rel=0.2)


def test_a_default_rule_gets_the_measured_times_and_another_keeps_its_own() -> None:
    profile: Profile = load_profile(NAMES[0])
    found = with_measured_costs(replace(CONFIG, chunk=hold_tbt(0.02)), Pretended(profile)).chunk
    assert isinstance(found, hold_tbt) and found.seconds == 0.02 and not found.has_default_costs
    own = replace(CONFIG, chunk=hold_tbt(0.02, token=1e-6))
    assert with_measured_costs(own, Pretended(profile)) == own
    assert with_measured_costs(CONFIG, Pretended(profile)) == CONFIG


def test_without_a_device_to_copy_to_the_swap_rule_keeps_its_times() -> None:
    config = replace(
        CONFIG, chunk=hold_tbt(0.02), swap=swap_if_cheaper(), num_host_blocks=CONFIG.num_blocks
    )
    profile = load_profile(NAMES[0])
    found = with_measured_costs(config, Pretended(profile), has_swap=False)
    assert found.swap == swap_if_cheaper() and found.chunk != config.chunk
    assert with_measured_costs(config, Pretended(profile)).swap != swap_if_cheaper()
