"""The simulator: virtual time, scripted outputs, and reproducible runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway import PRESETS, Engine, Plan, Scheduler, VirtualClock, preset
from headway.executor.simulated import (
    Acceptance,
    Histogram,
    Independent,
    Script,
    SimulatedExecutor,
)
from headway.lab.cost import load_profile
from headway.lab.simulate import SimulationResult, simulate, with_profile
from headway.lab.summary import summarize
from headway.lab.workload.request import EOS, TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.reader import split_header
from headway.record.writer import LineMaker
from headway.request import Request, RequestParams
from headway.scheduler.policies.swap import swap_if_cheaper
from tests.support.events import Events
from tests.support.journals import Lines

PROFILE = load_profile("qwen3-0.6b-h200")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 128}
CROWDED = (
    "requests=24,arrivals=poisson(400),prompt=uniform(5,60),output=uniform(1,30),max_tokens=30,"
    "prefix=2x16@0.5,n=2,clients=2,priorities=2,accept=uniform(0.2,0.9),seed=4"
)


def record(
    text: str, async_scheduling: int, name: str = "headway", **changes: Any
) -> tuple[SimulationResult, Lines]:
    lines, config = Lines(), preset(name, **{**SMALL, **changes})
    run = simulate(
        parse_synthetic(text).generate(),
        config,
        PROFILE,
        async_scheduling=async_scheduling,
        trace=lines,
    )
    return run, lines


def test_a_virtual_clock_only_moves_forwards() -> None:
    clock = VirtualClock()
    assert clock.now() == 0.0
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock.now() == 2.0


def test_plans_run_in_order_and_waiting_advances_the_clock() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, lambda plan: 2.0, host_seconds=0.5)
    first, second = executor.launch(Plan(0)), executor.launch(Plan(1))
    assert clock.now() == 1.0  # host time of two launches
    one, two = first.wait(), second.wait()
    assert (one.started, one.ended) == (0.5, 2.5)
    assert (two.started, two.ended) == (2.5, 4.5) and clock.now() == 4.5


@pytest.mark.parametrize("name", PRESETS)
def test_async_scheduling_hides_host_time(name: str) -> None:
    text = "requests=12,prompt=uniform(5,40),output=uniform(5,30)"
    slow = replace(PROFILE, machine=replace(PROFILE.machine, host_seconds=0.002))
    jobs, seconds, num_steps = parse_synthetic(text).generate(), [], []
    for async_scheduling in (0, 1):
        summary = summarize(
            simulate(jobs, preset(name, **SMALL), slow, async_scheduling=async_scheduling).metrics
        )
        seconds.append(summary["seconds"])
        num_steps.append(summary["steps"])
    assert seconds[1] < 0.9 * seconds[0]
    assert seconds[0] > 0.002 * num_steps[0]


def test_async_scheduling_changes_nothing_without_host_time() -> None:
    ideal = replace(PROFILE, machine=replace(PROFILE.machine, host_seconds=0.0))
    jobs = parse_synthetic("requests=6,prompt=uniform(5,20),output=9").generate()
    runs = [simulate(jobs, preset(), ideal, async_scheduling=d).metrics.ended_at for d in (0, 1)]
    assert runs[0] == pytest.approx(runs[1])


@each_scheduling
def test_idle_time_is_skipped_and_requests_start_after_they_arrive(async_scheduling: int) -> None:
    space = TokenSpace()
    jobs = [
        WorkloadRequest(
            id=str(i), arrival=1000.0 * i, pieces=(space.take(9),), num_output=3, max_tokens=3
        )
        for i in range(4)
    ]
    run = simulate(jobs, preset(), PROFILE, async_scheduling=async_scheduling)
    for job in jobs:
        (life,) = [each for each in run.metrics.requests if each.id == job.id]
        assert job.arrival == life.arrival <= life.admitted < job.arrival + 1
        assert life.admitted < life.first_token < life.finished < job.arrival + 1
    assert 3000 < run.metrics.ended_at < 3001
    assert len(run.metrics.steps["running"]) == 12


def scripted(request: Request) -> list[int]:
    script = request.params.sampling
    assert isinstance(script, Script)
    full = [script.filler] * (script.num_output - 1) + [script.end]
    most = request.params.max_tokens or 0
    return full if script.num_output < most else [script.filler] * (most - 1) + [full[-1]]


STRAINS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 400},
    "recompute": {"num_blocks": 30, "headroom": "watermark(0.0)"},
    "swap": {"num_blocks": 30, "headroom": "watermark(0.0)", "swap": "swap", "num_host_blocks": 30},
    "multi-step": {"num_scheduler_steps": 3, "num_blocks": 60},
    "deferral": {
        "batching": "prefill_first_charge_cached",
        "max_num_batched_tokens": 5,
        "num_blocks": 100,
    },
    "priority": {"queue": "priority(preempts=True)", "headroom": "watermark(0.0)"},
    "drafts": {"draft": "fixed(4)", "num_blocks": 100},
    "drafts and swap": {
        "draft": "fixed(2)", "num_blocks": 30, "headroom": "watermark(0.0)", "swap": "swap",
        "num_host_blocks": 30,
    },
    "some drafts": {"draft": "by_cost(token=1e-3)", "max_num_batched_tokens": 40, "num_blocks": 50},
}  # fmt: skip


@each_scheduling
@pytest.mark.parametrize("strain", STRAINS)
def test_every_request_generates_its_script(strain: str, async_scheduling: int) -> None:
    events = Events()
    jobs = parse_synthetic(CROWDED).generate()
    config = preset("vllm_v1", **{**SMALL, **STRAINS[strain]})

    run = simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, observers=[events])
    ended = events.ended
    assert len(ended) == sum(job.n for job in jobs) and not run.rejected
    by_id = {job.id: job for job in jobs}
    for request in ended:
        job = by_id[request.id.split("/")[0]]
        assert request.num_generated == job.num_output
        assert request.finish_reason == ("stop" if job.num_output < job.max_tokens else "length")
        assert list(request.output)[:-1] == scripted(request)[:-1]
        if request.finish_reason == "stop":
            assert request.output[-1] == request.stop_token == EOS
    preempts = strain in ("recompute", "swap", "priority")
    assert not preempts or run.metrics.totals["swaps"] + run.metrics.totals["recomputes"] > 3
    assert ("draft" in strain) == (run.metrics.totals["num_accepted"] > 50)


@each_scheduling
def test_an_output_longer_than_max_tokens_is_cut(async_scheduling: int) -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, lambda plan: 1.0)
    engine = Engine(Scheduler(preset(**SMALL)), executor, clock, async_scheduling=async_scheduling)
    params = RequestParams(max_tokens=3, eos_ids=frozenset({EOS}), sampling=Script(9, 7, EOS))
    (request,) = engine.add("a", [1, 2, 3], params)
    engine.run()
    assert list(request.output) == [7, 7, 7] and request.finish_reason == "length"


def test_a_request_without_a_script_fails_an_assertion() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, lambda plan: 1.0)
    scheduler = Scheduler(preset(**SMALL))
    scheduler.add(Request("a", [1, 2], RequestParams()))
    with pytest.raises(AssertionError, match="no script"):
        executor.launch(scheduler.schedule())


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm", "static"])
def test_a_run_is_the_same_every_time(name: str, async_scheduling: int) -> None:
    assert record(CROWDED, async_scheduling, name)[1] == record(CROWDED, async_scheduling, name)[1]


@each_scheduling
def test_requests_that_can_never_run_are_listed_and_others_finish(async_scheduling: int) -> None:
    space = TokenSpace()
    lengths = [10, 1000, 20, 1, 500, 30]
    jobs = [
        WorkloadRequest(
            id=f"r{i}", arrival=i / 1000, pieces=(space.take(n),), num_output=5, max_tokens=5
        )
        for i, n in enumerate(lengths)
    ]
    progress: list[int] = []
    run = simulate(
        jobs, preset(**SMALL), PROFILE, async_scheduling=async_scheduling, progress=progress.append
    )
    assert [id for id, _ in run.rejected] == ["r1", "r4"]
    assert all(id in reason and "40" in reason for id, reason in run.rejected)
    summary = summarize(run.metrics, len(run.rejected))
    assert (summary["completed"], summary["requests"], summary["rejected"]) == (4, 6, 2)
    assert sum(progress) == len(jobs)


def test_a_run_without_requests_ends_at_once() -> None:
    run = simulate([], preset(), PROFILE)
    assert not run.rejected and not len(run.metrics.steps["running"])


def test_observers_see_every_event_of_the_trace() -> None:
    events, lines = Events(), Lines()
    jobs = parse_synthetic("requests=5,prompt=9,output=4").generate()
    simulate(jobs, preset(), PROFILE, observers=[events], trace=lines)
    assert lines.read()[1:] == [*map(LineMaker().line, events)]


def test_the_default_swap_rule_takes_the_profiles_costs() -> None:
    config = with_profile(preset("vllm"), PROFILE)
    assert config.swap == PROFILE.swap_if_cheaper() != swap_if_cheaper()
    chosen = swap_if_cheaper(copy=1.0)
    assert with_profile(preset("vllm", swap=chosen), PROFILE).swap == chosen
    assert with_profile(preset("vllm", swap="recompute"), PROFILE).swap == preset("static").swap
    _, lines = record("requests=2,prompt=5,output=2", 0, "vllm")
    head, _ = split_header(lines.read())
    assert preset(swap=head.config["swap"]).swap == PROFILE.swap_if_cheaper()


def test_the_models_length_limits_requests() -> None:
    assert with_profile(preset(), PROFILE).max_model_len == PROFILE.model.max_model_len
    assert with_profile(preset(max_model_len=99), PROFILE).max_model_len == 99
    short = replace(PROFILE, model=replace(PROFILE.model, max_model_len=20))
    jobs = parse_synthetic("requests=3,prompt=10,output=50").generate()
    run = simulate(jobs, preset(), short)
    assert {life.num_output for life in run.metrics.requests} == {10}
    long = parse_synthetic("requests=3,prompt=20,output=50").generate()
    assert len(simulate(long, preset(), short).rejected) == 3


def verifications(
    config: Any, async_scheduling: int, text: str = CROWDED
) -> set[tuple[str, int, int]]:
    """Every verified place, with the number of drafts that were right there."""
    events = Events()
    jobs = parse_synthetic(text).generate()
    simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, observers=[events])
    return {
        (draft.request.id, draft.start, num_right)
        for event in events.completed for draft, num_right in event.verified()
    }  # fmt: skip


def test_which_drafts_are_right_does_not_depend_on_the_schedule() -> None:
    """Without limits of blocks or tokens a request is verified at the same places in every run."""
    roomy = {**SMALL, "num_blocks": 2000, "max_num_batched_tokens": 4000, "draft": "fixed(3)"}
    configs = [preset(name, **{**roomy, "max_num_seqs": n}) for name, n in SCHEDULES]
    runs = [verifications(config, is_async) for config in configs for is_async in (0, 1)]
    assert len(runs[0]) > 200 and all(run == runs[0] for run in runs)
    assert verifications(configs[0], 0, CROWDED.replace("seed=4", "seed=5")) != runs[0]


SCHEDULES = (("vllm_v1", 64), ("vllm_v1", 3), ("static", 5), ("nano_vllm", 8))


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_independent_drafts_are_right_as_often_as_they_say(share: float, count: int) -> None:
    found = [Independent(share).num_right("a", place, count) for place in range(0, 30_000, 10)]
    expected = sum(share**number for number in range(1, count + 1))
    assert sum(found) / len(found) == pytest.approx(expected, abs=0.12)
    assert max(found) <= count


def test_a_histogram_gives_each_length_its_share_and_none_beyond() -> None:
    accept = Histogram((3.0, 2.0, 0.0, 5.0))
    found = [accept.num_right("a", place, 8) for place in range(4000)]
    for length, weight in enumerate(accept.weights):
        assert found.count(length) / 4000 == pytest.approx(weight / 10, abs=0.03)
    assert max(found) == 3
    fewer = [accept.num_right("a", place, 1) for place in range(4000)]
    assert fewer == [min(each, 1) for each in found]


@pytest.mark.parametrize("accept", [None, Independent(0.0), Independent(1.0), Histogram((0, 0, 1))])
def test_drafts_give_the_tokens_that_are_right_and_one_more(accept: Acceptance | None) -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, PROFILE.step_seconds)
    config = preset(**SMALL, draft="fixed(4)", drafter="repeat_last")
    events = Events()
    engine = Engine(Scheduler(config), executor, clock, observers=[events])
    params = RequestParams(
        max_tokens=20, eos_ids=frozenset({EOS}), sampling=Script(18, 7, EOS, accept)
    )
    (request,) = engine.add("a", [1, 2, 3], params)
    engine.run()
    assert list(request.output) == [7] * 17 + [EOS] and request.finish_reason == "stop"
    right = 0 if accept is None else accept.num_right("a", 3, 4)
    gained = [len(tokens) for each in events.completed for tokens in each.result.draft_tokens]
    assert gained[0] == right + 1 and sum(gained) >= 15


def test_verifying_drafts_takes_the_time_of_their_rows() -> None:
    events = Events()
    jobs = parse_synthetic("requests=3,prompt=40,output=30,accept=0.5").generate()
    config = preset(**{**SMALL, "num_blocks": 200}, draft="fixed(5)")
    simulate(jobs, config, PROFILE, observers=[events])
    steps = [event for event in events.completed if event.plan.drafts and not event.plan.decodes]
    assert len(steps) > 5
    for event in steps:
        drafts = event.plan.drafts
        rows, reads = sum(draft.count + 1 for draft in drafts), sum(draft.end for draft in drafts)
        pairs = sum(sum(range(draft.start + 1, draft.end + 1)) for draft in drafts)
        seconds = event.result.ended - event.result.started
        assert seconds == pytest.approx(PROFILE.pass_seconds(rows, rows, reads, pairs))


def test_drafts_make_async_scheduling_wait_for_the_host() -> None:
    slow = replace(PROFILE, machine=replace(PROFILE.machine, host_seconds=0.002))
    jobs = parse_synthetic("requests=4,prompt=20,output=60,accept=0.5").generate()
    plain, drafted = [
        [
            simulate(jobs, preset(draft=draft), slow, async_scheduling=is_async).metrics.ended_at
            for is_async in (False, True)
        ]
        for draft in ("none", "fixed(2)")
    ]
    assert plain[1] < 0.7 * plain[0]
    assert drafted[1] > 0.95 * drafted[0]


def test_the_summary_counts_drafts() -> None:
    jobs = parse_synthetic("requests=40,prompt=20,output=100,accept=0.6").generate()
    summary = summarize(simulate(jobs, preset(draft="fixed(3)"), PROFILE).metrics)
    assert summary["accepted_share"] == pytest.approx((0.6 + 0.36 + 0.216) / 3, rel=0.05)
    assert summary["tokens_per_verification"] == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.05)
    assert summary["output_tokens"] == 4000 and summary["drafted_tokens"] > 4000
    plain = summarize(simulate(jobs, preset(), PROFILE).metrics)
    assert (
        plain["drafted_tokens"] == plain["accepted_share"] == plain["tokens_per_verification"] == 0
    )
