"""Laws of fitting: a log determines its machine despite noise, or the error says what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from headway.errors import ConfigError, FormatError
from headway.events import Completed, Event, Planned
from headway.executor.simulated import Script
from headway.lab.cost import Machine, Model, Profile, load_profile, save_profile
from headway.lab.profiling import calibration
from headway.lab.profiling.fit import RATES, Fit, fit, missing_coverage, observations, predict
from headway.lab.profiling.minimize import minimize
from headway.lab.simulate import SimulatedEngine, simulate
from headway.lab.workload.recorded import added_in
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.plan import Chunk, Copy, Draft, Plan, StepResult
from headway.record.lines import CompletedLine, Line, PlannedLine
from headway.record.writer import LineMaker
from headway.request import Request, RequestParams
from headway.scheduler import preset

REQUEST = Request("a", [1], RequestParams())
CONFIG = preset(
    "headway", max_num_seqs=32, max_num_batched_tokens=512, num_blocks=2000, max_model_len=8192
)
SMALL = Model(
    weight_bytes=5.4e8, kv_bytes=46_080, dense_flops=2.1e8, attention_flops=69_120,
    head_flops=5.7e7, max_model_len=8192,
)  # fmt: skip
SLOW = Machine(
    bandwidth=1.4e10, bandwidth_share=1.0, flops=1e11, flops_share=1.0, fixed_seconds=6e-3,
    attention_seconds=1e-3, host_seconds=4e-4, copy_bandwidth=8e9, copy_seconds=3e-5, overlap=0.4,
)  # fmt: skip
MACHINES = {
    "no overlap": replace(SLOW, overlap=0.0),
    "partial overlap": SLOW,
    "full overlap": replace(SLOW, overlap=1.0),
    "long fixed time": replace(SLOW, fixed_seconds=0.08),
    "low bandwidth": replace(SLOW, bandwidth=1.5e9),
    "slow arithmetic": replace(SLOW, flops=1.2e10),
    "slower with prompts": replace(SLOW, prompt_seconds=0.02),
}
Lengths = list[tuple[int, int]]
MAKER = LineMaker()


def profile_of(machine: Machine, model: Model = SMALL) -> Profile:
    return Profile(name="made", description="", kv_tokens=32_000, model=model, machine=machine)


def log_of(
    profile: Profile,
    waves: Sequence[calibration.Wave | Lengths],
    async_scheduling: int = 0,
    **changes: Any,
) -> list[Line]:
    """The log of these waves on the profile's machine."""
    lines: list[Line] = []
    for number, wave in enumerate(waves):
        space = TokenSpace()
        lengths, most = wave if isinstance(wave, calibration.Wave) else (wave, len(wave))
        requests = [
            WorkloadRequest(id=f"{number}.{i}", pieces=(space.take(a),), num_output=b, max_tokens=b)
            for i, (a, b) in enumerate(lengths)
        ]
        config = replace(CONFIG, **changes)
        config = replace(config, max_num_seqs=min(config.max_num_seqs, most))
        simulate(
            requests, config, profile, async_scheduling=async_scheduling,
            observers=[lambda event: lines.append(MAKER.line(event))],
        )  # fmt: skip
    return lines


def with_times(lines: list[Line], seconds: Callable[[PlannedLine, float], float]) -> list[Line]:
    """The log of a run without async scheduling with other durations, given plan and duration."""
    found, plan = list[Line](), None
    for line in lines:
        if isinstance(line, PlannedLine):
            plan = line
        elif isinstance(line, CompletedLine):
            assert plan is not None and plan.step == line.step
            end = line.start + seconds(plan, line.end - line.start)
            line = structs.replace(line, end=end)
        found.append(line)
    return found


def disturbed(lines: list[Line], noise: float, slow: float, seed: int = 0) -> list[Line]:
    """The log with noise on every step and a share of steps two to three times as slow."""
    random = Random(seed)

    def seconds(_: PlannedLine, before: float) -> float:
        times = random.lognormvariate(0, noise)
        return before * times * (random.uniform(2, 3) if random.random() < slow else 1)

    return with_times(lines, seconds)


@cache
def logs(profile: Profile, **changes: Any) -> tuple[list[Line], list[Line]]:
    """The fitted and the held-out log of a calibration on the profile's machine."""
    work = calibration.make_calibration(2048)
    return (
        log_of(profile, work.before + work.after, **changes),
        log_of(profile, [work.held_out], **changes),
    )


