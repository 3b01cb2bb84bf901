"""Measured costs of swaps and steps: rules that use them are right, and outputs do not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import chain, repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from headway import Engine, Plan, Scheduler, VirtualClock, preset
from headway.engine_setup import with_measured_costs
from headway.executor.cpu import CpuExecutor
from headway.executor.gpu import costs
from headway.executor.simulated import SimulatedExecutor, SimulatedHandle
from headway.lab.cost import Profile, load_profile
from headway.model.backends.plain import PlainBackend
from headway.model.config import from_hf
from headway.model.decoder import Decoder
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.plan import Chunk
from headway.request import Request, RequestParams
from headway.scheduler.policies.chunk import hold_tbt
from headway.scheduler.policies.draft import by_cost
from headway.scheduler.policies.presets import describe, slot
from headway.scheduler.policies.swap import swap_if_cheaper
from headway.step_cost import work_of
from tests.support.processes import printed_by

CONTEXTS = (256, 1024, 2048, 4096, 8192, 16384, 32768)
CONFIG = preset("headway", num_blocks=4096, num_host_blocks=4096, max_model_len=40960)


class Pretended(SimulatedExecutor):
    """Takes a profile's time for every plan, and `lag` more until copies to the host are done."""

    def __init__(self, profile: Profile, lag: float = 0.0) -> None:
        self.clock, self.lag = VirtualClock(), lag
        super().__init__(self.clock, profile.step_seconds)
        self.now = self.clock.now
        self.swapper = self

    def finish(self) -> None:
        self.clock.advance_to(self.clock.now() + self.lag)


class Alone:
    """A scheduler view in which requests share no blocks."""

    block_size = 16

    def num_private_blocks(self, request: Request) -> int:
        return -(-request.num_computed // 16)


def swaps(rule: swap_if_cheaper, num_tokens: int) -> bool:
    request = Request("a", [0] * num_tokens, RequestParams())
    request.computed_base = num_tokens
    view: Any = Alone()
    return rule(request, view)


H200 = load_profile("qwen3-0.6b-h200")
MACHINES = {
    "small model": H200,
    "slow copies": replace(H200, machine=replace(H200.machine, copy_bandwidth=2e10)),
    "very slow copies": replace(H200, machine=replace(H200.machine, copy_bandwidth=4e9)),
    "slow to start": replace(H200, machine=replace(H200.machine, copy_seconds=5e-3)),
    "slow passes": replace(H200, machine=replace(H200.machine, fixed_seconds=8e-3)),
    "8B": load_profile("llama3.1-8b-a100-80gb"),
    "70B": load_profile("llama3-70b-4xa100"),
}


@pytest.mark.parametrize("max_num_batched_tokens", [512, 8192])
@pytest.mark.parametrize("profile", MACHINES.values(), ids=MACHINES)
def test_the_measured_rule_picks_the_faster_way(
    profile: Profile, max_num_batched_tokens: int
) -> None:
    executor = Pretended(profile)
    config = replace(CONFIG, max_num_batched_tokens=max_num_batched_tokens)
    rule = swap_if_cheaper(*costs.measured(executor, config))
    for context in CONTEXTS:
        swapping = costs.swap_seconds(executor, context // 16) + costs.resume_seconds(
            executor, config, context
        )
        again = costs.recompute_seconds(executor, config, context)
        is_close = abs(swapping / again - 1) < 0.1
        assert is_close or swaps(rule, context) == (swapping < again), (context, swapping, again)


def test_the_choice_may_depend_on_the_length() -> None:
    """A rule without a cost for attention could not do this."""
    rule = swap_if_cheaper(*costs.measured(Pretended(H200), CONFIG))
    assert not swaps(rule, 256) and swaps(rule, 32768)
    assert rule.pair > 0 and not swaps(replace(rule, pair=0.0), 32768)


def test_the_measured_costs_are_those_of_plans() -> None:
    executor = Pretended(H200)
    blocks_back = costs.swap_seconds(executor, 64)
    assert blocks_back == pytest.approx(2 * H200.copy_seconds(1024))
    copy, start = costs._measure_copy(executor, CONFIG)
    assert copy == pytest.approx(H200.model.kv_bytes / H200.machine.copy_bandwidth)
    assert start == pytest.approx(H200.machine.copy_seconds)
    found = costs.measured(executor, CONFIG)
    assert found.copy == pytest.approx(copy) and found.start >= start
    added = H200.prefill_seconds(6000) - H200.prefill_seconds(3000)
    assert found.compute * 3000 + found.pair * 4500 * 3000 == pytest.approx(added, rel=0.05)


def test_a_copy_ends_when_the_host_has_it() -> None:
    late, lag = Pretended(H200, lag=1e-3), 1e-3
    assert costs.swap_seconds(late, 16) == pytest.approx(2 * H200.copy_seconds(256) + 2 * lag)
    assert costs._measure_copy(late, CONFIG)[1] == pytest.approx(H200.machine.copy_seconds + lag)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4096), (3, 2), (4096, 1)])
