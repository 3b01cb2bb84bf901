"""The replay of a recorded run takes identical decisions."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import pytest
from msgspec import structs

from headway import PRESETS, Completed, Config, Engine, RealClock, Scheduler, VirtualClock, preset
from headway.config import SchedulerView
from headway.errors import ReplayMismatch
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.plan import Column, Plan, StepResult
from headway.record.diff import decisions
from headway.record.lines import (
    AbortedLine,
    AddedLine,
    CompletedLine,
    EndLine,
    FailedLine,
    HeaderLine,
    Line,
    PlannedLine,
    ResetLine,
    ends_of,
    time_of,
)
from headway.record.reader import events_of
from headway.record.replay import check_replay
from headway.record.stats import RunStats, stats_of
from headway.record.writer import header
from headway.request import Request, RequestParams
from headway.scheduler.policies.presets import read_preset
from tests.support.journals import Journal, Recorder, replay, simulated

PROFILE = load_profile("qwen3-0.6b-h200")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
each_preset = pytest.mark.parametrize("name", PRESETS)
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 128}
WORKLOADS = {
    "at once": "requests=16,prompt=uniform(5,60),output=uniform(1,30)",
    "far between": "requests=8,arrivals=poisson(5),prompt=uniform(5,60),output=uniform(1,9)",
    "shared prefixes": "requests=16,arrivals=poisson(300),prompt=uniform(5,30),"
    "output=uniform(1,30),prefix=2x32@0.6,seed=1",
    "samples": "requests=9,arrivals=poisson(200),prompt=uniform(5,60),output=uniform(1,30),"
    "max_tokens=30,n=2,seed=2",
    "unknown lengths": "requests=16,arrivals=bursty(200,3),prompt=uniform(5,60),"
    "output=uniform(1,40),max_tokens=40,prefix=1x16@0.5,clients=3,priorities=3,"
    "slack=uniform(0.01,0.3),seed=3",
}
each_workload = pytest.mark.parametrize("workload", WORKLOADS)


AnyLine = TypeVar("AnyLine", bound=Line)


def record(
    workload: str, async_scheduling: int, name: str, *, trace_blocks: bool = False, **changes: Any
) -> Journal:
    return simulated(
        parse_synthetic(workload).generate(), preset(name, **{**SMALL, **changes}), PROFILE,
        async_scheduling=bool(async_scheduling), trace_blocks=trace_blocks,
    )  # fmt: skip


def lines_of(journal: Journal, kind: type[AnyLine]) -> list[AnyLine]:
    return [line for line in journal if isinstance(line, kind)]


def plans(journal: Journal) -> list[PlannedLine]:
    return lines_of(journal, PlannedLine)


def ends(journal: Journal) -> list[EndLine]:
    return [end for line in lines_of(journal, object) for end in ends_of(line)]


def num_steps(journal: Journal) -> int:
    return len(lines_of(journal, CompletedLine))


@each_scheduling
@each_preset
@each_workload
def test_a_simulated_run_replays(workload: str, name: str, async_scheduling: int) -> None:
    lines = record(WORKLOADS[workload], async_scheduling, name)
    assert check_replay(lines) == num_steps(lines) > 10


@each_scheduling
def test_a_run_of_a_model_with_sliding_windows_replays(async_scheduling: int) -> None:
    changes = {"sliding_window": 10, "num_window_blocks": 26, "num_blocks": 99}
    lines = record(WORKLOADS["shared prefixes"], async_scheduling, "vllm_v1", **changes)
    assert isinstance(lines[0], HeaderLine) and lines[0].config.items() >= changes.items()
    assert any(each[1] == "window_blocks" for plan in plans(lines) for each in plan.blocked)
    check_replay(lines)


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "vllm_v1", "minivllm"])
def test_a_run_with_swaps_replays(name: str, async_scheduling: int) -> None:
    changes = {"swap": "swap", "num_host_blocks": 30, "headroom": "watermark(0.0)"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, name, **changes)
    assert any(each.kind == "swap" for plan in plans(lines) for each in plan.preempted)
    check_replay(lines)


@each_scheduling
def test_a_run_with_block_numbers_replays_with_the_same_blocks(async_scheduling: int) -> None:
    lines = record(WORKLOADS["shared prefixes"], async_scheduling, "vllm_v1", trace_blocks=True)
    assert check_replay(lines) == num_steps(lines)
    wrong = next(plan.blocks for plan in plans(lines) if plan.blocks and plan.blocks.new)
    wrong.new[0] += 1
    with pytest.raises(ReplayMismatch, match="blocks"):
        check_replay(lines)


@each_scheduling
def test_a_run_with_a_reset_of_the_cache_replays(async_scheduling: int) -> None:
    """The same prompt is computed again after a reset, in the run and in its replay."""
    engine, recorder = engine_of(preset("vllm_v1", **SMALL), async_scheduling)
    script = RequestParams(max_tokens=4, sampling=Script(4, filler=7, end=0))
    for number in range(4):
        engine.add(str(number), range(40), script)
        engine.run()
        if number == 1:
            assert engine.scheduler.reset_cache()
    lines = recorder.lines.read()
    cached = [num_cached for plan in plans(lines) for _, num_cached, *_ in plan.admitted]
    assert cached == [0, 39, 0, 39]
    assert [line.is_forced for line in lines_of(lines, ResetLine)] == [False]
    assert check_replay(lines) == num_steps(lines)


@each_scheduling
def test_a_run_with_discarded_outputs_replays(async_scheduling: int) -> None:
    changes = {"swap": "discard_output", "headroom": "watermark(0.0)"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "deep_dive", **changes)
    kinds = {each.kind for plan in plans(lines) for each in plan.preempted}
    assert kinds == {"discard"}
    assert check_replay(lines) == num_steps(lines)


QUEUES = [
    "fcfs(2)",
    "priority(0.01, True, max_overtakes=2)",
    "shortest_first(max_overtakes=3)",
    "fair(1)",
    "earliest_deadline(max_overtakes=2)",
]


@each_scheduling
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("headroom", ["back_off(watermark(0.05), 0.1)", "future_peak(learned)"])
def test_every_queue_and_headroom_rule_replays(
    queue: str, headroom: str, async_scheduling: int
) -> None:
    workload = WORKLOADS["unknown lengths"].replace("requests=16", "requests=10")
    lines = record(workload, async_scheduling, "headway", queue=queue, headroom=headroom)
    assert sum(len(plan.blocked) for plan in plans(lines)) > 10 and len(ends(lines)) >= 10
    check_replay(lines)


@each_scheduling
def test_a_multi_step_run_replays(async_scheduling: int) -> None:
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "vllm_v1", num_scheduler_steps=4)
    assert any(plan.num_steps > 1 for plan in plans(lines))
    check_replay(lines)


@each_scheduling
def test_a_run_with_deferred_decodes_replays(async_scheduling: int) -> None:
    changes = {"max_num_batched_tokens": 5, "num_blocks": 200, "chunk": "split_any"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "minivllm", **changes)
    assert any(plan.deferred for plan in plans(lines))
    check_replay(lines)


# Runs with aborts, in real time, and with failures.


def drive(
    engine: Engine, jobs: list[WorkloadRequest], aborts: dict[int, list[str]], num_at_once: int = 2
) -> None:
    """Add jobs before every step; `aborts` has the ids to abort before each step."""
    left, step = list(jobs), 0
    while left or engine.has_work or step <= max(aborts, default=0):
        for job in left[:num_at_once]:
            engine.add(job.id, job.prompt(), job.params())
        del left[:num_at_once]
        for id in aborts.get(step, ()):
            engine.abort(id)
        engine.step()
        step += 1


def engine_of(config: Config, async_scheduling: int) -> tuple[Engine, Recorder]:
    clock, recorder = VirtualClock(), Recorder(config, bool(async_scheduling))
    executor = SimulatedExecutor(clock, PROFILE.step_seconds, 0.0005)
    engine = Engine(
        Scheduler(config), executor, clock, async_scheduling=bool(async_scheduling),
        observers=[recorder],
    )  # fmt: skip
    return engine, recorder


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "nano_vllm", "vllm", "minivllm", "static"])
def test_a_run_with_aborts_replays(name: str, async_scheduling: int) -> None:
    jobs, rng = parse_synthetic(WORKLOADS["unknown lengths"]).generate(), Random(name)
    for swap in ("recompute", "swap"):
        config = preset(name, **SMALL, swap=swap, num_host_blocks=20, headroom="watermark(0.0)")
        engine, recorder = engine_of(config, async_scheduling)
        aborts = {rng.randrange(3 + i, 40 + i): [job.id] for i, job in enumerate(jobs) if i % 3}
        drive(engine, jobs, aborts)
        lines = recorder.lines.read()
        assert sum(end.finish_reason == "abort" for end in ends(lines)) >= 3
        check_replay(lines)


def abort_one(engine: Engine) -> None:
    """Add two requests and abort one before the first step."""
    drive(engine, parse_synthetic("requests=2,prompt=8,output=4").generate(), {0: ["1"]})


@each_scheduling
def test_an_abort_before_the_first_step_replays(async_scheduling: int) -> None:
    engine, recorder = engine_of(preset(**SMALL), async_scheduling)
    abort_one(engine)
    check_replay(recorder.lines.read())


def abort_all(engine: Engine) -> None:
    """Add one request, abort it before the first step, then serve another."""
    first, second = parse_synthetic("requests=2,prompt=8,output=4").generate()
    engine.add(first.id, first.prompt(), first.params())
    engine.abort(first.id)
    engine.step()
    engine.add(second.id, second.prompt(), second.params())
    engine.run()


@each_scheduling
def test_an_abort_of_the_only_request_before_the_first_step_replays(async_scheduling: int) -> None:
    engine, recorder = engine_of(preset(**SMALL), async_scheduling)
    abort_all(engine)
    check_replay(recorder.lines.read())


@each_scheduling
@pytest.mark.parametrize("act", [abort_one, abort_all])
def test_an_abort_before_the_first_step_is_counted(
    act: Callable[[Engine], None], async_scheduling: int
) -> None:
    engine, recorder = engine_of(preset(**SMALL), async_scheduling)
    act(engine)
    stats = stats_of(recorder.lines.read())
    assert stats.totals["finished_abort"] == stats.totals["finished_length"] == 1


@each_scheduling
def test_an_abort_of_the_only_running_request_replays(async_scheduling: int) -> None:
    engine, recorder = engine_of(preset(**SMALL), async_scheduling)
    first, second = parse_synthetic("requests=2,prompt=8,output=9").generate()
    engine.add(first.id, first.prompt(), first.params())
    for _ in range(4):
        engine.step()
    engine.abort(first.id)
    engine.step()
    engine.add(second.id, second.prompt(), second.params())
    engine.run()
    check_replay(recorder.lines.read())


@dataclass(slots=True)
class RealHandle:
    """A plan that takes real time to run."""

    clock: RealClock
    result: StepResult
    seconds: float

    def wait(self) -> StepResult:
        time.sleep(self.seconds)
        self.result.ended = self.clock.now()
        return self.result


class RealExecutor:
    """Sleeps for a short time and returns random tokens."""

    def __init__(self, clock: RealClock, rng: Random, seconds: float) -> None:
        self._clock, self._rng, self._seconds = clock, rng, seconds

    def launch(self, plan: Plan) -> RealHandle:
        num_columns = plan.num_steps if plan.decodes else 0
        columns: list[Column] = [[self._token() for _ in plan.decodes] for _ in range(num_columns)]
        first_tokens = [self._token() for chunk in plan.chunks if chunk.is_last]
        result = StepResult(columns, first_tokens, started=self._clock.now())
        return RealHandle(self._clock, result, self._seconds)

    def _token(self) -> int:
        return self._rng.randrange(20)


def record_in_real_time(
    name: str, async_scheduling: int, seconds: float, act: Callable[..., None]
) -> Journal:
    clock, rng = RealClock(), Random(name)
    config = preset(name, **SMALL, headroom="watermark(0.0)", num_host_blocks=12, swap="swap")
    recorder = Recorder(config, bool(async_scheduling))
    executor = RealExecutor(clock, rng, seconds)
    engine = Engine(
        Scheduler(config), executor, clock, async_scheduling=bool(async_scheduling),
        observers=[recorder],
    )  # fmt: skip
    act(engine, rng)
    return recorder.lines.read()


def serve_with_reused_ids(engine: Engine, rng: Random) -> None:
    """Reuse three ids as soon as they are free, and abort some requests."""
    for number in range(120):
        free = [id for id in ("a", "b", "c") if id not in engine.scheduler.requests]
        if free:
            params = RequestParams(max_tokens=rng.randrange(1, 20), stop_ids=frozenset({0}))
            engine.add(free[0], [number] * rng.randrange(1, 40), params)
        engine.step()
        if number % 5 == 4 and free:
            engine.abort(free[0])
    engine.run()


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm_v1", "nano_vllm"])
def test_requests_that_reuse_an_id_replay_separately(name: str, async_scheduling: int) -> None:
    lines = record_in_real_time(name, async_scheduling, 0.0, serve_with_reused_ids)
    assert len(ends(lines)) >= 10 and {end.id for end in ends(lines)} == {"a", "b", "c"}
    assert {"stop", "length", "abort"} == {end.finish_reason for end in ends(lines)}
    check_replay(lines)


def serve_random_requests(engine: Engine, rng: Random) -> None:
    stops = frozenset({0})
    for i in range(40):
        params = RequestParams(
            max_tokens=rng.randrange(1, 40), stop_ids=stops, min_tokens=rng.randrange(4),
            priority=i % 2, client=f"c{i % 3}", n=1 + i % 2,
        )  # fmt: skip
        engine.add(f"r{i}", [rng.randrange(3)] * rng.randrange(1, 40), params)
        for _ in range(rng.randrange(4)):
            engine.step()
        if i % 7 == 6:
            engine.abort(f"r{i - 1}")
    engine.run()


@each_scheduling
@pytest.mark.parametrize("seconds", [0.0, 0.0001])
@pytest.mark.parametrize("name", ["headway", "vllm_v1", "nano_vllm"])
def test_a_run_in_real_time_replays(name: str, async_scheduling: int, seconds: float) -> None:
    lines = record_in_real_time(name, async_scheduling, seconds, serve_random_requests)
    assert any(plan.preempted for plan in plans(lines))
    assert check_replay(lines) == num_steps(lines)


@each_scheduling
def test_a_run_with_a_failed_step_replays(async_scheduling: int) -> None:
    engine, recorder = engine_of(preset(**SMALL), async_scheduling)
    launch = engine.executor.launch
    failing = {6}

    class Failing:
        def launch(self, plan: Plan) -> Any:
            if plan.step in failing:
                raise RuntimeError("device lost")
            return launch(plan)

    engine.executor = Failing()
    jobs = parse_synthetic("requests=14,prompt=uniform(5,30),output=uniform(5,20)").generate()
    drive(engine, jobs, {}, num_at_once=14)
    lines = recorder.lines.read()
    (failed,) = lines_of(lines, FailedLine)
    assert "device lost" in failed.reason and failed.ended
    assert {end.finish_reason for end in failed.ended} == {"error"}
    num_lost = 1 + async_scheduling  # plans without a result
    assert check_replay(lines) == num_steps(lines) + num_lost
    failed.ended.pop()
    with pytest.raises(ReplayMismatch, match="step"):
        check_replay(lines)


def failing_headroom(request: Request, view: SchedulerView) -> int:
    """Fails by the state alone, so that a replay can repeat it."""
    if (5 * view.num_free + 3 * len(list(view.running)) + request.history.serial) % 11 == 0:
        raise ValueError("no answer")
    return 0


def failing_victim(request: Request, view: SchedulerView) -> int:
    """Fails after a preemption, in a step that needs more than one."""
    if view.num_free:
        raise ValueError("no answer")
    return request.history.serial


@each_scheduling
@pytest.mark.parametrize("swap", ["recompute", "swap", "discard_output"])
def test_a_run_with_failing_policies_replays(swap: str, async_scheduling: int) -> None:
    """Also if one fails while a step is in flight, which is completed before the others go on."""
    config = preset(
        "vllm_v1", headroom=failing_headroom, victim=failing_victim, swap=swap, block_size=4,
        num_blocks=6, max_num_seqs=4, num_host_blocks=12,
    )  # fmt: skip
    engine, recorder = engine_of(config, async_scheduling)
    jobs = parse_synthetic("requests=60,prompt=4,output=uniform(1,15),seed=1").generate()
    drive(engine, list(jobs), {}, num_at_once=4)
    lines = recorder.lines.read()
    failed = lines_of(lines, FailedLine)
    assert len(failed) >= 5 and all("no answer" in line.reason for line in failed)
    assert sum(bool(plan.preempted) for plan in plans(lines) if plan.has_failed) >= 1
    check_replay(
        lines, own=[f"{__name__}:{name}" for name in ("failing_headroom", "failing_victim")]
    )
    stats = RunStats(header(config, bool(async_scheduling)))
    for event in recorder.events:
        stats(event)
    assert stats.totals == stats_of(lines).totals


def test_an_abort_of_an_unknown_id_is_a_mismatch() -> None:
    lines = record(WORKLOADS["at once"], 0, "headway")
    end = EndLine(id="unknown", finish_reason="abort", output=0)
    lines.insert(lines.index(lines_of(lines, CompletedLine)[0]) + 1, AbortedLine(0.0, end))
    with pytest.raises(ReplayMismatch, match="step 1: .*unknown"):
        check_replay(lines)


def test_a_replay_has_the_recorded_times() -> None:
    lines = record(WORKLOADS["unknown lengths"], 0, "headway")
    header, *recorded = lines
    assert isinstance(header, HeaderLine)
    again = list(replay(events_of(lines), read_preset(header.config)))
    assert [event.time for event in again] == [time_of(line) for line in recorded]  # type: ignore[arg-type]
    steps = [event.result for event in again if isinstance(event, Completed)]
    assert [(result.started, result.ended) for result in steps] == [
        (line.start, line.end) for line in lines_of(lines, CompletedLine)
    ]


def change_chunk(lines: Journal) -> None:
    chunks = next(plan.chunks for plan in plans(lines)[4:] if plan.chunks)
    id, start, end, is_last = chunks[0]
    chunks[0] = id, start, end - 1, is_last


def change_free(lines: Journal) -> None:
    plans(lines)[5].free += 1


def change_setting(lines: Journal) -> None:
    assert isinstance(lines[0], HeaderLine)
    lines[0].config["max_num_seqs"] = 2


def drop_plan(lines: Journal) -> None:
    lines.remove(plans(lines)[7])


def drop_result(lines: Journal) -> None:
    lines.remove(lines_of(lines, CompletedLine)[7])


def drop_step(lines: Journal) -> None:
    drop_plan(lines)
    drop_result(lines)


def drop_arrival(lines: Journal) -> None:
    lines.remove(lines_of(lines, AddedLine)[2])


def drop_end(lines: Journal) -> None:
    del lines[-1]


def add_step(lines: Journal) -> None:
    plan, result = plans(lines)[-1], lines_of(lines, CompletedLine)[-1]
    lines += [structs.replace(each, step=each.step + 1) for each in (plan, result)]


def change_output(lines: Journal) -> None:
    end = next(end for end in ends(lines) if end.finish_reason == "stop")
    assert isinstance(end.output, list)
    end.output.insert(0, 0)


def change_prompt(lines: Journal) -> None:
    lines_of(lines, AddedLine)[0].requests[0].prompt = [1, 2]


TAMPERS = [
    change_chunk, change_free, change_setting, drop_plan, drop_result, drop_step, drop_arrival,
    drop_end, add_step, change_output, change_prompt,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_a_changed_record_is_a_mismatch(tamper: Callable[[Journal], None]) -> None:
    lines = record(WORKLOADS["unknown lengths"], 0, "vllm_v1")
    changed = deepcopy(lines)
    tamper(changed)
    assert list(map(decisions, changed)) != list(map(decisions, lines))  # type: ignore[arg-type]
    with pytest.raises(ReplayMismatch, match="step"):
        check_replay(changed)


def test_an_empty_record_replays() -> None:
    lines = record("requests=1,prompt=4,output=1", 0, "headway")
    assert check_replay(lines[:1]) == 0