@cache
def fitted(profile: Profile) -> Machine:
    """The machine fitted to the clean log of a calibration."""
    return fit(observations(logs(profile)[0]), profile.model).machine


def step_errors(fitted: Machine, profile: Profile, lines: list[Line]) -> np.ndarray[Any, Any]:
    seen = observations(lines)
    after = replace(profile, machine=fitted)
    return np.abs(predict(after, seen) / predict(profile, seen) - 1)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_fit_to_a_clean_log_predicts_another_run_within_one_percent(machine: Machine) -> None:
    profile = profile_of(machine)
    found = fitted(profile)
    off = step_errors(found, profile, logs(profile)[1])
    assert np.median(off) < 0.01 and off.max() < 0.05
    assert found.host_seconds == pytest.approx(machine.host_seconds)


@pytest.mark.parametrize("seed", range(2))
def test_the_time_of_experts_is_found_despite_noise_for_any_number_of_rows(seed: int) -> None:
    experts = replace(SMALL, weight_bytes=1e8, expert_bytes=6e9, chosen_share=1 / 16)
    profile = profile_of(SLOW, experts)
    seen = observations(disturbed(logs(profile)[0], noise=0.05, slow=0.05, seed=seed))
    found = replace(profile, machine=fit(seen, experts).machine)
    tokens, samples, *_ = seen.columns
    fitted_rows = set(tokens[tokens == samples].tolist())
    for rows in set(range(1, 65)) - fitted_rows:
        for context in (50, 500):
            work = (rows, rows, rows * context, rows * context)
            expected = profile.pass_seconds(*work)
            assert found.pass_seconds(*work) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_noise_and_slow_steps_hardly_change_predictions(seed: int) -> None:
    profile = profile_of(SLOW)
    lines, held_out = logs(profile)
    found, _ = fit(observations(disturbed(lines, noise=0.1, slow=0.1, seed=seed)), SMALL)
    off = step_errors(found, profile, held_out)
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.1


def test_the_profile_of_a_gpu_is_recovered() -> None:
    profile = load_profile("qwen3-0.6b-h200")
    off = step_errors(fitted(profile), profile, logs(profile)[1])
    assert np.median(off) < 0.01 and off.max() < 0.05


def test_plans_of_several_steps_are_fitted_as_well() -> None:
    profile = profile_of(SLOW)
    lines, held_out = logs(profile, num_scheduler_steps=4)
    assert any(isinstance(line, PlannedLine) and line.num_steps > 1 for line in lines)
    found = fit(observations(lines), SMALL).machine
    assert np.median(step_errors(found, profile, held_out)) < 0.01


