"""Laws of the cost model: more work never takes less time, a faster machine never takes more."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.scheduler.quality import nano_vllm_workload
from headway.errors import ConfigError, FormatError
from headway.lab.cost import Profile, known_profiles, load_profile, save_profile
from headway.plan import Chunk, Copy, Plan
from headway.request import Request, RequestParams

REQUEST = Request("a", [1], RequestParams())
PROFILES = [load_profile(name) for name in known_profiles()]
each_profile = pytest.mark.parametrize("profile", PROFILES, ids=known_profiles())


def decode(rows: int, context: int, **more: Any) -> Plan:
    return Plan(0, decodes=[REQUEST] * rows, decode_context=context, **more)


def prefill(*bounds: tuple[int, int]) -> Plan:
    return Plan(0, chunks=[Chunk(REQUEST, a, b, a, False) for a, b in bounds])


def random_plan(random: Random) -> Plan:
    rows = random.randrange(300)
    plan = decode(rows, rows * random.randrange(1, 5000), num_steps=random.choice([1, 1, 4]))
    for _ in range(random.randrange(4)):
        start = random.choice([0, random.randrange(5000)])
        plan.chunks.append(
            Chunk(REQUEST, start, start + random.randrange(1, 5000), start, random.random() < 0.5)
        )
    plan.copies_out = [Copy(0, 0)] * random.randrange(3)
    plan.copies_in = [Copy(0, 0)] * random.randrange(3)
    return plan


@each_profile
def test_more_work_never_takes_less_time(profile: Profile) -> None:
    random = Random(0)
    for _ in range(300):
        plan = random_plan(random)
        before = profile.step_seconds(plan)
        change = random.randrange(5)
        if change == 0:
            plan.decode_context += 10_000
        elif change == 1:
            plan.decodes.append(REQUEST)
        elif change == 2:
            plan.chunks.append(Chunk(REQUEST, 5, 600, 5, True))
        elif change == 3:
            plan.copies_in.append(Copy(0, 0))
        else:
            plan.num_steps += 1
        assert profile.step_seconds(plan) >= before


@each_profile
def test_decoding_takes_longer_the_longer_the_contexts(profile: Profile) -> None:
    times = [profile.step_seconds(decode(256, 256 * n)) for n in (500, 1000, 2000, 4000)]
    assert times == sorted(set(times))


@each_profile
def test_splitting_a_prompt_never_makes_it_cheaper(profile: Profile) -> None:
    random = Random(1)
    for _ in range(200):
        length = random.randrange(2, 20_000)
        cuts = sorted(
            {0, length, *(random.randrange(1, length) for _ in range(random.randrange(6)))}
        )
        parts = [profile.step_seconds(prefill(part)) for part in pairwise(cuts)]
        whole = profile.step_seconds(prefill((0, length)))
        assert sum(parts) >= whole * (1 - 1e-9)
        assert len(parts) == 1 or sum(parts) > whole


@each_profile
def test_a_batch_never_costs_more_than_its_parts_alone(profile: Profile) -> None:
    alone = [prefill((0, 700)), prefill((512, 900)), decode(8, 9000), decode(1, 50)]
    together = decode(9, 9050)
    together.chunks = [*alone[0].chunks, *alone[1].chunks]
    assert profile.step_seconds(together) < sum(map(profile.step_seconds, alone))


@each_profile
@pytest.mark.parametrize("better", [
    "bandwidth", "bandwidth_share", "flops", "flops_share", "copy_bandwidth",
])  # fmt: skip
def test_a_faster_machine_never_takes_longer(profile: Profile, better: str) -> None:
    faster = {better: getattr(profile.machine, better) * 1.3}
    improved = replace(profile, machine=replace(profile.machine, **faster))
    random = Random(2)
    pairs = [
        (profile.step_seconds(p), improved.step_seconds(p))
        for p in map(random_plan, [random] * 200)
    ]
    assert all(after <= before for before, after in pairs)
    assert any(after < before for before, after in pairs)


@each_profile
def test_several_steps_in_one_plan_cost_the_same_as_one_by_one(profile: Profile) -> None:
    one_by_one = sum(profile.step_seconds(decode(40, 40_000 + 40 * i)) for i in range(8))
    assert profile.step_seconds(decode(40, 40_000, num_steps=8)) == pytest.approx(one_by_one)


@each_profile
def test_copies_cost_their_bytes_and_an_empty_plan_nothing(profile: Profile) -> None:
    plan = Plan(0, copies_out=[Copy(0, 0)] * 5, copies_in=[Copy(0, 0)] * 3)
    assert profile.step_seconds(Plan(0)) == 0
    for size in (16, 256):
        expected = profile.copy_seconds(5 * size) + profile.copy_seconds(3 * size)
        assert profile.step_seconds(plan, size) == pytest.approx(expected)


@each_profile
def test_prefill_time_is_the_time_of_a_step_with_the_whole_prompt(profile: Profile) -> None:
    plan = Plan(0, chunks=[Chunk(REQUEST, 0, 3000, 0, True)])
    assert profile.prefill_seconds(3000) == pytest.approx(profile.step_seconds(plan))


@each_profile
def test_the_swap_rule_has_the_times_of_its_profile(profile: Profile) -> None:
    rule = profile.swap_if_cheaper()
    assert rule.start + rule.copy * 2048 == pytest.approx(profile.copy_seconds(2048))
    added = profile.prefill_seconds(32768) - profile.prefill_seconds(2048)
    pairs = (32768**2 - 2048**2) / 2
    assert rule.compute * (32768 - 2048) + rule.pair * pairs == pytest.approx(added, rel=0.01)


def test_all_reduces_add_their_latency_to_a_pass_and_their_data_to_a_token() -> None:
    profile = load_profile("llama3-70b-4xa100")
    model, machine = profile.model, profile.machine
    alone = replace(profile, machine=replace(machine, link_bandwidth=0.0, link_seconds=0.0))
    latency = model.all_reduces * machine.link_seconds
    data = 2 * 3 / 4 * model.all_reduces * model.all_reduce_bytes / machine.link_bandwidth
    for rows, tokens in ((1, 0), (64, 0), (0, 4096), (64, 512)):
        plan = decode(rows, rows * 1000)
        plan.chunks = prefill((0, tokens)).chunks if tokens else []
        added = profile.step_seconds(plan) - alone.step_seconds(plan)
        assert added == pytest.approx(latency + (rows + tokens) * data)
    slower = replace(profile, machine=replace(machine, link_bandwidth=machine.link_bandwidth / 2))
    assert slower.unit_costs.exchange == pytest.approx(2 * profile.unit_costs.exchange)


def test_a_pass_reads_the_experts_that_its_tokens_use(tmp_path: Path) -> None:
    dense = load_profile("llama3.1-8b-a100-80gb")
    model = replace(dense.model, dense_flops=1.0, expert_bytes=6e10, chosen_share=1 / 16)
    profile = replace(dense, model=model, machine=replace(dense.machine, overlap=1.0))
    without = replace(profile, model=replace(model, expert_bytes=0.0))
    bandwidth = dense.machine.bandwidth * dense.machine.bandwidth_share
    for tokens, share in ((1, 1 / 16), (2, 1 - (15 / 16) ** 2), (32, 0.8732), (4096, 1.0)):
        added = profile.pass_seconds(tokens, 1, 0, 0) - without.pass_seconds(tokens, 1, 0, 0)
        assert added == pytest.approx(share * 6e10 / bandwidth, rel=1e-3)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def test_one_device_exchanges_nothing() -> None:
    profile = load_profile("llama3.1-8b-a100-80gb")
    assert profile.machine.link_bandwidth > 0 and profile.unit_costs.exchange == 0.0
    assert profile.unit_costs.fixed == profile.machine.fixed_seconds


@each_profile
def test_a_profile_says_where_it_comes_from_and_how_far_off_it_may_be(profile: Profile) -> None:
    assert profile.source in ("measured", "data_sheet")
    said = profile.accuracy()
    assert said.endswith(".") and "\n" not in said
    for name, error in profile.held_out.items():
        assert f"{error:.1%}" in said, name
    if profile.source == "data_sheet":
        assert "3 to 17%" in said and "never measured" in said
    assert "40%" in replace(profile, source="carried", held_out={}).accuracy()


def test_a_profile_file_keeps_source_and_errors_and_old_files_stay_valid(tmp_path: Path) -> None:
    profile = load_profile("qwen3-0.6b-h200-headway")
    path = tmp_path / "p.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    values = json.loads(path.read_text())
    for change, named in (
        ({"source": "guessed"}, "source .*guessed"),
        ({"held_out": {"mean": 0.1}}, "held_out .*mean"),
        ({"held_out": {"p90": "a"}}, "held_out.p90"),
    ):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(FormatError, match=named):
            load_profile(path)
    del values["source"], values["held_out"]
    path.write_text(json.dumps(values))
    old = load_profile(path)
    assert old.step_seconds(decode(8, 100)) == profile.step_seconds(decode(8, 100))
    assert "unknown origin" in old.accuracy()


def test_keys_and_values_travel_over_the_link_or_through_the_hosts() -> None:
    profile = load_profile("llama3.1-8b-a100-80gb")
    model, machine = profile.model, profile.machine
    data = 1000 * model.kv_bytes
    linked = machine.link_seconds + data / machine.link_bandwidth
    assert profile.transfer_seconds(1000) == pytest.approx(linked)
    through_hosts = replace(profile, machine=replace(machine, link_bandwidth=0.0))
    assert through_hosts.transfer_seconds(1000) == 2 * profile.copy_seconds(1000)


def test_a_large_model_is_cheaper_to_copy_than_to_recompute() -> None:
    rule = load_profile("llama3-70b-4xa100").swap_if_cheaper()
    assert 20 * (rule.start + rule.copy * 2048) < rule.compute * 2048


def nano_vllm_seconds(profile: Profile, budget: int) -> float:
    """Time of nano-vLLM's workload without limit on running requests: prompts first, then decodes."""
    waiting = [(j.num_prompt, j.num_output) for j in reversed(nano_vllm_workload())]
    running: list[tuple[int, int]] = []  # context, tokens left
    seconds = 0.0
    while waiting or running:
        plan = decode(len(running), sum(context for context, _ in running))
        running = [(context + 1, left - 1) for context, left in running if left > 1]
        while waiting and plan.num_tokens + waiting[-1][0] <= budget:
            length, output = waiting.pop()
            plan.chunks.append(Chunk(REQUEST, 0, length, 0, True))
            running.append((length + 1, output - 1))
        seconds += profile.step_seconds(plan)
    return seconds


