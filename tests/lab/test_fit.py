"""Laws of fitting: a log tells the machine that made it, through noise, or says what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from headway.errors import ConfigError, FormatError
from headway.lab.calibration import (
    ON_CPU,
    ON_GPU,
    QUICK_ON_CPU,
    QUICK_ON_GPU,
    Amount,
    calibration,
    errors,
    jobs_of,
    rerun,
)
from headway.lab.cost import Machine, Model, Profile, load_profile, save_profile
from headway.lab.fit import fit, missing, observations, predict
from headway.lab.search import lowest
from headway.lab.simulate import simulate
from headway.lab.workload.jobs import Job, TokenSpace
from headway.observe.trace import Line, describe_step
from headway.plan import Chunk, Copy, Plan, StepReport, StepResult
from headway.request import Params, Request
from headway.scheduler import preset

SOMEONE = Request("a", [1], Params())
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
    "reads and computes in turns": replace(SLOW, overlap=0.0),
    "half at once": SLOW,
    "all at once": replace(SLOW, overlap=1.0),
    "slow to start": replace(SLOW, fixed_seconds=0.08),
    "slow to read": replace(SLOW, bandwidth=1.5e9),
    "slow to compute": replace(SLOW, flops=1.2e10),
}


def profile_of(machine: Machine, model: Model = SMALL) -> Profile:
    return Profile(name="made", description="", kv_tokens=32_000, model=model, machine=machine)


def log_of(
    profile: Profile, waves: list[list[tuple[int, int]]], async_scheduling: int = 0, **changes: Any
) -> list[Line]:
    """What a run of these waves on a machine of this profile writes."""
    lines: list[Line] = []
    for number, wave in enumerate(waves):
        space = TokenSpace()
        jobs = [
            Job(id=f"{number}.{i}", pieces=(space.take(a),), num_output=b, max_tokens=b)
            for i, (a, b) in enumerate(wave)
        ]
        simulate(
            jobs, replace(CONFIG, **changes), profile, async_scheduling=async_scheduling,
            observers=[lambda report: lines.append(describe_step(report))],
        )  # fmt: skip
    return lines


def disturbed(lines: list[Line], noise: float, slow: float, seed: int = 0) -> list[Line]:
    """The same with noise on every step, and a share of them two or three times as slow."""
    random, changed = Random(seed), []
    for line in lines:
        times = random.lognormvariate(0, noise) * (
            random.uniform(2, 3) if random.random() < slow else 1
        )
        changed.append({**line, "end": line["start"] + (line["end"] - line["start"]) * times})
    return changed


def logs(profile: Profile, **changes: Any) -> tuple[list[Line], list[Line]]:
    """Of a calibration on such a machine: what is fitted, and what is held out."""
    work = calibration(2048)
    return (
        log_of(profile, work.before + work.after, **changes),
        log_of(profile, [work.held_out], **changes),
    )


def step_errors(fitted: Machine, profile: Profile, lines: list[Line]) -> np.ndarray[Any, Any]:
    seen = observations(lines)
    after = replace(profile, machine=fitted)
    return np.abs(predict(after.rates, seen) / predict(profile.rates, seen) - 1)


# What a log tells.


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_clean_log_foretells_another_run_to_the_percent(machine: Machine) -> None:
    profile = profile_of(machine)
    fitted, held_out = logs(profile)
    found = fit(observations(fitted), SMALL)
    off = step_errors(found, profile, held_out)
    assert np.median(off) < 0.01 and off.max() < 0.05
    assert found.host_seconds == pytest.approx(machine.host_seconds)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_slow_steps_hardly_move_what_is_foretold(seed: int) -> None:
    profile = profile_of(SLOW)
    fitted, held_out = logs(profile)
    found = fit(observations(disturbed(fitted, noise=0.1, slow=0.1, seed=seed)), SMALL)
    off = step_errors(found, profile, held_out)
    assert np.median(off) < 0.05 and np.quantile(off, 0.9) < 0.1


def test_a_profile_of_another_kind_of_machine_is_found_again() -> None:
    profile = load_profile("qwen3-0.6b-h200")
    fitted, held_out = logs(profile)
    off = step_errors(fit(observations(fitted), profile.model), profile, held_out)
    assert np.median(off) < 0.01 and off.max() < 0.05


def test_plans_of_several_steps_tell_as_much() -> None:
    profile = profile_of(SLOW)
    fitted, held_out = logs(profile, num_scheduler_steps=4)
    assert any(line.get("num_steps", 1) > 1 for line in fitted)
    assert np.median(step_errors(fit(observations(fitted), SMALL), profile, held_out)) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_no_number_is_ever_negative_and_every_profile_can_be_read_again(
    seed: int, tmp_path: Path
) -> None:
    """Whatever the times say, even those that no machine could have."""
    random = Random(seed)
    fitted, held_out = logs(profile_of(SLOW))
    lines = [{**line, "end": line["start"] + random.lognormvariate(-3, 2)} for line in fitted]
    machine = fit(observations(lines), SMALL)
    assert all(0 <= value < np.inf for value in asdict(machine).values())
    assert machine.bandwidth > 0 and machine.flops > 0 and machine.overlap <= 1
    save_profile(profile_of(machine), tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again == profile_of(machine)
    assert len(simulate(jobs_of(held_out), CONFIG, again).metrics.requests) == len(
        jobs_of(held_out)
    )


def test_what_is_predicted_for_a_log_is_what_the_profile_says_of_its_plans() -> None:
    random = Random(0)
    for machine in MACHINES.values():
        profile = profile_of(machine)
        plans = [random_plan(random) for _ in range(50)]
        seen = observations(line_of(plan) for plan in plans)
        expected = [profile.step_seconds(plan) for plan in plans]
        assert predict(profile.rates, seen) == pytest.approx(expected)


def random_plan(random: Random) -> Plan:
    rows = random.randrange(40)
    plan = Plan(0, decodes=[SOMEONE] * rows, decode_context=rows * random.randrange(1, 900))
    plan.num_steps = random.choice([1, 1, 3])
    for _ in range(random.randrange(0 if rows else 1, 4)):
        start = random.choice([0, random.randrange(900)])
        end = start + random.randrange(1, 600)
        plan.chunks.append(Chunk(SOMEONE, start, end, start, random.random() < 0.5))
    return plan


def line_of(plan: Plan, seconds: float = 1.0) -> Line:
    return describe_step(StepReport(plan, StepResult(started=0.0, ended=seconds), []))


# Copies and the host.


def copying(profile: Profile, sizes: tuple[int, ...], noise: float = 0.0) -> list[Line]:
    random, lines = Random(1), []
    for size in sizes:
        copies = [Copy(0, 0)] * size
        for plan in (Plan(0, copies_out=copies), Plan(0, copies_in=copies)):
            lines.append(
                line_of(plan, profile.step_seconds(plan) * random.lognormvariate(0, noise))
            )
    return lines


def test_copies_tell_their_bandwidth_and_their_start() -> None:
    profile = profile_of(SLOW)
    fitted, _ = logs(profile)
    found = fit(observations(copying(profile, (1, 4, 16, 64) * 3, 0.05) + fitted), SMALL)
    for tokens in (16, 256, 1024):
        after = replace(profile, machine=found)
        assert after.copy_seconds(tokens) == pytest.approx(profile.copy_seconds(tokens), rel=0.15)


def test_copies_between_computing_steps_tell_as_much() -> None:
    """As in the log of a run that swapped: some steps copy both ways and compute as well."""
    profile, random = profile_of(replace(SLOW, copy_bandwidth=2e8)), Random(2)
    plans = [random_plan(random) for _ in range(40)]
    for plan in plans:
        plan.copies_out = [Copy(0, 0)] * random.randrange(1, 60)
        plan.copies_in = [Copy(0, 0)] * random.choice([0, random.randrange(1, 60)])
    fitted, _ = logs(profile)
    lines = [line_of(plan, profile.step_seconds(plan)) for plan in plans]
    found = fit(observations(fitted + lines), SMALL)
    assert found.copy_bandwidth == pytest.approx(2e8, rel=0.1)


def test_copies_of_one_size_give_a_bandwidth_and_no_copies_the_memorys() -> None:
    profile = profile_of(SLOW)
    fitted, _ = logs(profile)
    one_size = fit(observations(fitted + copying(profile, (32,) * 4)), SMALL)
    after = replace(profile, machine=one_size)
    assert after.copy_seconds(512) == pytest.approx(profile.copy_seconds(512), rel=0.01)
    none = fit(observations(fitted), SMALL)
    assert (none.copy_bandwidth, none.copy_seconds) == (none.bandwidth, 0.0)


def test_time_that_another_step_hides_is_not_seen() -> None:
    """With overlap the next plan is made while one runs; only without is its making between two."""
    profile, waves = profile_of(SLOW), [[(20, 9)] * 3]
    assert observations(log_of(profile, waves)).gaps == pytest.approx([SLOW.host_seconds] * 8)
    hidden = observations(log_of(profile, waves, async_scheduling=1))
    assert not len(hidden.gaps) and len(hidden.seconds) >= 9


def test_time_with_nothing_to_do_is_not_the_hosts() -> None:
    lines = log_of(profile_of(SLOW), [[(20, 5)] * 2])
    later = [
        {
            **line,
            "step": line["step"] + len(lines),
            "start": line["start"] + 60,
            "end": line["end"] + 60,
        }
        for line in lines
    ]
    gaps = observations(lines + later).gaps
    assert len(gaps) == 2 * len(lines) - 2 and gaps.max() < 1


# What a log lacks.


def test_a_log_that_is_too_short_says_so() -> None:
    lines = log_of(profile_of(SLOW), [[(40, 6)]])
    with pytest.raises(ConfigError, match="cannot be fitted: it has 6 steps .*, 24 are needed"):
        fit(observations(lines), SMALL)
    with pytest.raises(ConfigError, match="it has 0 steps"):
        fit(observations([]), SMALL)


def test_a_log_of_one_batch_size_says_that_others_are_missing() -> None:
    waves = [[(40 * n, 12)] for n in range(1, 6)]
    with pytest.raises(ConfigError, match="decode steps have 1 to 1 requests: batches of other"):
        fit(observations(log_of(profile_of(SLOW), waves)), SMALL)


def test_a_log_without_prompts_or_without_decodes_says_so() -> None:
    decodes = [
        line_of(Plan(0, decodes=[SOMEONE] * rows, decode_context=rows * 50))
        for rows in range(1, 41)
    ]
    assert missing(observations(decodes)) == ["fewer than 3 steps compute prompts"]
    prompts = [line_of(Plan(0, chunks=[Chunk(SOMEONE, 0, n, 0, True)])) for n in range(20, 420, 10)]
    assert missing(observations(prompts)) == ["fewer than 3 steps only decode"]


def test_a_log_of_one_context_says_that_others_are_missing() -> None:
    plans = [Plan(0, decodes=[SOMEONE] * rows, decode_context=400) for rows in range(1, 33)]
    plans += [Plan(0, chunks=[Chunk(SOMEONE, 0, 400, 0, True)])] * 5
    (problem,) = missing(observations(map(line_of, plans)))
    assert problem.startswith("steps read 400 to 400 tokens of context: others are missing")


# How well it foretells.


def test_a_log_of_a_simulation_is_foretold_without_error() -> None:
    profile = profile_of(SLOW)
    _, held_out = logs(profile)
    assert errors(held_out, CONFIG, profile) == pytest.approx((0, 0, 0, 0, 0), abs=1e-9)
    real, simulated = rerun(held_out, CONFIG, profile)
    assert real == simulated


def test_requests_that_came_together_are_foretold_together_and_later_ones_later() -> None:
    """On a real clock even those that come at once arrive one after the other."""
    profile = profile_of(SLOW)
    jobs = [
        Job(id=str(i), arrival=arrival, pieces=(range(i * 99 + 1, i * 99 + 40),), num_output=9, max_tokens=9)
        for i, arrival in enumerate((0.0, 0.0, 0.0, 0.25, 0.5))
    ]  # fmt: skip
    lines: list[Line] = []
    simulate(jobs, CONFIG, profile, observers=[lambda r: lines.append(describe_step(r))])
    for number, asked in enumerate(lines[0]["added"], start=1 - len(lines[0]["added"])):
        asked["arrival"] += 1e-3 * number  # the last just before the first step
    assert [job.arrival for job in jobs_of(lines)] == [job.arrival for job in jobs]
    real, simulated = rerun(lines, CONFIG, profile)
    assert simulated["seconds"] == pytest.approx(real["seconds"])


@pytest.mark.parametrize("seats", [32, 256])
def test_a_run_with_overlap_is_foretold_from_one_with_overlap(seats: int) -> None:
    """The host's part comes from a run without, as `headway profile` does it on a GPU."""
    profile = load_profile("qwen3-0.6b-h200")
    changes = {"max_num_seqs": seats, "max_num_batched_tokens": 2048, "num_blocks": 60_000}
    work = calibration(8192, QUICK_ON_GPU)
    fitted = log_of(profile, work.before + work.after, async_scheduling=1, **changes)
    held_out = log_of(profile, [work.held_out], async_scheduling=1, **changes)
    apart = observations(log_of(profile, work.before, **changes))
    found = fit(replace(observations(fitted), gaps=apart.gaps), profile.model)
    assert found.host_seconds == pytest.approx(profile.machine.host_seconds)
    config, after = replace(CONFIG, **changes), replace(profile, machine=found)
    off = errors(held_out, config, after, async_scheduling=1)
    assert abs(off.simulated) < 0.01 and abs(off.ttft) < 0.01 and off.median < 0.01
    assert errors(held_out, config, after).simulated > abs(off.simulated)  # without, it is slower