@pytest.mark.parametrize("seed", range(2))
def test_no_number_is_negative_and_every_profile_can_be_read_again(
    seed: int, tmp_path: Path
) -> None:
    """Even for random step times, which no machine could produce."""
    random = Random(seed)
    clean, held_out = logs(profile_of(SLOW))
    lines = with_times(clean, lambda *_: random.lognormvariate(-3, 2))
    machine = fit(observations(lines), SMALL).machine
    corrections = machine.corrections
    assert all(0.5 <= factor <= 2 for _, factor in corrections)
    values = asdict(replace(machine, corrections=())).values()
    assert all(0 <= value < np.inf for value in values if value != ())
    assert machine.bandwidth > 0 and machine.flops > 0 and machine.overlap <= 1
    save_profile(profile_of(machine), tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again == profile_of(machine)
    assert len(simulate(calibration.requests_of(held_out), CONFIG, again).metrics.requests) == len(
        calibration.requests_of(held_out)
    )


def test_the_rest_of_a_continued_request_is_compared_with_a_simulation() -> None:
    """Its log has one prefill of all known tokens, and then the tokens that were left."""
    prompt, before = list(range(300)), [7] * 90
    profile, lines = profile_of(SLOW), list[Line]()
    simulated = SimulatedEngine(
        CONFIG, profile, observers=[lambda event: lines.append(MAKER.line(event))]
    )
    params = RequestParams(max_tokens=100, sampling=Script(100, filler=7, end=0))
    simulated.engine.add("a", prompt, params, 0.0, (tuple(before),))
    simulated.engine.run()
    (request,) = calibration.requests_of(lines)
    assert list(request.prompt()) == prompt + before
    assert (request.num_output, request.max_tokens) == (10, 10)
    real, again = calibration.compare_with_simulation(lines, CONFIG, profile)
    assert again["seconds"] == pytest.approx(real["seconds"]) and again["steps"] == real["steps"]


def test_corrections_follow_a_machine_that_computes_in_tiles() -> None:
    """Up to 8 rows a decode step takes its time, up to 16 a fifth more, then a tenth less."""
    profile = profile_of(SLOW)

    def tiled(plan: PlannedLine, before: float) -> float:
        rows = plan.decodes
        return before * (1.0 if rows <= 8 or plan.chunks else 1.2 if rows <= 16 else 0.9)

    fitted, held_out = (with_times(lines, tiled) for lines in logs(profile))
    machine = fit(observations(fitted), SMALL).machine
    plain = replace(machine, corrections=())
    corrected = calibration.held_out_error(held_out, CONFIG, profile_of(machine))
    formula = calibration.held_out_error(held_out, CONFIG, profile_of(plain))
    assert corrected.p90 < 0.05 < 0.15 < formula.p90


def test_a_correction_multiplies_the_time_of_a_pass_and_is_interpolated() -> None:
    machine = replace(SLOW, corrections=((4, 1.0), (16, 1.21)))
    profile, plain = profile_of(machine), profile_of(SLOW)
    for tokens, samples, factor in (
        (1, 1, 1.0), (4, 4, 1.0), (8, 8, 1.1), (16, 16, 1.21), (500, 500, 1.21), (16, 15, 1.0),
    ):  # fmt: skip
        work = (tokens, samples, 1000, 1000.0)
        assert profile.pass_seconds(*work) == pytest.approx(factor * plain.pass_seconds(*work))


def test_predictions_for_a_log_equal_the_step_times_of_its_plans() -> None:
    random = Random(0)
    for machine in (*MACHINES.values(), replace(SLOW, corrections=((2, 0.9), (64, 1.3)))):
        profile = profile_of(machine)
        plans = [random_plan(random) for _ in range(50)]
        seen = observations(chain.from_iterable(map(lines_of, plans)))
        expected = [profile.step_seconds(plan) for plan in plans]
        assert predict(profile, seen) == pytest.approx(expected)


def random_plan(random: Random) -> Plan:
    rows = random.randrange(40)
    plan = Plan(0, decodes=[REQUEST] * rows, decode_context=rows * random.randrange(1, 900))
    plan.num_steps = random.choice([1, 1, 3])
    if plan.num_steps == 1:
        starts = [random.randrange(1, 900) for _ in range(random.randrange(4))]
        plan.drafts = [Draft(REQUEST, start, random.randrange(1, 9)) for start in starts]
    for _ in range(random.randrange(0 if rows else 1, 4)):
        start = random.choice([0, random.randrange(900)])
        end = start + random.randrange(1, 600)
        plan.chunks.append(Chunk(REQUEST, start, end, start, random.random() < 0.5))
    return plan


def lines_of(plan: Plan, seconds: float = 1.0) -> list[Line]:
    result = StepResult(started=0.0, ended=seconds, draft_tokens=[[1] for _ in plan.drafts])
    planned = Planned(plan)
    events: list[Event] = [planned, Completed(planned, result, [])]
    return [MAKER.line(event) for event in events]


TINY = replace(SMALL, weight_bytes=1e6, dense_flops=1e6, attention_flops=1e3, head_flops=1e5)
LAUNCH_BOUND = replace(
    SLOW, bandwidth=4e12, flops=6e14, fixed_seconds=2e-3, attention_seconds=0.0, overlap=1.0
)


def rates_of(machine: Machine) -> dict[str, float]:
    return {name: getattr(machine, name) for name, *_ in RATES.values()}


@cache
def fitted_launch_bound(seed: int, noise: float) -> Fit:
    """A fit to a few similar steps whose time is nearly all fixed time."""
    profile, random = profile_of(LAUNCH_BOUND, TINY), Random(seed)
    waves = [[(random.randrange(16, 64), 8)] * count for count in (1, 8, 4, 1)]
    return fit(observations(disturbed(log_of(profile, waves), noise, slow=0.0, seed=seed)), TINY)


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.02), (0, 0.1), (1, 0.1), (2, 0.1)])
def test_rates_stay_within_physical_limits_and_undetermined_ones_are_named(
    seed: int, noise: float
) -> None:
    machine, warnings = fitted_launch_bound(seed, noise)
    for name, low, high, unit in RATES.values():
        assert low <= getattr(machine, name) < high / 4, unit
    assert machine.fixed_seconds >= 0 and machine.attention_seconds >= 0
    assert any("bandwidth" in warning for warning in warnings)


