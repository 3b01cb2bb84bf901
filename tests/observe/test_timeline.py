"""Laws of the metrics: what is counted from trace lines is what a per-token log would say."""

from __future__ import annotations

import io
import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.simulate import SimulationResult, simulate
from headway.lab.summary import Summary, fairness, summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.timeline import PERCENTILES, Life, Metrics, percentiles
from headway.observe.trace import read_trace
from headway.plan import StepReport
from headway.request import Request
from headway.scheduler import PRESETS, preset

PROFILE = load_profile("qwen3-0.6b-h200")
SMALL = {"block_size": 4, "num_blocks": 44, "max_num_seqs": 8, "max_num_batched_tokens": 128}
WORKLOAD = (
    "requests=30,arrivals=bursty(250,3),prompt=uniform(5,60),output=uniform(1,40),max_tokens=40,"
    "prefix=2x16@0.5,clients=3,priorities=3,slack=uniform(0.02,0.4),n=2,seed={}"
)
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])


class Log:
    """Every token with its time, and every position computed; knows nothing of trace lines."""

    def __init__(self) -> None:
        self.times: dict[Request, list[float]] = defaultdict(list)
        self.ends: dict[Request, float] = {}
        self.admitted: dict[Request, float] = {}
        self.totals: Counter[str] = Counter()
        self._reached: Counter[Request] = Counter()  # most tokens that were ever in the cache

    def __call__(self, report: StepReport) -> None:
        plan = report.plan
        for request, tokens in report.outputs():
            self.times[request] += [report.result.ended] * len(tokens)
        for request in report.finished:
            self.ends[request] = report.result.ended
        for request, num_cached, num_swapped, _ in plan.admitted:
            if request not in self.admitted:
                self.admitted[request] = plan.events.schedule_ended
                self.totals["prompt"] += request.num_prompt
                self.totals["cached"] += num_cached
            reached = max(self._reached[request], num_cached + num_swapped)
            self._reached[request] = reached
        for request, start, end, _, _ in plan.chunks:
            reached = self._reached[request]
            self.totals["recomputed"] += sum(place < reached for place in range(start, end))
            self.totals["computed"] += end - start
            self._reached[request] = max(reached, end)
        for request in plan.decodes:
            self._reached[request] += plan.num_steps
            self.totals["computed"] += plan.num_steps
        self.totals["preempted"] += len(plan.events.preempted)
        self.totals["deferred"] += len(plan.deferred)
        self.totals["late"] += sum(not plan.tokens_kept.get(r, 1) for r in plan.decodes)

    def gaps(self) -> list[float]:
        return sorted(b - a for times in self.times.values() for a, b in pairwise(times))


def run(
    name: str, async_scheduling: int, seed: int = 0, workload: str = WORKLOAD, **changes: Any
) -> tuple[SimulationResult, Log]:
    log = Log()
    config = preset(name, **{**SMALL, **changes})
    jobs = parse_synthetic(workload.format(seed)).generate()
    return simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, observers=[log]), log


