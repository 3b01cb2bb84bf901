"""The statistics of a run equal those of a log of every token, live and from a journal file."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway import PRESETS, Request, preset
from headway.events import Completed, Event, Planned, ended_by, preempted_by
from headway.executor.simulated import Independent
from headway.lab.cost import load_profile
from headway.lab.simulate import SimulationResult, simulate
from headway.lab.summary import Summary, fairness, summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.lines import (
    AbortedLine,
    AddedLine,
    CompletedLine,
    EndLine,
    PlannedLine,
    RequestLine,
)
from headway.record.reader import EventReader
from headway.record.stats import PERCENTILES, percentiles, stats_of
from headway.record.timeline import RequestTimeline, Timeline
from headway.record.writer import LineMaker, header
from tests.support.journals import PROFILE, Lines

SMALL = {"block_size": 4, "num_blocks": 44, "max_num_seqs": 8, "max_num_batched_tokens": 128}
WORKLOAD = (
    "requests=30,arrivals=bursty(250,3),prompt=uniform(5,60),output=uniform(1,40),max_tokens=40,"
    "prefix=2x16@0.5,clients=3,priorities=3,slack=uniform(0.02,0.4),n=2,seed={}"
)
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])


class Log:
    """Records the time of every token and every computed position, straight from the events."""

    def __init__(self) -> None:
        self.times: dict[Request, list[float]] = defaultdict(list)
        self.ends: dict[Request, float] = {}
        self.admitted: dict[Request, float] = {}
        self.totals: Counter[str] = Counter()
        self._reached: Counter[Request] = Counter()  # maximum number of tokens in the KV cache

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._plan(event)
        if isinstance(event, Completed):
            for request, tokens in event.outputs():
                self.times[request] += [event.result.ended] * len(tokens)
            for draft, num_right in event.verified():
                self._reached[draft.request] = draft.start + num_right + 1
            plan = event.plan
            self.totals["dropped"] += sum(not plan.tokens_kept.get(r, 1) for r in plan.decodes)
        for request in ended_by(event):
            self.ends[request] = event.time
        self.totals["preempted"] += len(preempted_by(event))

    def _plan(self, planned: Planned) -> None:
        plan = planned.plan
        for request, num_cached, num_swapped, *_ in plan.admitted:
            if request not in self.admitted:
                self.admitted[request] = planned.time
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
        for draft in plan.drafts:
            self.totals["computed"] += 1 + draft.count
            self.totals["drafts"] += 1
        self.totals["deferred"] += len(plan.deferred)

    def gaps(self) -> list[float]:
        return sorted(b - a for times in self.times.values() for a, b in pairwise(times))

    def longest_stalls(self) -> dict[Request, float]:
        """The largest gap of each request with two tokens."""
        return {
            request: max(b - a for a, b in pairwise(times))
            for request, times in self.times.items()
            if len(times) > 1
        }


def run(
    name: str, async_scheduling: int, seed: int = 0, workload: str = WORKLOAD, **changes: Any
) -> tuple[SimulationResult, Log]:
    log = Log()
    config = preset(name, **{**SMALL, **changes})
    jobs = parse_synthetic(workload.format(seed)).generate()
    jobs = [replace(job, accept=Independent(0.6)) for job in jobs]
    return simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, observers=[log]), log


def nearest(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else 0.0


def check(summary: Summary, log: Log) -> None:
    """Compare a summary with the log."""
    ttft = percentiles(times[0] - r.arrival for r, times in log.times.items())
    assert summary["ttft"] == pytest.approx(ttft)
    gaps = log.gaps()
    between = summary["time_between_tokens"]
    assert between["mean"] == pytest.approx(sum(gaps) / len(gaps) if gaps else 0.0)
    for percent in PERCENTILES:
        assert between[f"p{percent}"] == pytest.approx(nearest(gaps, percent), abs=1e-9), percent
    assert between["max"] == pytest.approx(max(gaps, default=0.0))
    stalls = percentiles(log.longest_stalls().values())
    assert summary["longest_stall"] == pytest.approx(stalls)
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
    timed = [r for r in log.ends if r.params.deadline is not None]
    assert summary["deadlines"] == len(timed)
    assert summary["deadline_misses"] == sum(log.ends[r] > (r.params.deadline or 0) for r in timed)


@each_scheduling
@pytest.mark.parametrize("name", PRESETS)
def test_the_summary_equals_the_log_for_every_preset(name: str, async_scheduling: int) -> None:
    result, log = run(name, async_scheduling, seed=async_scheduling)
    check(summarize(result.metrics), log)


@each_scheduling
@pytest.mark.parametrize("swap", ["recompute", "swap"])
def test_the_summary_equals_the_log_with_preemptions(swap: str, async_scheduling: int) -> None:
    for seed in range(2):
        result, log = run(
            "vllm_v1", async_scheduling, seed, num_blocks=30, swap=swap, num_host_blocks=30
        )
        summary = summarize(result.metrics)
        assert summary["preemptions"] > 10
        assert bool(summary["recomputed_tokens"]) or swap == "swap"
        assert (summary["preemptions_by_swap"] > 0) == (swap == "swap")
        check(summary, log)


@each_scheduling
def test_the_summary_equals_the_log_with_priority_preemptions(async_scheduling: int) -> None:
    result, log = run(
        "headway", async_scheduling, queue="priority(preempts=True)", headroom="watermark(0.0)"
    )
    summary = summarize(result.metrics)
    assert summary["preemptions_for_priority"] > 0
    check(summary, log)


@each_scheduling
@pytest.mark.parametrize("num_scheduler_steps", [2, 5])
def test_the_summary_equals_the_log_with_multi_step_decodes(
    num_scheduler_steps: int, async_scheduling: int
) -> None:
    calm = (
        "requests=12,arrivals=poisson(60),prompt=uniform(5,30),output=uniform(1,40),"
        "max_tokens=40,seed={}"
    )
    for seed in range(2):
        result, log = run(
            "vllm_v1", async_scheduling, seed, calm, num_scheduler_steps=num_scheduler_steps
        )
        check(summarize(result.metrics), log)


@each_scheduling
@pytest.mark.parametrize("draft", ["fixed(4)", "fixed(1)", "by_cost"])
def test_the_summary_equals_the_log_with_drafts(draft: str, async_scheduling: int) -> None:
    swaps = {"num_blocks": 30, "num_host_blocks": 30, "swap": "swap"}
    for seed, changes in enumerate(({}, {"num_blocks": 30}, swaps)):
        result, log = run("vllm_v1", async_scheduling, seed, draft=draft, **changes)
        totals = result.metrics.totals
        assert log.totals["drafts"] >= totals["num_draft_steps"] > 20
        assert 0.1 < totals["num_accepted"] / totals["num_drafted"] < 0.7
        check(summarize(result.metrics), log)


@each_scheduling
def test_the_summary_equals_the_log_with_deferred_decodes(async_scheduling: int) -> None:
    changes = {"max_num_batched_tokens": 5, "num_blocks": 300, "chunk": "split_any"}
    for seed in range(2):
        result, log = run("minivllm", async_scheduling, seed, **changes)
        assert log.totals["deferred"] > 10
        check(summarize(result.metrics), log)


@each_scheduling
def test_the_summary_equals_the_log_with_deferred_and_preempted_decodes(
    async_scheduling: int,
) -> None:
    short = "requests=20,prompt=uniform(3,8),output=uniform(20,40),max_tokens=40,seed={}"
    changes = {"max_num_batched_tokens": 3, "num_blocks": 16, "chunk": "split_any"}
    for seed in range(2):
        result, log = run("minivllm", async_scheduling, seed, short, **changes)
        assert log.totals["deferred"] > 10 and log.totals["preempted"] > 10
        check(summarize(result.metrics), log)


def test_a_token_sampled_after_the_stop_is_not_counted() -> None:
    result, log = run("vllm_v1", 1, num_blocks=400)
    assert log.totals["dropped"] > 5
    check(summarize(result.metrics), log)


def test_a_prompt_that_delays_decodes_raises_the_time_between_tokens() -> None:
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
    stall = 9 * PROFILE.prefill_seconds(1000)  # a lower bound: later chunks also read earlier ones
    assert summary["time_between_tokens"]["p99"] > stall
    assert summary["time_between_tokens"]["p50"] < stall / 9


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_a_journal_gives_the_same_numbers_as_the_live_run(name: str, async_scheduling: int) -> None:
    jobs, lines = parse_synthetic(WORKLOAD.format(7)).generate(), Lines()
    live = simulate(
        jobs, preset(name, **SMALL), PROFILE, async_scheduling=async_scheduling, trace=lines
    ).metrics
    stats = stats_of(lines.read())
    assert summarize(stats) == summarize(live)
    assert json.loads(json.dumps(summarize(live))) == summarize(live)
    assert stats.config == live.config


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_live_and_read_events_give_the_same_step_statistics(
    name: str, async_scheduling: int
) -> None:
    tight = {"num_blocks": 30, "num_host_blocks": 20, "swap": "swap", "headroom": "watermark(0.0)"}
    config = preset(name, **{**SMALL, **tight})
    live, read, lines = Timeline(), Timeline(), LineMaker()
    reader, phases = EventReader(header(config, bool(async_scheduling))), Counter[str]()

    def compare(event: Event) -> None:
        mine, other = live.follow(event), read.follow(reader.event(lines.line(event)))
        for field in ("now", "num_computed", "num_prompt", "num_output", "num_admitted", "num_hit"):
            assert getattr(mine, field) == getattr(other, field), field
        assert mine.first_tokens == other.first_tokens and sorted(mine.gaps) == sorted(other.gaps)
        for (_, one), (_, two) in zip(mine.finished, other.finished, strict=True):
            assert one.phases == two.phases and one.num_recomputed == two.num_recomputed
            assert [phase.name for phase in one.phases[:2]] == ["queued", "prefill"]
            assert [phase.start for phase in one.phases] == sorted(p.start for p in one.phases)
            phases.update(phase.name for phase in one.phases)

    jobs = parse_synthetic(WORKLOAD.format(3)).generate()
    simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, observers=[compare])
    assert not live.open and not read.open
    assert set(phases) >= {"queued", "prefill", "decode", "swapped"}


def test_an_id_reused_while_its_aborted_request_is_in_flight_is_two_requests() -> None:
    def planned(step: int, **work: Any) -> PlannedLine:
        return PlannedLine(step=step, t=float(step), running=1, waiting=0, free=9, **work)

    def completed(step: int, *ends: EndLine) -> CompletedLine:
        return CompletedLine(step=step, start=step, end=step + 1.0, finished=list(ends))

    def added(arrival: float) -> AddedLine:
        asked = RequestLine(id="a", arrival=arrival, prompt=[1, 2], max_tokens=4, limit=6)
        return AddedLine(arrival, [asked])

    prefill: dict[str, Any] = {"admitted": [("a", 0, 0, False)], "chunks": [("a", 0, 2, True)]}
    abort = EndLine(id="a", finish_reason="abort", output=[5])
    stop = EndLine(id="a", finish_reason="stop", output=[6, 7])
    stats = stats_of([
        header(preset(), True),
        added(0.0), planned(0, **prefill), completed(0), planned(1, decodes=1),
        AbortedLine(1.25, abort), added(1.5), completed(1),
        planned(2, **prefill), completed(2), planned(3, decodes=1), completed(3, stop),
    ])  # fmt: skip
    first, second = stats.requests
    assert (first.finish_reason, first.finished, first.num_output) == ("abort", 1.25, 1)
    assert (second.finish_reason, second.first_token, second.num_output) == ("stop", 3.0, 2)


def test_equal_service_gives_fairness_1() -> None:
    space = TokenSpace()
    jobs = [
        WorkloadRequest(
            id=str(i), pieces=(space.take(20),), num_output=9, max_tokens=9, client=f"c{i % 4}"
        )
        for i in range(16)
    ]
    summary = summarize(simulate(jobs, preset(max_num_seqs=16), PROFILE).metrics)
    assert summary["clients"] == 4 and summary["fairness"] == pytest.approx(1.0)


def times(client: str, admitted: float, finished: float) -> RequestTimeline:
    return RequestTimeline(
        "a", 0.0, 50, client, admitted=admitted, first_token=admitted, finished=finished,
        finish_reason="stop", num_output=50,
    )  # fmt: skip


def test_fairness_is_1_if_no_client_has_to_queue() -> None:
    assert fairness([]) == 1.0
    assert fairness([times("a", 0.0, 1.0), times("b", 0.0, 50.0)]) == 1.0


def test_fairness_is_jains_index_of_the_service_while_clients_queue() -> None:
    # Both clients queue for 10 s and receive 100 tokens in that time.
    a, b = times("a", 0.0, 10.0), times("b", 0.0, 10.0)
    queued = [times("a", 10.0, 20.0), times("b", 10.0, 20.0)]
    assert fairness([a, b, *queued]) == pytest.approx(1.0)
    # Client b receives nothing, or half of what client a receives.
    assert fairness([a, *queued]) == pytest.approx(0.5)
    assert fairness([a, times("b", 0.0, 20.0), *queued]) == pytest.approx(1.5**2 / (2 * 1.25))


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


def test_a_deadline_is_missed_if_the_request_finishes_after_it() -> None:
    def job(id: str, deadline: float | None) -> WorkloadRequest:
        return WorkloadRequest(
            id=id, pieces=(space.take(20),), num_output=9, max_tokens=9, deadline=deadline
        )

    space = TokenSpace()
    jobs = [job("none", None), job("soon", 1e-6), job("late", 1e6)]
    summary = summarize(simulate(jobs, preset(), PROFILE).metrics)
    assert (summary["deadlines"], summary["deadline_misses"]) == (2, 1)


@each_scheduling
def test_requests_that_reuse_an_id_are_counted_separately(async_scheduling: int) -> None:
    jobs = [
        WorkloadRequest(
            id="a", arrival=float(count), pieces=(range(8),), num_output=count, max_tokens=count
        )
        for count in (2, 3, 4, 5)
    ]
    run = simulate(jobs, preset(**SMALL), PROFILE, async_scheduling=async_scheduling)
    assert sorted(each.num_output for each in run.metrics.requests) == [2, 3, 4, 5]
    assert summarize(run.metrics)["requests"] == 4


def test_percentiles_have_the_expected_values() -> None:
    marks = percentiles(float(i) for i in range(101))
    expected = {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
    assert marks == pytest.approx(expected)
    assert percentiles([]) == dict.fromkeys(expected, 0.0)
    assert percentiles([3.0]) == dict.fromkeys(expected, 3.0)


def test_a_run_without_requests_gives_zeros() -> None:
    summary = summarize(simulate([], preset(), PROFILE, trace=Lines()).metrics)
    assert summary["requests"] == summary["steps"] == summary["seconds"] == 0
    assert summary["fairness"] == 1.0 and summary["time_between_tokens"]["p99"] == 0.0