def test_an_undetermined_rate_is_a_lower_bound_that_predicts_as_well() -> None:
    machine, warnings = fitted_launch_bound(0, 0.0)
    true = rates_of(LAUNCH_BOUND)
    assert len(warnings) == 2
    assert all(value <= true[name] for name, value in rates_of(machine).items())
    profile = profile_of(LAUNCH_BOUND, TINY)
    off = step_errors(machine, profile, log_of(profile, [[(40, 8)] * 4]))
    assert off.max() < 0.05


@pytest.mark.parametrize(
    ("spec", "num_seeds"),
    [(calibration.QUICK_GPU_CALIBRATION, 2), (calibration.GPU_CALIBRATION, 1)],
    ids=["quick", "full"],
)
def test_a_noisy_gpu_log_determines_both_rates(
    spec: calibration.CalibrationSpec, num_seeds: int
) -> None:
    profile = load_profile("qwen3-0.6b-h200-headway")
    changes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_blocks": 60_000}
    work = calibration.make_calibration(8192, spec)
    clean = log_of(profile, work.before + work.after, **changes)
    for seed in range(num_seeds):
        lines = disturbed(clean, noise=0.03, slow=0.02, seed=seed)
        machine, warnings = fit(observations(lines), profile.model)
        assert not warnings
        assert machine.bandwidth == pytest.approx(profile.machine.bandwidth, rel=0.4)
        assert machine.flops == pytest.approx(profile.machine.flops, rel=0.4)


def copying(profile: Profile, sizes: tuple[int, ...], noise: float = 0.0) -> list[Line]:
    random, lines = Random(1), list[Line]()
    for size in sizes:
        copies = [Copy(0, 0)] * size
        for plan in (Plan(0, copies_out=copies), Plan(0, copies_in=copies)):
            lines += lines_of(plan, profile.step_seconds(plan) * random.lognormvariate(0, noise))
    return lines


def test_copies_determine_bandwidth_and_fixed_time() -> None:
    profile = profile_of(SLOW)
    fitted, _ = logs(profile)
    found, _ = fit(observations(copying(profile, (1, 4, 16, 64) * 3, 0.05) + fitted), SMALL)
    for tokens in (16, 256, 1024):
        after = replace(profile, machine=found)
        assert after.copy_seconds(tokens) == pytest.approx(profile.copy_seconds(tokens), rel=0.15)


def test_copies_in_computing_steps_are_fitted_as_well() -> None:
    """As in the log of a run with swapping: steps copy in both directions and compute."""
    profile, random = profile_of(replace(SLOW, copy_bandwidth=2e8)), Random(2)
    plans = [random_plan(random) for _ in range(40)]
    for plan in plans:
        plan.copies_out = [Copy(0, 0)] * random.randrange(1, 60)
        plan.copies_in = [Copy(0, 0)] * random.choice([0, random.randrange(1, 60)])
    fitted, _ = logs(profile)
    lines = [line for plan in plans for line in lines_of(plan, profile.step_seconds(plan))]
    found, _ = fit(observations(fitted + lines), SMALL)
    assert found.copy_bandwidth == pytest.approx(2e8, rel=0.1)


def test_copies_of_one_size_give_a_bandwidth_and_no_copies_the_memory_bandwidth() -> None:
    profile = profile_of(SLOW)
    lines, _ = logs(profile)
    one_size = fit(observations(lines + copying(profile, (32,) * 4)), SMALL).machine
    after = replace(profile, machine=one_size)
    assert after.copy_seconds(512) == pytest.approx(profile.copy_seconds(512), rel=0.01)
    none = fitted(profile)
    assert (none.copy_bandwidth, none.copy_seconds) == (none.bandwidth, 0.0)


def test_hidden_scheduling_time_is_not_counted() -> None:
    """Async scheduling makes the next plan during a step; without it, between two steps."""
    profile, waves = profile_of(SLOW), [[(20, 9)] * 3]
    assert observations(log_of(profile, waves)).gaps == pytest.approx([SLOW.host_seconds] * 8)
    hidden = observations(log_of(profile, waves, async_scheduling=1))
    assert not len(hidden.gaps) and len(hidden.seconds) >= 9