def test_the_smallest_caches_can_be_measured(sizes: tuple[int, int]) -> None:
    config = replace(CONFIG, num_blocks=sizes[0], num_host_blocks=sizes[1])
    assert all(number >= 0 for number in costs.measured(Pretended(H200), config))


def test_the_fit_finds_the_coefficients_and_none_is_negative() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        parts, times = random.normal(size=(3, 5)), random.exponential(size=3)
        assert costs.fit_nonnegative(parts, times @ parts) == pytest.approx(times)
        wholes = random.normal(size=5)
        found = np.array(costs.fit_nonnegative(parts, wholes))
        assert found.min() >= 0
        for part in range(3):  # a local optimum: no small change is better
            for other in (found[part] + 1e-3, max(0.0, found[part] - 1e-3)):
                changed = np.where(np.arange(3) == part, other, found)
                assert off(changed, parts, wholes) >= off(found, parts, wholes) - 1e-12


def off(times: Any, parts: Any, wholes: Any) -> float:
    return float(np.sum((times @ parts - wholes) ** 2))


def test_only_the_default_rule_is_replaced_and_only_with_host_blocks() -> None:
    executor, chosen = Pretended(H200), swap_if_cheaper(copy=1e-3)
    found = with_measured_costs(CONFIG, executor)
    assert found.swap != swap_if_cheaper() and replace(found, swap=swap_if_cheaper()) == CONFIG
    assert astuple(found.swap) == pytest.approx(costs.measured(executor, CONFIG))  # type: ignore[call-overload]
    assert preset(swap=describe(found)["swap"]).swap == found.swap  # as a trace writes it
    for other in (
        replace(CONFIG, swap=chosen), replace(CONFIG, num_host_blocks=0),
        preset("static", num_host_blocks=8),
    ):  # fmt: skip
        assert with_measured_costs(other, executor) == other
    assert costs.SwapCost._fields == tuple(swap_if_cheaper.__dataclass_fields__)


SMALL = replace(CONFIG, num_blocks=12, num_host_blocks=12, block_size=4, max_model_len=64,
                max_num_seqs=4, max_num_batched_tokens=24)  # fmt: skip


def on_cpu() -> CpuExecutor:
    return CpuExecutor(Decoder(checkpoint(), PlainBackend()), SMALL)


def on_device() -> Any:
    pytest.importorskip("triton")
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.backends.gpu import GpuBackend

    where = "cuda" if torch.cuda.is_available() else "cpu"
    return GpuExecutor(Decoder(checkpoint(), GpuBackend(torch.float32, where)), SMALL)


def checkpoint() -> DummyCheckpoint:
    return DummyCheckpoint(from_hf({
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }, "tiny"))  # fmt: skip


def outputs(executor: Any) -> list[list[int]]:
    engine, random = Engine(Scheduler(SMALL), executor, async_scheduling=1), Random(3)
    executor.now = engine.clock.now
    for number in range(2):
        prompt = [random.randrange(61) for _ in range(5 + 3 * number)]
        engine.add(str(number), prompt, RequestParams(max_tokens=3))
    requests = list(engine.scheduler.requests.values())
    engine.run()
    assert engine.fault is None, engine.fault
    return [list(request.output) for request in requests]


def test_recomputing_fills_the_blocks_of_all_tokens() -> None:
    torch.set_num_threads(1)
    executor = on_cpu()
    executor.device_blocks.zero_()
    costs.recompute_seconds(executor, SMALL, 30)
    is_used = executor.device_blocks.flatten(1).any(1).tolist()
    assert is_used == [True] * 8 + [False] * 4


@pytest.mark.parametrize(("chunk", "sizes"), [
    ("split_any", [24, 6]), ("at_most(9)", [9, 9, 9, 3]), ("whole", [24, 6]),
])  # fmt: skip
def test_prompts_are_split_as_the_scheduler_splits_them(chunk: str, sizes: list[int]) -> None:
    class Noting(Pretended):
        def launch(self, plan: Plan) -> SimulatedHandle:
            seen.extend(chunk.end - chunk.start for chunk in plan.chunks)
            return super().launch(plan)

    seen: list[int] = []
    costs.recompute_seconds(Noting(H200), replace(SMALL, chunk=slot("chunk", chunk)), 30)
    assert seen == sizes * costs.MIN_TRIES


@pytest.mark.parametrize("seconds", [
    [0.01], [3.0, 0.03, 0.01], [5.0, 0.4, 0.33, 0.33], [0.3, 0.3, 0.1], [30.0, 29.0], [0.03, 0.02, 0.015, 0.01],
])  # fmt: skip
def test_attempts_repeat_until_compiling_and_capturing_are_over(seconds: list[float]) -> None:
    tries = chain(seconds, repeat(seconds[-1]))
    assert costs._best_time(lambda: next(tries)) == seconds[-1]


def test_a_long_measurement_is_tried_twice() -> None:
    tries = iter([30.0, 30.0])
    assert costs._best_time(lambda: next(tries)) == 30.0


