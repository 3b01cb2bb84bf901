"""Capacity: monotone in the targets, bounded by the device, and honest about impossible targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.errors import ConfigError
from headway.lab.cost import load_profile
from headway.lab.planner.capacity import SATURATED, Impossible, find_capacity
from headway.lab.planner.confidence import Interval
from headway.lab.planner.evaluate import Evaluator, History, Job
from headway.lab.planner.targets import Target
from headway.lab.planner.workload import Workload

PROFILE = load_profile("llama3.1-8b-a100-80gb")
TEXT = "requests=30,arrivals=poisson(5),prompt=uniform(50,300),output=uniform(2,12)"
SETTINGS = {"max_num_seqs": 4}
HISTORY = History()


def question(*targets: Target, text: str = TEXT) -> Job:
    return Job(profile=PROFILE, workload=Workload(text=text), settings=SETTINGS, targets=targets)


def rate(*targets: Target) -> float:
    found = find_capacity(question(*targets), range(2), Evaluator(history=HISTORY))
    assert found.rate.low <= found.rate.mean <= found.rate.high
    return found.rate.mean


def test_looser_targets_never_lower_the_capacity() -> None:
    rates = [rate(Target("ttft", "p90", seconds)) for seconds in (0.06, 0.1, 5.0)]
    assert rates == sorted(rates) and 0 < rates[0] < rates[-1]


def test_without_targets_it_is_the_rate_at_which_the_queue_starts_to_grow() -> None:
    found = find_capacity(question(), range(2), Evaluator(history=HISTORY))
    assert set(found.limited_by) == {SATURATED}
    assert 0.7 < found.rate.mean / found.saturated_rate < 1.4


def test_replicas_follow_from_the_lower_end_of_the_interval() -> None:
    found = find_capacity(question(), range(2), Evaluator(history=HISTORY))
    assert replace(found, rate=Interval(5.0, 4.0, 6.0)).replicas(17.0) == 5
    assert replace(found, rate=Interval(5.0, 0.0, 9.0)).replicas(17.0) is None


def test_loose_targets_do_not_hide_saturation() -> None:
    endless = rate(Target("ttft", "p99", 1000.0))
    assert endless == rate() > rate(Target("ttft", "p99", 0.1))


def test_the_answer_does_not_depend_on_where_it_runs() -> None:
    target = Target("ttft", "p90", 0.1)
    fresh = find_capacity(question(target), range(2), Evaluator())
    assert fresh == find_capacity(question(target), range(2), Evaluator(history=HISTORY))


@pytest.mark.parametrize("target", [Target("ttft", "p50", 0.001), Target("e2e", "max", 0.02)])
def test_impossible_targets_are_named_after_a_few_runs(target: Target) -> None:
    evaluator = Evaluator()
    with pytest.raises(Impossible, match=target.name):
        find_capacity(question(target, Target("ttft", "p99", 5.0)), range(8), evaluator)
    assert len(evaluator.history) <= 10


def test_a_workload_without_arrivals_has_no_capacity() -> None:
    with pytest.raises(ConfigError, match="arrivals"):
        find_capacity(question(text="requests=9"), range(2), Evaluator())


@pytest.mark.parametrize("num_requests", [2, 5])
@pytest.mark.parametrize("targets", [(), (Target("ttft", "p99", 1000.0),)])
def test_too_few_requests_for_any_rate_to_fail_are_refused(
    num_requests: int, targets: tuple[Target, ...]
) -> None:
    text = f"requests={num_requests},arrivals=poisson(5),output=3"
    with pytest.raises(ConfigError, match=f"{num_requests} requests .* more requests"):
        find_capacity(question(*targets, text=text), range(3), Evaluator())


def test_a_target_that_few_requests_miss_gives_their_capacity() -> None:
    asked = question(Target("ttft", "p99", 0.06), text="requests=5,arrivals=poisson(5),output=3")
    found = find_capacity(asked, range(3), Evaluator())
    assert set(found.limited_by) == {"ttft-p99"} and found.rate.mean > 0


def test_settings_that_reject_every_request_are_refused() -> None:
    refusing = replace(question(), settings={"max_model_len": 2})
    with pytest.raises(ConfigError, match="all requests are rejected.*max_model_len"):
        find_capacity(refusing, range(2), Evaluator())