def test_idle_time_is_not_scheduling_time() -> None:
    lines = log_of(profile_of(SLOW), [[(20, 5)] * 2])
    num_steps = sum(isinstance(line, CompletedLine) for line in lines)
    later = list[Line]()
    for line in lines:
        if isinstance(line, PlannedLine):
            line = structs.replace(line, step=line.step + num_steps, t=line.t + 60)
        elif isinstance(line, CompletedLine):
            line = structs.replace(
                line, step=line.step + num_steps, start=line.start + 60, end=line.end + 60
            )
        later.append(line)
    gaps = observations(lines + later).gaps
    assert len(gaps) == 2 * num_steps - 2 and gaps.max() < 1


def test_a_short_log_is_rejected_with_its_number_of_steps() -> None:
    lines = log_of(profile_of(SLOW), [[(40, 6)]])
    with pytest.raises(ConfigError, match="has 6 steps.*24"):
        fit(observations(lines), SMALL)
    with pytest.raises(ConfigError, match="has 0 steps"):
        fit(observations([]), SMALL)


def test_a_log_of_one_batch_size_is_rejected() -> None:
    waves = [[(40 * n, 12)] for n in range(1, 6)]
    with pytest.raises(ConfigError, match="1 to 1 requests"):
        fit(observations(log_of(profile_of(SLOW), waves)), SMALL)


def test_a_log_without_prompts_or_without_decodes_is_rejected() -> None:
    decodes = [
        line
        for rows in range(1, 41)
        for line in lines_of(Plan(0, decodes=[REQUEST] * rows, decode_context=rows * 50))
    ]
    assert "prompts" in "".join(missing_coverage(observations(decodes)))
    plans = (Plan(0, chunks=[Chunk(REQUEST, 0, n, 0, True)]) for n in range(20, 420, 10))
    prompts = chain.from_iterable(map(lines_of, plans))
    assert "decode" in "".join(missing_coverage(observations(prompts)))


def test_a_log_of_one_context_length_is_rejected() -> None:
    plans = [Plan(0, decodes=[REQUEST] * rows, decode_context=400) for rows in range(1, 33)]
    plans += [Plan(0, chunks=[Chunk(REQUEST, 0, 400, 0, True)])] * 5
    (problem,) = missing_coverage(observations(chain.from_iterable(map(lines_of, plans))))
    assert "400 to 400 tokens" in problem


def test_the_log_of_a_simulation_is_predicted_without_error() -> None:
    profile = profile_of(SLOW)
    _, held_out = logs(profile)
    assert calibration.held_out_error(held_out, CONFIG, profile) == pytest.approx(
        (0, 0, 0, 0, 0), abs=1e-9
    )
    real, simulated = calibration.compare_with_simulation(held_out, CONFIG, profile)
    assert real == simulated


def test_requests_of_the_first_step_arrive_together_in_the_simulation() -> None:
    """On a real clock, requests that are submitted together have different arrivals."""
    profile = profile_of(SLOW)
    requests = [
        WorkloadRequest(id=str(i), arrival=arrival, pieces=(range(i * 99 + 1, i * 99 + 40),), num_output=9, max_tokens=9)
        for i, arrival in enumerate((0.0, 0.0, 0.0, 0.25, 0.5))
    ]  # fmt: skip
    lines: list[Line] = []
    simulate(requests, CONFIG, profile, observers=[lambda e: lines.append(MAKER.line(e))])
    added = list(added_in(takewhile(lambda line: not isinstance(line, PlannedLine), lines)))
    for number, each in enumerate(added, start=1 - len(added)):
        each.arrival += 1e-3 * number  # the last just before the first step
    found = [request.arrival for request in calibration.requests_of(lines)]
    assert found == [request.arrival for request in requests]
    real, simulated = calibration.compare_with_simulation(lines, CONFIG, profile)
    assert simulated["seconds"] == pytest.approx(real["seconds"])


@pytest.mark.parametrize("max_num_seqs", [32, 256])
def test_a_run_with_async_scheduling_is_predicted_from_one_with_it(max_num_seqs: int) -> None:
    """The host time comes from a run without it, as in `headway bench profile` on a GPU."""
    profile = load_profile("qwen3-0.6b-h200")
    changes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048, "num_blocks": 60_000}
    work = calibration.make_calibration(8192, calibration.QUICK_GPU_CALIBRATION)
    fitted = log_of(profile, work.before + work.after, async_scheduling=1, **changes)
    held_out = log_of(profile, [work.held_out], async_scheduling=1, **changes)
    synchronous = observations(log_of(profile, work.before[:4], **changes))
    assert len(synchronous.gaps) > 50
    seen = replace(observations(fitted), gaps=synchronous.gaps)
    found, warnings = fit(seen, profile.model)
    assert not warnings
    assert found.host_seconds == pytest.approx(profile.machine.host_seconds)
    config, after = replace(CONFIG, **changes), replace(profile, machine=found)
    off = calibration.held_out_error(held_out, config, after, async_scheduling=1)
    assert abs(off.simulated) < 0.01 and abs(off.ttft) < 0.01 and off.median < 0.01
    # without it, the run is slower
    assert calibration.held_out_error(held_out, config, after).simulated > abs(off.simulated)