def test_a_machine_thought_twice_as_slow_is_off_by_all_of_it() -> None:
    machine = replace(SLOW, host_seconds=0.0)
    _, held_out = logs(profile_of(machine))
    slower = replace(
        machine, bandwidth=machine.bandwidth / 2, flops=machine.flops / 2,
        fixed_seconds=machine.fixed_seconds * 2, attention_seconds=machine.attention_seconds * 2,
    )  # fmt: skip
    assert errors(held_out, CONFIG, profile_of(slower)) == pytest.approx((1, 1, 1, 1, 1))


AMOUNTS = {
    "CPU": ON_CPU,
    "CPU, quick": QUICK_ON_CPU,
    "GPU": ON_GPU,
    "GPU, quick": QUICK_ON_GPU,
}


@pytest.mark.parametrize("amount", AMOUNTS.values(), ids=AMOUNTS)
@pytest.mark.parametrize("most", [64, 300, 40960])
def test_a_calibration_spreads_and_holds_out_another_workload(most: int, amount: Amount) -> None:
    work = calibration(most, amount)
    waves = [*work.before, work.held_out, *work.after]
    assert all(a >= 12 and b >= 1 and a + b <= most for wave in waves for a, b in wave)
    sizes = [len(wave) for wave in work.before]
    assert sorted(sizes) == sorted(len(wave) for wave in work.after) and len(set(sizes)) >= 3
    assert len(work.held_out) not in sizes and work.before != work.after
    assert work == calibration(most, amount)
    assert work.held_out != calibration(most, amount, seed=1).held_out
    if most > 100:
        lines = log_of(
            profile_of(SLOW), work.before + work.after, num_blocks=50_000, max_model_len=most
        )
        assert missing(observations(lines)) == []