def nearest(values: list[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else 0.0


def check(summary: Summary, log: Log) -> None:
    """Everything that the log knows too."""
    ttft = percentiles(times[0] - r.arrival for r, times in log.times.items())
    assert summary["ttft"] == pytest.approx(ttft)
    gaps = log.gaps()
    between = summary["time_between_tokens"]
    assert between["mean"] == pytest.approx(sum(gaps) / len(gaps) if gaps else 0.0)
    for percent in PERCENTILES:
        assert between[f"p{percent}"] == pytest.approx(nearest(gaps, percent), abs=1e-9), percent
    done = {r: t for r, t in log.ends.items() if r.finish_reason in ("stop", "length")}
    assert summary["end_to_end"] == pytest.approx(
        percentiles(t - r.arrival for r, t in done.items())
    )
    queue = percentiles(t - r.arrival for r, t in log.admitted.items())
    assert summary["queue_time"] == pytest.approx(queue)
    assert summary["completed"] == len(done)
    assert summary["output_tokens"] == sum(map(len, log.times.values()))
    assert summary["output_tokens"] == sum(r.num_generated for r in log.ends)
    assert summary["prompt_tokens"] == log.totals["prompt"]
    assert summary["preemptions"] == log.totals["preempted"]
    assert summary["recomputed_tokens"] == log.totals["recomputed"]
    assert summary["recompute_tax"] == pytest.approx(
        log.totals["recomputed"] / log.totals["computed"]
    )
    assert summary["cache_hit_ratio"] == pytest.approx(log.totals["cached"] / log.totals["prompt"])
    late = [r for r, t in log.ends.items() if r.params.deadline is not None]
    assert summary["deadlines"] == len(late)
    assert summary["deadline_misses"] == sum(log.ends[r] > (r.params.deadline or 0.0) for r in late)


@each_scheduling
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted_right(name: str, async_scheduling: int) -> None:
    for seed in range(2):
        result, log = run(name, async_scheduling, seed)
        check(summarize(result.metrics), log)


@each_scheduling
@pytest.mark.parametrize("swap", ["recompute", "swap"])
def test_preempted_requests_are_counted_right(swap: str, async_scheduling: int) -> None:
    for seed in range(3):
        result, log = run(
            "vllm_v1", async_scheduling, seed, num_blocks=30, swap=swap, num_host_blocks=30
        )
        summary = summarize(result.metrics)
        assert summary["preemptions"] > 10
        assert bool(summary["recomputed_tokens"]) or swap == "swap"
        assert (summary["preemptions_by_swap"] > 0) == (swap == "swap")
        check(summary, log)


@each_scheduling
def test_preemptions_for_priority_are_counted_right(async_scheduling: int) -> None:
    result, log = run(
        "headway", async_scheduling, queue="priority(preempts=True)", headroom="watermark(0.0)"
    )
    summary = summarize(result.metrics)
    assert summary["preemptions_for_priority"] > 0
    check(summary, log)


@each_scheduling
@pytest.mark.parametrize("num_scheduler_steps", [2, 5])
def test_multi_step_decodes_are_counted_right(
    num_scheduler_steps: int, async_scheduling: int
) -> None:
    calm = (
        "requests=12,arrivals=poisson(60),prompt=uniform(5,30),output=uniform(1,40),"
        "max_tokens=40,seed={}"
    )
    for seed in range(4):
        result, log = run(
            "vllm_v1", async_scheduling, seed, calm, num_scheduler_steps=num_scheduler_steps
        )
        check(summarize(result.metrics), log)


@each_scheduling
def test_deferred_decodes_are_counted_right(async_scheduling: int) -> None:
    for seed in range(3):
        result, log = run(
            "minivllm",
            async_scheduling,
            seed,
            max_num_batched_tokens=5,
            num_blocks=300,
            chunk="split_any",
        )
        assert log.totals["deferred"] > 10
        check(summarize(result.metrics), log)


@each_scheduling
def test_decodes_deferred_and_preempted_are_counted_right(async_scheduling: int) -> None:
    short = "requests=20,prompt=uniform(3,8),output=uniform(20,40),max_tokens=40,seed={}"
    changes = {"max_num_batched_tokens": 3, "num_blocks": 16, "chunk": "split_any"}
    for seed in range(4):
        result, log = run("minivllm", async_scheduling, seed, short, **changes)
        assert log.totals["deferred"] > 10 and log.totals["preempted"] > 10
        check(summarize(result.metrics), log)


def test_stops_seen_one_step_late_add_no_token() -> None:
    result, log = run("vllm_v1", 1, num_blocks=400)
    assert log.totals["late"] > 5
    check(summarize(result.metrics), log)


def test_a_prompt_that_stalls_the_decodes_is_seen_between_tokens() -> None:
    prompts = TokenSpace()
    jobs = [
        WorkloadRequest(id="a", pieces=(prompts.take(8),), num_output=30, max_tokens=30),
        WorkloadRequest(
            id="b", pieces=(prompts.take(9000),), num_output=2, max_tokens=2, arrival=0.01
        ),
    ]
    log = Log()
    config = preset("nano_vllm", max_num_batched_tokens=1000, max_num_seqs=4)
    summary = summarize(simulate(jobs, config, PROFILE, observers=[log]).metrics)
    check(summary, log)
    stall = 9 * PROFILE.prefill_seconds(1000)  # and more: later chunks read what was stored
    assert summary["time_between_tokens"]["p99"] > stall
    assert summary["time_between_tokens"]["p50"] < stall / 9


# One run, two ways to count it.


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_a_file_gives_the_numbers_that_were_counted_live(
    name: str, async_scheduling: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("w", encoding="utf-8") as out:
        jobs = parse_synthetic(WORKLOAD.format(7)).generate()
        live = simulate(
            jobs, preset(name, **SMALL), PROFILE, async_scheduling=async_scheduling, trace=out
        ).metrics
    first, *steps = read_trace(file)
    metrics = Metrics(first)
    for line in steps:
        metrics.add(line)
    assert summarize(metrics) == summarize(live)
    assert json.loads(json.dumps(summarize(live))) == summarize(live)
    assert metrics.config == live.config


# Fairness, deadlines, percentiles.


def test_equal_clients_served_equally_are_fair() -> None:
    space = TokenSpace()
    jobs = [
        WorkloadRequest(
            id=str(i), pieces=(space.take(20),), num_output=9, max_tokens=9, client=f"c{i % 4}"
        )
        for i in range(16)
    ]
    summary = summarize(simulate(jobs, preset(max_num_seqs=16), PROFILE).metrics)
    assert summary["clients"] == 4 and summary["fairness"] == pytest.approx(1.0)


def life(client: str, admitted: float, finished: float, arrival: float = 0.0) -> Life:
    return Life(arrival, client, None, 50, admitted, admitted, finished, 50, "stop")


def test_where_nobody_queues_everybody_is_treated_alike() -> None:
    assert fairness([]) == 1.0
    assert fairness([life("a", 0.0, 1.0), life("b", 0.0, 50.0)]) == 1.0


def test_fairness_is_jains_index_of_what_clients_get_while_they_queue() -> None:
    # Both queue for 10 s. Meanwhile a is served 100 tokens and b 100: equal.
    a, b = life("a", 0.0, 10.0), life("b", 0.0, 10.0)
    queued = [life("a", 10.0, 20.0), life("b", 10.0, 20.0)]
    assert fairness([a, b, *queued]) == pytest.approx(1.0)
    # Now b gets nothing of its 10 s, or half of what a gets.
    assert fairness([a, *queued]) == pytest.approx(0.5)
    assert fairness([a, life("b", 0.0, 20.0), *queued]) == pytest.approx(1.5**2 / (2 * 1.25))


def test_a_fair_queue_is_fairer_than_first_come_first_served() -> None:
    text = "requests=200,arrivals=poisson(60),prompt=200,output=60,clients=6,skew=heavy(0.7)"
    fair, fcfs = (
        summarize(
            simulate(
                parse_synthetic(text).generate(),
                preset("vllm_v1", queue=queue, num_blocks=400, max_num_seqs=16),
                load_profile("llama3.1-8b-a100-80gb"),
            ).metrics
        )
        for queue in ("fair", "fcfs")
    )
    assert fair["fairness"] > fcfs["fairness"] + 0.1


def test_a_missed_deadline_is_one_that_the_end_came_after() -> None:
    def job(id: str, deadline: float | None) -> WorkloadRequest:
        return WorkloadRequest(
            id=id, pieces=(space.take(20),), num_output=9, max_tokens=9, deadline=deadline
        )

    space = TokenSpace()
    jobs = [job("none", None), job("soon", 1e-6), job("late", 1e6)]
    summary = summarize(simulate(jobs, preset(), PROFILE).metrics)
    assert (summary["deadlines"], summary["deadline_misses"]) == (2, 1)


@each_scheduling
def test_whoever_has_an_id_that_comes_back_is_counted_too(async_scheduling: int) -> None:
    jobs = [
        WorkloadRequest(
            id="a", arrival=float(count), pieces=(range(8),), num_output=count, max_tokens=count
        )
        for count in (2, 3, 4, 5)
    ]
    run = simulate(jobs, preset(**SMALL), PROFILE, async_scheduling=async_scheduling)
    assert sorted(life.num_output for life in run.metrics.lives.values()) == [2, 3, 4, 5]
    assert summarize(run.metrics)["requests"] == 4


def test_percentiles_lie_where_they_should() -> None:
    marks = percentiles(float(i) for i in range(101))
    assert marks == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert percentiles([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}


def test_a_run_of_nothing_is_all_zeros() -> None:
    summary = summarize(simulate([], preset(), PROFILE, trace=io.StringIO()).metrics)
    assert summary["requests"] == summary["steps"] == summary["seconds"] == 0
    assert summary["fairness"] == 1.0 and summary["time_between_tokens"]["p99"] == 0.0