def test_a_machine_of_half_the_speed_has_an_error_of_100_percent() -> None:
    machine = replace(SLOW, host_seconds=0.0)
    _, held_out = logs(profile_of(machine))
    slower = replace(
        machine, bandwidth=machine.bandwidth / 2, flops=machine.flops / 2,
        fixed_seconds=machine.fixed_seconds * 2, attention_seconds=machine.attention_seconds * 2,
    )  # fmt: skip
    assert calibration.held_out_error(held_out, CONFIG, profile_of(slower)) == pytest.approx(
        (1, 1, 1, 1, 1)
    )


SPECS = {
    "CPU": calibration.CPU_CALIBRATION,
    "CPU, quick": calibration.QUICK_CPU_CALIBRATION,
    "GPU": calibration.GPU_CALIBRATION,
    "GPU, quick": calibration.QUICK_GPU_CALIBRATION,
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("max_tokens", [64, 300, 40960])
def test_a_calibration_covers_many_sizes_and_holds_out_another_workload(
    max_tokens: int, spec: calibration.CalibrationSpec
) -> None:
    work = calibration.make_calibration(max_tokens, spec)
    waves = [*work.before, work.held_out, *work.after]
    assert all(
        a >= 12 and b >= 1 and a + b <= max_tokens for wave in waves for a, b in wave.lengths
    )
    sizes = [len(wave.lengths) for wave in work.before]
    repeated = [len(wave.lengths) for wave in work.before if wave.is_repeated]
    assert sorted(repeated) == sorted(len(wave.lengths) for wave in work.after)
    assert len(set(repeated)) >= 3
    for wave, short in ((wave, wave.shortened()) for wave in waves):
        assert np.all(np.array(short.lengths) <= calibration.SHORT)
        assert (len(short.lengths), short.max_num_seqs) == (len(wave.lengths), wave.max_num_seqs)
    assert len(work.held_out.lengths) not in sizes and work.before != work.after
    assert work == calibration.make_calibration(max_tokens, spec)
    assert work.held_out != calibration.make_calibration(max_tokens, spec, seed=1).held_out
    if max_tokens > 100:
        lines = log_of(profile_of(SLOW), work.before, num_blocks=50_000, max_model_len=max_tokens)
        assert missing_coverage(observations(lines)) == []


def test_a_model_with_a_short_length_is_rejected() -> None:
    with pytest.raises(ConfigError, match="requests of 63 tokens.*64"):
        calibration.make_calibration(63)


def test_more_overlap_never_takes_longer() -> None:
    random = Random(3)
    for _ in range(100):
        plan = random_plan(random)
        times = [
            profile_of(replace(SLOW, overlap=overlap)).step_seconds(plan)
            for overlap in (1.0, 0.7, 0.2, 0.0)
        ]
        assert times == sorted(times) and times[0] < times[-1] < 2 * times[0]


def test_a_profile_without_overlap_has_full_overlap(tmp_path: Path) -> None:
    values = asdict(profile_of(replace(SLOW, overlap=1.0)))
    del values["machine"]["overlap"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(values))
    assert load_profile(path) == profile_of(replace(SLOW, overlap=1.0))
    values["machine"]["overlap"] = 1.5
    path.write_text(json.dumps(values))
    with pytest.raises(FormatError, match="machine.overlap .* 1, not 1.5"):
        load_profile(path)


def test_the_search_finds_the_minimum_of_a_curved_valley() -> None:
    def valley(point: np.ndarray[Any, Any]) -> float:
        return float((1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2)

    found = minimize(valley, [np.array([-1.5, 2.0]), np.array([3.0, -1.0])])
    assert found == pytest.approx([1, 1], abs=0.01)


def test_the_search_prefers_the_lower_of_two_minima() -> None:
    def two(point: np.ndarray[Any, Any]) -> float:
        return float(min(abs(point[0] - 5) + 1, abs(point[0] + 5)))

    assert minimize(two, [np.array([6.0]), np.array([-6.0])])[0] == pytest.approx(-5, abs=1e-3)
