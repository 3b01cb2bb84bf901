"""Metrics of a run, and requests that are listed with a count."""

from __future__ import annotations

from typing import Any

import pytest

from headway.errors import ConfigError
from headway.events import Event
from headway.lab.cost import load_profile
from headway.lab.recording.metrics import RunMetrics, parse_metric
from headway.lab.recording.spec import MAX_REQUESTS, config_of, read_spec, requests_of
from headway.lab.simulate import simulate
from headway.lab.workload.request import TokenSpace
from headway.record.stats import RunStats
from headway.record.writer import header

REQUESTS = [
    {"id": "a", "prompt": 20, "output": 30},
    {"id": "b", "prompt": 30, "output": 30},
    {"id": "c0", "prompt": 8, "output": 4, "arrival": 2.0},
    {"id": "c1", "prompt": 8, "output": 4, "arrival": 2.5},
]


@pytest.fixture(scope="module")
def run() -> RunMetrics:
    """Two requests that outgrow six blocks, and two small ones later."""
    spec = read_spec({"requests": REQUESTS, "preset": "vllm_v1", "set": {"num_blocks": 6}})
    profile = load_profile(spec.profile)
    config = config_of(spec, profile)
    stats = RunStats(header(config, False))
    metrics = RunMetrics(stats)

    def observe(event: Event) -> None:
        stats(event)
        metrics.follow(event)

    simulate(requests_of(spec, TokenSpace()), config, profile, observers=[observe])
    return metrics


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("admitted(a)", 0),
        ("new_block(b)", 3),  # two blocks hold 32 tokens; step 3 computes the 33rd
        ("new_block(b, 2)", None),  # preempted before
        ("chunk(a)", 20),
        ("output(c*)", 4),
        ("running_at(0)", 2),
        ("decodes_at(1)", 2),
        ("tokens_at(0)", 50),
        ("tokens_at(100000)", None),
        ("admitted_at(0)", 2),
        ("preempted_at(0)", 0),
        ("cached(a)", 0),
        ("admitted(a, 3)", None),
        ("admitted(nothing)", None),
        ("ttft(nothing)", None),
        ("running_share(nothing)", None),
        ("requests", 4),
        ("finish_reasons", None),
    ],
)
def test_a_metric_of_a_small_run(run: RunMetrics, metric: str, expected: float | None) -> None:
    if metric == "finish_reasons":  # not a number
        with pytest.raises(ConfigError, match=metric):
            run.value(metric)
    else:
        assert run.value(metric) == expected


def test_events_of_a_preempted_request_follow_each_other(run: RunMetrics) -> None:
    preempted, again, end = (
        run.value(m) for m in ("preempted(b)", "admitted(b, 2)", "finished(b)")
    )
    assert preempted is not None and again is not None and end is not None
    assert 0 < preempted < again < end
    assert run.value("first_preemption") == preempted
    assert run.value(f"preempted_at({preempted:.0f})") == 1


def test_times_agree_with_the_summary(run: RunMetrics) -> None:
    by_request = [run.value(f"ttft({id})") for id in ("a", "b", "c0", "c1")]
    assert run.value("ttft.mean") == pytest.approx(sum(filter(None, by_request)) / 4)
    small = [run.value("queue_time(c0)"), run.value("queue_time(c1)")]
    assert run.value("queue_time(c*)") == pytest.approx(sum(each or 0.0 for each in small) / 2)
    busy, steps = run.value("busy_seconds"), run.value("steps")
    mean = run.value("per_step.seconds")
    assert busy and steps and mean and busy == pytest.approx(steps * mean)
    longest, gap = run.value("longest_step"), run.value("longest_gap")
    assert longest and gap and mean < longest < gap


def test_tokens_read_counts_each_chunk_up_to_its_end(run: RunMetrics) -> None:
    again = run.value("chunk(b, 2)"), run.value("cached(b, 2)")
    assert run.value("tokens_read") == 20 + 30 + 8 + 8 + sum(filter(None, again))


def test_the_share_of_running_requests_is_a_mean(run: RunMetrics) -> None:
    share = run.value("running_share(a)")
    assert share is not None and 1 / 256 < share < 3 / 256


@pytest.mark.parametrize(
    "metric",
    ["", "ends(a)", "admitted", "admitted()", "admitted(a, b)", "admitted(a, 0)", "ttft(a, 1)",
     "running_at(a)", "longest_step(1)", "ttft.p51", "steps(1)", "clients.x", "ttft", "admitted(a"],
)  # fmt: skip
def test_an_unknown_metric_is_refused(metric: str) -> None:
    with pytest.raises(ConfigError, match="metric"):
        parse_metric(metric)


# Requests with a count.


def listed(*requests: Any) -> list[tuple[str, float]]:
    spec = read_spec({"requests": list(requests)})
    return [(request.id, request.arrival) for request in requests_of(spec, TokenSpace())]


def test_a_count_makes_numbered_copies() -> None:
    group = {"id": "s", "count": 3, "prompt": 4, "arrival": 0.3, "every": 0.1}
    assert listed({"id": "a"}, group) == [("a", 0.0), ("s0", 0.3), ("s1", 0.4), ("s2", 0.5)]
    assert [id for id, _ in listed({"count": 2})] == ["0", "1"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"id": "s", "count": 0}, "count"),
        ({"id": "s", "count": MAX_REQUESTS + 1}, str(MAX_REQUESTS)),
        ({"id": "s", "count": 2, "every": -1}, "every"),
        ({"id": "s", "count": 2, "arrival": float("nan")}, "arrival"),
        ({"id": "s", "arrival": float("inf")}, "arrival"),
        ({"id": "s", "count": 2, "prompts": 3}, "prompts"),
    ],
)
def test_a_wrong_group_is_refused(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listed(group)


def test_groups_together_stay_below_the_limit() -> None:
    with pytest.raises(ConfigError, match=str(MAX_REQUESTS)):
        listed({"id": "s", "count": MAX_REQUESTS}, {"id": "t"})
