"""Targets and knobs: durations, redundancy, early stops, values, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headway.errors import ConfigError
from headway.lab.cost import load_profile
from headway.lab.planner import targets
from headway.lab.planner.evaluate import Job, Outcome, Settings, evaluate, make_config
from headway.lab.planner.space import check, default_space, neighbours, parse_knobs, points
from headway.lab.planner.workload import Workload
from headway.scheduler.policies.presets import PRESETS

PROFILE = load_profile("llama3.1-8b-a100-80gb")
BUSY = Workload(text="requests=36,arrivals=poisson(40),prompt=uniform(50,400),output=uniform(2,30)")
FEW = {"max_num_seqs": 6}


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1s", 1), ("1.5", 1.5), ("2m", 120), (".5s", 0.5)]
)
def test_a_duration_has_a_unit_or_is_seconds(text: str, seconds: float) -> None:
    assert targets.parse_duration("--ttft-p99", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1s", "1h", "1 2", "s", "nan", "1e999"])
def test_a_wrong_duration_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--e2e-max.*duration"):
        targets.parse_duration("--e2e-max", text)


@pytest.mark.parametrize(
    ("strong", "weak", "is_redundant"),
    [
        (("tbt", "max", 0.2), ("tbt", "p99", 0.3), True),
        (("tbt", "max", 0.2), ("tbt", "p99", 0.1), False),
        (("ttft", "p99", 1.0), ("ttft", "p50", 1.0), True),
        (("ttft", "p50", 1.0), ("ttft", "p99", 2.0), False),
        (("e2e", "p99", 1.0), ("ttft", "p99", 2.0), True),
        (("stall", "max", 0.1), ("tbt", "p99", 0.2), True),
        (("stall", "p99", 0.1), ("tbt", "p99", 0.2), False),
    ],
)
def test_a_target_that_another_implies_is_redundant(
    strong: tuple[str, str, float], weak: tuple[str, str, float], is_redundant: bool
) -> None:
    found = targets.redundant([targets.Target(*strong), targets.Target(*weak)])
    assert bool(found) == is_redundant
    assert all(
        str(targets.Target(*weak)) in each and str(targets.Target(*strong)) in each
        for each in found
    )


@pytest.fixture(scope="module")
def complete() -> Outcome:
    return evaluate(Job(profile=PROFILE, workload=BUSY, settings=FEW))


@pytest.mark.parametrize("latency", targets.LATENCIES)
@pytest.mark.parametrize("statistic", targets.STATISTICS)
def test_stopping_early_never_changes_the_verdict(
    latency: str, statistic: str, complete: Outcome
) -> None:
    value, num_stopped = targets.Target(latency, statistic, 1.0).measured(complete.summary), 0
    for factor in (0.2, 0.999999, 1.000001):
        target = targets.Target(latency, statistic, value * factor)
        outcome = evaluate(Job(profile=PROFILE, workload=BUSY, settings=FEW, targets=(target,)))
        num_stopped += outcome.is_stopped
        assert (outcome.is_stopped or bool(targets.missed((target,), outcome.summary))) == (
            factor < 1
        )
        assert outcome.stopped_by == (target.name if outcome.is_stopped else "")
        assert outcome.is_stopped or outcome.summary == complete.summary
    assert num_stopped or latency == "stall"  # counted every 64 steps; this run is short


TIGHT = {"num_blocks": 60, "headroom": "watermark(0.0)", "max_num_batched_tokens": 128}


@pytest.mark.parametrize(
    ("settings", "is_async"),
    [
        ({**TIGHT, "swap": "recompute"}, True),  # requests that are preempted have long gaps
        ({**FEW, "num_scheduler_steps": 4}, False),  # three of four gaps are 0
        ({**FEW, "max_model_len": 300}, False),  # fewer gaps than the workload says
    ],
)
@pytest.mark.parametrize("statistic", targets.STATISTICS)
def test_stops_by_time_between_tokens_are_exact(
    statistic: str, settings: Settings, is_async: bool
) -> None:
    job = Job(profile=PROFILE, workload=BUSY, settings=settings, async_scheduling=is_async)
    summary = evaluate(job).summary
    assert bool(summary["preemptions"]) == ("num_blocks" in settings)
    assert bool(summary["rejected"]) == ("max_model_len" in settings)
    limit = summary["time_between_tokens"][statistic] or 1e-9
    for seconds in (limit * 0.999999, limit):
        target = targets.Target("tbt", statistic, seconds)
        outcome = evaluate(replace(job, targets=(target,)))
        is_missed = bool(targets.missed((target,), summary))
        assert is_missed if outcome.is_stopped else outcome.summary == summary


def test_most_of_a_run_is_saved_if_the_time_between_tokens_is_far_too_long() -> None:
    target = targets.Target("tbt", "p99", 0.001)
    outcome = evaluate(Job(profile=PROFILE, workload=BUSY, settings=FEW, targets=(target,)))
    assert outcome.stopped_by == "tbt-p99" and outcome.progress < 0.1


def test_rejected_requests_are_infinitely_late() -> None:
    job = Job(profile=PROFILE, workload=BUSY, settings={"max_model_len": 200})
    summary = evaluate(job).summary
    assert summary["rejected"] > 0.1 * summary["requests"]
    assert targets.Target("ttft", "p90", 9.0).measured(summary) == math.inf
    assert targets.worst_ratio((targets.Target("ttft", "p99", 9.0),), summary) == math.inf


def test_values_are_split_at_commas_outside_parentheses() -> None:
    found = parse_knobs(["headroom=back_off(watermark(0.1),0.2),future_peak", "max_num_seqs=8, 16"])
    assert found == {
        "headroom": ["back_off(watermark(0.1),0.2)", "future_peak"], "max_num_seqs": [8, 16],
    }  # fmt: skip
    assert len(points(found)) == 4


@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ("max_num_seq=1", "max_num_seqs"), ("max_num_seqs", "name=value"), ("chunk=", "name=value"),
        ("max_num_seqs=many", "many"), ("preset=vlm", "vllm"), ("max_num_seqs=8,8", "twice"),
    ],
)  # fmt: skip
def test_a_wrong_knob_is_named_with_what_is_known(knob: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_knobs([knob])


@pytest.mark.parametrize("knob", ["max_num_seqs=0", "chunk=at_mst(5)", "headroom=watermark(2)"])
def test_values_out_of_range_are_refused_before_any_run(knob: str) -> None:
    with pytest.raises(ConfigError, match=knob.partition("=")[0]):
        check(parse_knobs([knob]), {"preset": "headway"}, PROFILE)


def test_too_many_combinations_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="1000000"):
        points({"max_num_seqs": list(range(1000)), "max_num_batched_tokens": list(range(1000))})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_of_the_default_space_is_valid(preset: str) -> None:
    base = {"preset": preset}
    check(default_space(make_config(base, PROFILE), has_drafts=True), base, PROFILE)


def test_drafts_are_searched_only_if_the_workload_says_how_often_they_are_right() -> None:
    config = make_config({"preset": "headway"}, PROFILE)
    for text, has_drafts in (("requests=3", False), ("requests=3,accept=0.5", True)):
        workload = Workload(text=text)
        assert workload.has_drafts is has_drafts
        space = default_space(config, has_drafts=workload.has_drafts)
        assert ("draft" in space) is has_drafts


def test_numbers_change_to_their_neighbours_and_names_to_all_others() -> None:
    assert neighbours([8, 16, 32, 64], 16) == [8, 32]
    assert neighbours([8, 16, 32], 20) == [16, 32]
    assert neighbours([8, 16], 8) == [16]
    assert neighbours(["a", "b", "c"], "b") == ["a", "c"]
