"""Edges where things once went wrong: aborts at any moment, malformed results, policies that raise."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway.cli.main import main
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.errors import InvalidRequest, PolicyError
from headway.executor.simulated import Script, SimulatedExecutor, SimulatedHandle
from headway.lab.cost import load_profile
from headway.lab.replay import check_replay
from headway.lab.summary import summarize
from headway.observe.run_stats import RunStats
from headway.observe.trace import TraceWriter, describe_step, header
from headway.plan import Plan
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset
from tests.observe.test_timeline import Log, check

PROFILE = load_profile("qwen3-0.6b-h200")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
QUEUES = ("fcfs", "fcfs(3)", "priority(preempts=True, max_preemptions=9)", "shortest_first", "fair")


def stormy_run(seed: int, async_scheduling: int) -> tuple[list[dict[str, Any]], RunStats, Log]:
    """Random requests, aborts at any moment, a tight cache: the trace, the metrics, the truth."""
    rng = Random(seed)
    config = preset(
        rng.choice(("headway", "vllm", "vllm_v1", "nano_vllm")), queue=rng.choice(QUEUES),
        swap=rng.choice(("recompute", "swap")), headroom="watermark(0.0)", block_size=4,
        num_blocks=24, num_host_blocks=12, max_num_seqs=5, max_num_batched_tokens=rng.choice((8, 64)),
        num_scheduler_steps=rng.choice((1, 3)),
    )  # fmt: skip
    clock, file, log = VirtualClock(), io.StringIO(), Log()
    executor = SimulatedExecutor(clock, PROFILE.step_seconds, 0.0003)
    metrics = RunStats(header(config, async_scheduling))
    writer = TraceWriter(file, config, async_scheduling)
    engine = Engine(
        Scheduler(config),
        executor,
        clock,
        async_scheduling=async_scheduling,
        observers=[writer, log],
    )
    engine.observers.append(lambda report: metrics.add(describe_step(report)))
    for number in range(30):
        for _ in range(rng.choice((0, 0, 1, 2))):
            add(engine, f"r{number}.{rng.random()}", rng)
        if rng.random() < 0.3 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        engine.step()
        engine.why()
    engine.run()
    return [json.loads(line) for line in file.getvalue().splitlines()], metrics, log


def add(engine: Engine, id: str, rng: Random) -> None:
    length, most = rng.randint(1, 40), rng.randint(1, 24)
    script = Script(rng.randint(1, most), filler=7, end=0)
    params = Params(
        max_tokens=most, eos_ids=frozenset({0}), priority=rng.randrange(3), n=rng.choice((1, 1, 2)),
        client=rng.choice("ab"), sampling=script,
    )  # fmt: skip
    engine.add(id, [rng.randrange(1, 4) for _ in range(length)], params)


@each_scheduling
@pytest.mark.parametrize("batch", range(6))
def test_any_run_with_aborts_replays_and_is_counted_right(
    batch: int, async_scheduling: int
) -> None:
    for seed in range(batch * 25, batch * 25 + 25):
        lines, metrics, log = stormy_run(seed, async_scheduling)
        try:
            check_replay(lines)
            check(summarize(metrics), log)
        except Exception as error:
            raise AssertionError(f"stormy_run({seed}, {async_scheduling}): {error}") from error


def engine_with(
    launch: Callable[[Plan, Any], Any] | None = None, async_scheduling: int = 0, **slots: Any
) -> Engine:
    clock = VirtualClock()
    inner = SimulatedExecutor(clock, lambda plan: 0.01)

    class Executor:
        def launch(self, plan: Plan) -> SimulatedHandle:
            handle = inner.launch(plan)
            return launch(plan, handle) if launch else handle

    numbers = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4}
    return Engine(
        Scheduler(preset("vllm_v1", **numbers, **slots)),
        Executor(),
        clock,
        async_scheduling=async_scheduling,
    )


def ask(engine: Engine, id: str, **params: Any) -> Request:
    script = Script(12, filler=7, end=0)
    return engine.add(id, range(1, 9), Params(max_tokens=12, sampling=script, **params))[0]


SPOILS: dict[str, Callable[[Any], Any]] = {
    "no columns": lambda result: result.columns.clear(),
    "a short column": lambda result: result.columns.__setitem__(0, result.columns[0][:-1]),
    "a first too many": lambda result: result.firsts.append(7),
}


@each_scheduling
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_result_of_the_wrong_shape_fails_its_plan_and_nothing_is_lost(
    spoil: str, async_scheduling: int
) -> None:
    def launch(plan: Plan, handle: Any) -> Any:
        if plan.step == 3:
            SPOILS[spoil](handle.result)
        return handle

    engine, told, finished = engine_with(launch, async_scheduling), set[str](), list[Request]()
    engine.observers.append(lambda report: told.update(r.id for r in report.plan.events.added))
    engine.observers.append(lambda report: finished.extend(report.finished))
    early = [ask(engine, "a"), ask(engine, "b")]
    for _ in range(3):
        engine.step()
    late = ask(engine, "late")
    engine.run()
    assert told == {"a", "b", "late"} and {r.id for r in finished} == told
    assert all(r.finish_reason == "error" and "samples" in str(r.error) for r in early)
    assert late.finish_reason == "error" or late.num_generated == 12


@each_scheduling
def test_a_queue_key_that_raises_when_a_request_comes_leaves_nothing_behind(
    async_scheduling: int,
) -> None:
    engine = engine_with(
        async_scheduling=async_scheduling, queue=lambda request, world: request.params.deadline - 1
    )
    with pytest.raises(PolicyError, match="queue policy.*TypeError"):
        ask(engine, "a")
    assert not engine.has_work and not engine.scheduler.queue.counters.served
    b = ask(engine, "b", deadline=9.0)
    engine.run()
    assert b.num_generated == 12


@each_scheduling
def test_a_queue_key_that_begins_to_raise_ends_requests_and_not_the_engine(
    async_scheduling: int,
) -> None:
    fuse = [14]

    def key(request: Request, world: object) -> float:
        fuse[0] -= 1
        if fuse[0] < 0:
            raise RuntimeError("no more")
        return request.arrival

    engine = engine_with(async_scheduling=async_scheduling, queue=key)
    requests = [ask(engine, str(i)) for i in range(7)]
    for _ in range(200):
        engine.step()
    assert all(request.is_finished for request in requests)
    assert any(request.error and "no more" in request.error for request in requests)
    scheduler = engine.scheduler
    assert not engine.has_work and scheduler.kv.num_free == 64 and not any(scheduler.kv.pool.refs)


@each_scheduling
def test_a_queue_key_that_cannot_be_compared_any_more_loses_nobody(async_scheduling: int) -> None:
    asked = Counter[str]()

    def key(request: Request, world: Any) -> Any:
        asked[request.id] += 1
        is_late = asked[request.id] > 2 and int(request.id) % 2
        return request.id if is_late else request.arrival

    engine = engine_with(async_scheduling=async_scheduling, queue=key)
    requests = [ask(engine, str(i)) for i in range(7)]
    for _ in range(200):
        engine.step()
    assert all(request.is_finished for request in requests)
    assert not engine.has_work and not len(engine.scheduler.queue)


NONSENSE: list[dict[str, Any]] = [
    {"salt": "\ud800"}, {"salt": None}, {"salt": 5}, {"deadline": "x"},
    {"deadline": float("nan")}, {"n": "2"}, {"n": 2.0}, {"n": 0}, {"stop_ids": ["x"]},
    {"stop_ids": 5}, {"priority": "high"}, {"min_tokens": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("params", NONSENSE, ids=str)
def test_what_makes_no_sense_is_refused_at_the_door(params: dict[str, Any]) -> None:
    engine = engine_with()
    with pytest.raises(InvalidRequest):
        ask(engine, "a", **params)
    assert not engine.has_work
    fine = ask(engine, "b", stop_ids=[99])
    engine.run()
    assert fine.num_generated == 12


@pytest.mark.parametrize("arrival", [float("nan"), "z"])
def test_an_arrival_is_a_time(arrival: Any) -> None:
    with pytest.raises(InvalidRequest, match="arrival"):
        engine_with().add("a", [1], Params(), arrival)


def run_cli(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What an invocation that must fail says; it must be one sentence and exit code 2."""
    monkeypatch.setattr("sys.argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = str(capsys.readouterr().err)
    assert ended.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "requests=2", "--trace-out", "/dev/full"], "cannot be written"),
        (["simulate", "requests=2", "--num-blocks", "1000000000000"], "num_blocks must be"),
        (["simulate", "requests=99999999999999"], "requests must be"),
        (["simulate", "requests=2", "--queue", "broken_policy:f"], "cannot load"),
        (["simulate", "requests=2", "--queue", "raising_policy:f"], "ZeroDivisionError"),
        (["compare", "requests=2", "--presets", "vllm_v1", "--variant", "a: vllm_v1; x=1"], "'x'"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "broken_policy.py").write_text("def f(:\n")
    (tmp_path / "raising_policy.py").write_text("def f(request, world):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert said in run_cli(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("mode", [[], ["--replay"], ["--perfetto", "out.json"]])
def test_a_trace_with_a_broken_field_is_one_sentence(
    mode: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines, _, _ = stormy_run(3, 0)
    next(line for line in lines if "chunks" in line)["chunks"] = [["nobody"]]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.chdir(tmp_path)
    run_cli(["trace", "bad.jsonl", *mode], monkeypatch, capsys)
