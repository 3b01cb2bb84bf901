"""The replay of a recorded run takes identical decisions."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from headway.config import Config
from headway.engine.clock import RealClock, VirtualClock
from headway.engine.engine import Engine
from headway.errors import ReplayMismatch
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.replay import check_replay, replay
from headway.lab.simulate import simulate
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.stats import RunStats
from headway.observe.trace import Line, TraceWriter, decisions
from headway.plan import Column, Plan, StepResult
from headway.request import RequestParams
from headway.scheduler import PRESETS, Scheduler, preset

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


def lines_of(file: io.StringIO) -> list[Line]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def record(
    workload: str, async_scheduling: int, name: str, *, trace_blocks: bool = False, **changes: Any
) -> list[Line]:
    file = io.StringIO()
    config = preset(name, **{**SMALL, **changes})
    simulate(
        parse_synthetic(workload).generate(),
        config,
        PROFILE,
        async_scheduling=async_scheduling,
        trace=file,
        trace_blocks=trace_blocks,
    )
    return lines_of(file)


def count(lines: list[Line], field: str) -> int:
    return sum(len(line.get(field, ())) for line in lines[1:])


@each_scheduling
@each_preset
@each_workload
def test_a_simulated_run_replays(workload: str, name: str, async_scheduling: int) -> None:
    lines = record(WORKLOADS[workload], async_scheduling, name)
    assert check_replay(lines) == len(lines) - 1 > 10


@each_scheduling
def test_a_run_of_a_model_with_sliding_windows_replays(async_scheduling: int) -> None:
    changes = {"sliding_window": 10, "num_window_blocks": 26, "num_blocks": 99}
    lines = record(WORKLOADS["shared prefixes"], async_scheduling, "vllm_v1", **changes)
    assert lines[0]["config"].items() >= changes.items()
    assert "window_blocks" in json.dumps(lines[1:])
    check_replay(lines)


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "vllm_v1", "minivllm"])
def test_a_run_with_swaps_replays(name: str, async_scheduling: int) -> None:
    changes = {"swap": "swap", "num_host_blocks": 30, "headroom": "watermark(0.0)"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, name, **changes)
    assert any(p[1] == "swap" for line in lines[1:] for p in line.get("preempted", ()))
    check_replay(lines)


@each_scheduling
def test_a_run_with_block_numbers_replays_with_the_same_blocks(async_scheduling: int) -> None:
    lines = record(WORKLOADS["shared prefixes"], async_scheduling, "vllm_v1", trace_blocks=True)
    assert check_replay(lines) == len(lines) - 1
    wrong = next(line for line in lines[1:] if line.get("blocks", {}).get("new"))
    wrong["blocks"]["new"][0][1] += 1
    with pytest.raises(ReplayMismatch, match="blocks"):
        check_replay(lines)


@each_scheduling
def test_a_run_with_a_reset_of_the_cache_replays(async_scheduling: int) -> None:
    """The same prompt is computed again after a reset, in the run and in its replay."""
    clock, file, config = VirtualClock(), io.StringIO(), preset("vllm_v1", **SMALL)
    executor = SimulatedExecutor(clock, seconds=lambda plan: 0.01)
    writer = TraceWriter(file, config, bool(async_scheduling))
    engine = Engine(
        Scheduler(config), executor, clock, async_scheduling=bool(async_scheduling),
        observers=[writer],
    )  # fmt: skip
    script = RequestParams(max_tokens=4, sampling=Script(4, filler=7, end=0))
    for number in range(4):
        engine.add(str(number), range(40), script)
        engine.run()
        if number == 1:
            assert engine.scheduler.reset_cache()
    lines = lines_of(file)
    cached = [each[1] for line in lines[1:] for each in line.get("admitted", ())]
    assert cached == [0, 39, 0, 39]
    assert [line["reset"] for line in lines if "reset" in line] == [[0, 0]]
    assert check_replay(lines) == len(lines) - 1


@each_scheduling
def test_a_run_with_discarded_outputs_replays(async_scheduling: int) -> None:
    changes = {"swap": "discard_output", "headroom": "watermark(0.0)"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "deep_dive", **changes)
    kinds = {each[1] for line in lines[1:] for each in line.get("preempted", ())}
    assert kinds == {"discard"}
    assert check_replay(lines) == len(lines) - 1


QUEUES = [
    "fcfs(2)",
    "priority(2, 0.01, True)",
    "shortest_first(3)",
    "fair(1)",
    "earliest_deadline(2)",
]


@each_scheduling
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("headroom", ["back_off(watermark(0.05), 0.1)", "future_peak(learned)"])
def test_every_queue_and_headroom_rule_replays(
    queue: str, headroom: str, async_scheduling: int
) -> None:
    workload = WORKLOADS["unknown lengths"].replace("requests=16", "requests=10")
    lines = record(workload, async_scheduling, "headway", queue=queue, headroom=headroom)
    assert count(lines, "blocked") > 10 and count(lines, "finished") >= 10
    check_replay(lines)


@each_scheduling
def test_a_multi_step_run_replays(async_scheduling: int) -> None:
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "vllm_v1", num_scheduler_steps=4)
    assert any("num_steps" in line for line in lines)
    check_replay(lines)


@each_scheduling
def test_a_run_with_deferred_decodes_replays(async_scheduling: int) -> None:
    changes = {"max_num_batched_tokens": 5, "num_blocks": 200, "chunk": "split_any"}
    lines = record(WORKLOADS["unknown lengths"], async_scheduling, "minivllm", **changes)
    assert count(lines, "deferred")
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


def simulated(config: Config, async_scheduling: int) -> tuple[Engine, io.StringIO]:
    clock, file = VirtualClock(), io.StringIO()
    executor = SimulatedExecutor(clock, PROFILE.step_seconds, 0.0005)
    writer = TraceWriter(file, config, async_scheduling)
    return Engine(
        Scheduler(config), executor, clock, async_scheduling=async_scheduling, observers=[writer]
    ), file


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "nano_vllm", "vllm", "minivllm", "static"])
def test_a_run_with_aborts_replays(name: str, async_scheduling: int) -> None:
    jobs, rng = parse_synthetic(WORKLOADS["unknown lengths"]).generate(), Random(name)
    for swap in ("recompute", "swap"):
        config = preset(name, **SMALL, swap=swap, num_host_blocks=20, headroom="watermark(0.0)")
        engine, file = simulated(config, async_scheduling)
        aborts = {rng.randrange(3 + i, 40 + i): [job.id] for i, job in enumerate(jobs) if i % 3}
        drive(engine, jobs, aborts)
        lines = lines_of(file)
        assert (
            sum(e["finish_reason"] == "abort" for li in lines for e in li.get("finished", ())) >= 3
        )
        check_replay(lines)


def abort_one(engine: Engine) -> None:
    """Add two requests and abort one before the first step."""
    drive(engine, parse_synthetic("requests=2,prompt=8,output=4").generate(), {0: ["1"]})


@each_scheduling
def test_an_abort_before_the_first_step_replays(async_scheduling: int) -> None:
    engine, file = simulated(preset(**SMALL), async_scheduling)
    abort_one(engine)
    check_replay(lines_of(file))


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
    engine, file = simulated(preset(**SMALL), async_scheduling)
    abort_all(engine)
    check_replay(lines_of(file))


@each_scheduling
@pytest.mark.parametrize("act", [abort_one, abort_all])
def test_an_abort_before_the_first_step_is_counted(
    act: Callable[[Engine], None], async_scheduling: int
) -> None:
    engine, file = simulated(preset(**SMALL), async_scheduling)
    act(engine)
    first, *steps = lines_of(file)
    stats = RunStats(first)
    for line in steps:
        stats.add(line)
    assert stats.totals["finished_abort"] == stats.totals["finished_length"] == 1


@each_scheduling
def test_an_abort_of_the_only_running_request_replays(async_scheduling: int) -> None:
    engine, file = simulated(preset(**SMALL), async_scheduling)
    first, second = parse_synthetic("requests=2,prompt=8,output=9").generate()
    engine.add(first.id, first.prompt(), first.params())
    for _ in range(4):
        engine.step()
    engine.abort(first.id)
    engine.step()
    engine.add(second.id, second.prompt(), second.params())
    engine.run()
    check_replay(lines_of(file))


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
) -> list[Line]:
    clock, file, rng = RealClock(), io.StringIO(), Random(name)
    config = preset(name, **SMALL, headroom="watermark(0.0)", num_host_blocks=12, swap="swap")
    writer = TraceWriter(file, config, async_scheduling)
    executor = RealExecutor(clock, rng, seconds)
    engine = Engine(
        Scheduler(config), executor, clock, async_scheduling=async_scheduling, observers=[writer]
    )
    act(engine, rng)
    return lines_of(file)


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
    ends = [end for line in lines for end in line.get("finished", ())]
    assert len(ends) >= 10 and {end["id"] for end in ends} == {"a", "b", "c"}
    assert {"stop", "length", "abort"} == {end["finish_reason"] for end in ends}
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
    assert count(lines, "preempted")
    assert check_replay(lines) == len(lines) - 1


@each_scheduling
def test_a_run_with_a_failed_step_is_refused(async_scheduling: int) -> None:
    engine, file = simulated(preset(**SMALL), async_scheduling)
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
    lines = lines_of(file)
    assert any(e["finish_reason"] == "error" for line in lines for e in line.get("finished", ()))
    with pytest.raises(ReplayMismatch, match="failed"):
        check_replay(lines)


# Mismatches.


def test_an_abort_of_an_unknown_id_is_a_mismatch() -> None:
    lines = record(WORKLOADS["at once"], 0, "headway")
    lines[2]["aborted"] = [["unknown", 0]]
    with pytest.raises(ReplayMismatch, match="step 1: .*: aborted"):
        check_replay(lines)


def test_a_replay_has_the_recorded_times() -> None:
    lines = record(WORKLOADS["unknown lengths"], 0, "headway")
    again = list(replay(lines))
    assert [(li["start"], li["end"]) for li in again] == [
        (li["start"], li["end"]) for li in lines[1:]
    ]


def change_chunk(lines: list[Line]) -> None:
    next(line for line in lines[4:] if "chunks" in line)["chunks"][0][2] -= 1


def change_free(lines: list[Line]) -> None:
    lines[5]["free"] += 1


def change_setting(lines: list[Line]) -> None:
    lines[0]["config"]["max_num_seqs"] = 2


def drop_step(lines: list[Line]) -> None:
    del lines[7]


def drop_end(lines: list[Line]) -> None:
    del lines[-1]


def add_step(lines: list[Line]) -> None:
    lines.append(dict(lines[-1], step=lines[-1]["step"] + 1))


def change_output(lines: list[Line]) -> None:
    ends = [
        e for line in lines[1:] for e in line.get("finished", ()) if e["finish_reason"] == "stop"
    ]
    ends[0]["output"].insert(0, 0)


def change_prompt(lines: list[Line]) -> None:
    lines[1]["added"][0]["prompt"] = [1, 2]


TAMPERS = [
    change_chunk, change_free, change_setting, drop_step, drop_end, add_step, change_output,
    change_prompt,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__)
def test_a_changed_record_is_a_mismatch(tamper: Callable[[list[Line]], None]) -> None:
    lines = record(WORKLOADS["unknown lengths"], 0, "vllm_v1")
    changed = deepcopy(lines)
    tamper(changed)
    assert list(map(decisions, changed)) != list(map(decisions, lines))
    with pytest.raises(ReplayMismatch, match="step|ends before"):
        check_replay(changed)


def test_an_empty_record_replays() -> None:
    lines = record("requests=1,prompt=4,output=1", 0, "headway")
    assert check_replay(lines[:1]) == 0