def test_the_h200_profile_reproduces_its_calibration() -> None:
    profile = load_profile("qwen3-0.6b-h200")
    assert profile.step_seconds(decode(1, 1000)) == pytest.approx(2.36e-3, rel=0.02)
    assert 5.9 < nano_vllm_seconds(profile, budget=16_384) < 6.3


@each_profile
def test_a_profile_written_and_read_is_the_same(profile: Profile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert load_profile(profile.name) == profile
    assert profile.num_blocks(16) * 16 <= profile.kv_tokens < (profile.num_blocks(16) + 1) * 16


def test_an_unknown_profile_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="abacus.*qwen3-0.6b-h200"):
        load_profile("abacus")


@pytest.mark.parametrize(("part", "field", "value", "problem"), [
    ("machine", "bandwidth", None, "missing.* machine.bandwidth"),
    ("machine", "bandwidth", 0, "machine.bandwidth .* above 0, not 0"),
    ("machine", "flops", "fast", "machine.flops .* above 0"),
    ("machine", "flops_share", 1.5, "machine.flops_share must be .* at most 1"),
    ("model", "max_model_len", 8.5, "model.max_model_len .* whole"),
    ("model", "layers", 3, "model.layers; known: weight"),
])  # fmt: skip
def test_an_invalid_profile_is_rejected_with_its_field(
    tmp_path: Path, part: str, field: str, value: object, problem: str
) -> None:
    values = asdict(PROFILES[0])
    values[part][field] = value
    if value is None:
        del values[part][field]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(values))
    with pytest.raises(FormatError, match=problem):
        load_profile(path)


def test_a_file_without_a_profile_is_rejected(tmp_path: Path) -> None:
    for text, problem in (("{\n,", "p.json:2: not JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(FormatError, match=problem):
            load_profile(tmp_path / "p.json")
    with pytest.raises(FormatError, match="No such file"):
        load_profile(tmp_path / "none.json")