def test_a_model_too_short_to_learn_from_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="requests of 63 tokens are too short to learn from; .* must allow 64"
    ):
        calibration(63)


# What the cost model gained for it.


def test_reading_while_computing_never_takes_longer() -> None:
    random = Random(3)
    for _ in range(100):
        plan = random_plan(random)
        times = [
            profile_of(replace(SLOW, overlap=overlap)).step_seconds(plan)
            for overlap in (1.0, 0.7, 0.2, 0.0)
        ]
        assert times == sorted(times) and times[0] < times[-1] < 2 * times[0]


def test_a_profile_that_says_nothing_of_overlap_has_all_of_it(tmp_path: Path) -> None:
    values = asdict(profile_of(replace(SLOW, overlap=1.0)))
    del values["machine"]["overlap"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(values))
    assert load_profile(path) == profile_of(replace(SLOW, overlap=1.0))
    values["machine"]["overlap"] = 1.5
    path.write_text(json.dumps(values))
    with pytest.raises(FormatError, match="machine.overlap must be a number from 0 to 1, not 1.5"):
        load_profile(path)


def test_the_search_finds_the_bottom_of_a_bent_valley() -> None:
    def valley(point: np.ndarray[Any, Any]) -> float:
        return float((1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2)

    found = lowest(valley, [np.array([-1.5, 2.0]), np.array([3.0, -1.0])])
    assert found == pytest.approx([1, 1], abs=0.01)


def test_the_search_leaves_a_local_bottom_for_a_lower_one() -> None:
    def two(point: np.ndarray[Any, Any]) -> float:
        return float(min(abs(point[0] - 5) + 1, abs(point[0] + 5)))

    assert lowest(two, [np.array([6.0]), np.array([-6.0])])[0] == pytest.approx(-5, abs=1e-3)