@pytest.mark.usefixtures("small_padding")
@pytest.mark.parametrize("make", [on_cpu, on_device])
def test_measuring_changes_no_output(make: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    executor: costs.Timed = make()
    times = costs.measured(executor, replace(SMALL, num_blocks=2))  # small, for the interpreter
    assert min(times) >= 0 and times.copy + times.start > 0
    assert outputs(executor) == outputs(make())


def test_the_benchmark_runs_on_a_tiny_model(tmp_path: Path) -> None:
    written, log = tmp_path / "out.json", tmp_path / "log.jsonl"
    options = ("--device", "cpu", "--tiny", "--out", str(written), "--log", str(log))
    printed = json.loads(printed_by("bench/gpu/schedule.py", *options))
    assert printed == json.loads(written.read_text())
    for found in printed["gaps"]:
        assert 0 < found["p50_gap_ms"] <= found["p99_gap_ms"] <= found["worst_gap_ms"]
        assert len(found["ttft_of_long_ms"]) == 2
    assert [row["tokens"] for found in printed["swap"] for row in found["rows"]] == [16, 256] * 2
    assert set(printed["profile"]["held_out"]) >= {"simulated", "ttft"}
    kinds = {json.loads(line)["kind"] for line in log.read_text().splitlines()}
    assert kinds == {"fitted", "held_out", "copies"}


NAMES = ("qwen3-0.6b-h200-headway", "llama3.1-8b-a100-80gb", "llama3-70b-4xa100")
ROOMY = preset("vllm_v1", num_blocks=4096, max_model_len=40960)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_num_batched_tokens", [512, 8192])
def test_the_measured_cost_predicts_mixed_steps(name: str, max_num_batched_tokens: int) -> None:
    profile, random = load_profile(name), Random(0)
    config = replace(ROOMY, max_num_batched_tokens=max_num_batched_tokens)
    found = costs.measured_step(Pretended(profile), config, 1.0)
    request = Request("a", [1], RequestParams())
    for _ in range(60):
        num_decodes, start = random.randrange(1, 64), random.choice([0, random.randrange(8000)])
        end = start + random.randrange(1, max_num_batched_tokens - 64)
        plan = Plan(0, decodes=[request] * num_decodes, decode_context=num_decodes * 800)
        plan.chunks = [Chunk(request, start, end, start, True)]
        assert found.seconds(*work_of(plan)) == pytest.approx(profile.step_seconds(plan), rel=0.2)


def test_a_default_rule_gets_the_measured_times_and_another_keeps_its_own() -> None:
    profile: Profile = load_profile(NAMES[0])
    found = with_measured_costs(replace(ROOMY, chunk=hold_tbt(0.02)), Pretended(profile)).chunk
    assert isinstance(found, hold_tbt) and found.seconds == 0.02 and not found.has_default_costs
    own = replace(ROOMY, chunk=hold_tbt(0.02, token=1e-6))
    assert with_measured_costs(own, Pretended(profile)) == own
    assert with_measured_costs(ROOMY, Pretended(profile)) == ROOMY


def test_without_a_device_to_copy_to_the_swap_rule_keeps_its_times() -> None:
    config = replace(
        ROOMY, chunk=hold_tbt(0.02), swap=swap_if_cheaper(), num_host_blocks=ROOMY.num_blocks
    )
    profile = load_profile(NAMES[0])
    found = with_measured_costs(config, Pretended(profile), has_swap=False)
    assert found.swap == swap_if_cheaper() and found.chunk != config.chunk
    assert with_measured_costs(config, Pretended(profile)).swap != swap_if_cheaper()


@pytest.mark.parametrize("seconds", [0.0, 0.004])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_rule_for_drafts_gets_the_time_that_verifying_adds(
    seconds: float, is_async: bool
) -> None:
    profile = load_profile(NAMES[0])

    class Slower(Pretended):
        def launch(self, plan: Plan) -> SimulatedHandle:
            chunks = [chunk._replace(is_last=False) for chunk in plan.chunks]  # samples nothing
            handle = super().launch(replace(plan, decodes=[], drafts=[], chunks=chunks))
            spent = profile.step_seconds(plan) + seconds * bool(plan.drafts)
            self.clock.advance_to(self.clock.now() + spent * bool(plan.decodes or plan.drafts))
            return handle

    config = replace(ROOMY, draft=by_cost(most=3))
    found = with_measured_costs(config, Slower(profile), is_async=is_async).draft
    assert isinstance(found, by_cost) and found.most == 3 and not found.has_default_costs
    assert found.verify == pytest.approx(seconds, abs=0.0003)
    own = replace(ROOMY, draft=by_cost(token=1e-6))
    assert with_measured_costs(own, Slower(profile)) == own


def test_measuring_drafts_changes_no_output() -> None:
    executor: Any = on_cpu()
    config = replace(SMALL, draft=by_cost())
    measured = with_measured_costs(config, executor, has_swap=False).draft
    assert isinstance(measured, by_cost) and measured.verify >= 0
    assert outputs(executor) == outputs(on_cpu())
