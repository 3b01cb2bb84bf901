"""Edge cases: aborts at any time, malformed results, policies that raise, wrong parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway import Engine, Plan, Scheduler, VirtualClock, preset
from headway.cli.main import main
from headway.errors import InvalidRequest, PolicyError
from headway.events import Aborted, Completed, Event, Planned, ended_by, preempted_by
from headway.executor.simulated import Script, SimulatedExecutor, SimulatedHandle
from headway.lab.cost import load_profile
from headway.lab.summary import summarize
from headway.record.reader import events_of
from headway.record.replay import check_replay
from headway.record.stats import stats_of
from headway.request import Request, RequestParams
from tests.record.test_timeline import Log, check
from tests.support.events import Events
from tests.support.journals import Lines, Recorder
from tests.support.shadow import ShadowExecutor

PROFILE = load_profile("qwen3-0.6b-h200")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
QUEUES = ("fcfs", "fcfs(3)", "priority(preempts=True, max_preemptions=9)", "shortest_first", "fair")


def random_run(seed: int, async_scheduling: int) -> tuple[Lines, Log]:
    """Random requests and aborts with a small cache; returns the journal and the log."""
    rng = Random(seed)
    config = preset(
        rng.choice(("headway", "vllm", "vllm_v1", "nano_vllm")), queue=rng.choice(QUEUES),
        swap=rng.choice(("recompute", "swap")), headroom="watermark(0.0)", block_size=4,
        num_blocks=24, num_host_blocks=12, max_num_seqs=5, max_num_batched_tokens=rng.choice((8, 64)),
        num_scheduler_steps=rng.choice((1, 3)),
    )  # fmt: skip
    clock, log = VirtualClock(), Log()
    executor = SimulatedExecutor(clock, PROFILE.step_seconds, 0.0003)
    recorder = Recorder(config, bool(async_scheduling))
    engine = Engine(Scheduler(config), executor, clock, async_scheduling=bool(async_scheduling))
    engine.observers += [recorder, log]
    for number in range(30):
        for _ in range(rng.choice((0, 0, 1, 2))):
            add_random(engine, f"r{number}.{rng.random()}", rng)
        if rng.random() < 0.3 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        engine.step()
        engine.why()
    engine.run()
    return recorder.lines, log


def add_random(engine: Engine, id: str, rng: Random) -> None:
    length, max_tokens = rng.randint(1, 40), rng.randint(1, 24)
    script = Script(rng.randint(1, max_tokens), filler=7, end=0)
    params = RequestParams(
        max_tokens=max_tokens, eos_ids=frozenset({0}), priority=rng.randrange(3), n=rng.choice((1, 1, 2)),
        client=rng.choice("ab"), sampling=script,
    )  # fmt: skip
    engine.add(id, [rng.randrange(1, 4) for _ in range(length)], params)


def count(events: Iterable[Event], seen: Counter[str]) -> None:
    num_in_flight = 0
    for event in events:
        seen.update(r.finish_reason or "" for r in ended_by(event))
        seen.update("swap" if p.is_swap else "recompute" for p in preempted_by(event))
        match event:
            case Planned(plan):
                num_in_flight += not plan.is_empty
                seen["chunks"] += bool(plan.chunks)
                seen["blocked"] += bool(plan.blocked)
            case Completed():
                num_in_flight -= 1
            case Aborted():
                seen["aborted in flight"] += num_in_flight > 0


@each_scheduling
def test_a_run_with_aborts_replays_and_its_metrics_match_the_log(async_scheduling: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        lines, log = random_run(seed, async_scheduling)
        journal = lines.read()
        count(events_of(journal), seen)
        try:
            check_replay(journal)
            check(summarize(stats_of(journal)), log)
        except Exception as error:
            raise AssertionError(f"random_run({seed}, {async_scheduling}): {error}") from error
    expected = ["chunks", "blocked", "recompute", "swap", "abort", "stop", "length"]
    expected += ["aborted in flight"] if async_scheduling else []
    assert not [event for event in expected if seen[event] < 10], seen


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
    scheduler = Scheduler(preset("vllm_v1", **numbers, **slots))
    return Engine(scheduler, Executor(), clock, async_scheduling=async_scheduling)


def add_request(engine: Engine, id: str, **params: Any) -> Request:
    script = Script(12, filler=7, end=0)
    return engine.add(id, range(1, 9), RequestParams(max_tokens=12, sampling=script, **params))[0]


SPOILED: dict[str, Callable[[Any], Any]] = {
    "no columns": lambda result: result.decode_tokens.clear(),
    "a short column": lambda result: result.decode_tokens.__setitem__(
        0, result.decode_tokens[0][:-1]
    ),
    "one token too many in first_tokens": lambda result: result.first_tokens.append(7),
}


@each_scheduling
@pytest.mark.parametrize("spoil", SPOILED)
def test_a_result_of_the_wrong_shape_fails_its_plan_and_reports_every_request(
    spoil: str, async_scheduling: int
) -> None:
    def launch(plan: Plan, handle: Any) -> Any:
        if plan.step == 3:
            SPOILED[spoil](handle.result)
        return handle

    engine = engine_with(launch, async_scheduling)
    engine.observers.append(events := Events())
    early = [add_request(engine, "a"), add_request(engine, "b")]
    for _ in range(3):
        engine.step()
    late = add_request(engine, "late")
    engine.run()
    assert events.added == [*early, late] and set(events.ended) == {*early, late}
    assert all(r.finish_reason == "error" and "samples" in str(r.error) for r in early)
    assert late.finish_reason == "error" or late.num_generated == 12


@each_scheduling
def test_a_queue_key_that_raises_for_a_new_request_leaves_nothing_behind(
    async_scheduling: int,
) -> None:
    engine = engine_with(
        async_scheduling=async_scheduling, queue=lambda request, view: request.params.deadline - 1
    )
    with pytest.raises(PolicyError, match="queue policy.*TypeError"):
        add_request(engine, "a")
    assert not engine.has_work and not engine.scheduler.queue.counters.served
    b = add_request(engine, "b", deadline=9.0)
    engine.run()
    assert b.num_generated == 12


@each_scheduling
def test_a_queue_key_that_starts_to_raise_ends_requests_but_not_the_engine(
    async_scheduling: int,
) -> None:
    calls_left = [14]

    def key(request: Request, view: object) -> float:
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise RuntimeError("no more")
        return request.arrival

    engine = engine_with(async_scheduling=async_scheduling, queue=key)
    requests = [add_request(engine, str(i)) for i in range(7)]
    for _ in range(200):
        engine.step()
    assert all(request.is_finished for request in requests)
    assert any(request.error and "no more" in request.error for request in requests)
    scheduler = engine.scheduler
    assert not engine.has_work and scheduler.kv.num_free == 64 and not any(scheduler.kv.pool.refs)


@each_scheduling
def test_queue_keys_that_stop_being_comparable_lose_no_request(async_scheduling: int) -> None:
    num_calls = Counter[str]()

    def key(request: Request, view: Any) -> Any:
        num_calls[request.id] += 1
        is_late = num_calls[request.id] > 2 and int(request.id) % 2
        return request.id if is_late else request.arrival

    engine = engine_with(async_scheduling=async_scheduling, queue=key)
    requests = [add_request(engine, str(i)) for i in range(7)]
    for _ in range(200):
        engine.step()
    assert all(request.is_finished for request in requests)
    assert not engine.has_work and not len(engine.scheduler.queue)


INVALID: list[dict[str, Any]] = [
    {"salt": "\ud800"}, {"salt": None}, {"salt": 5}, {"deadline": "x"},
    {"deadline": float("nan")}, {"n": "2"}, {"n": 2.0}, {"n": 0}, {"stop_ids": ["x"]},
    {"stop_ids": 5}, {"priority": "high"}, {"min_tokens": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("params", INVALID, ids=str)
def test_invalid_parameters_are_refused(params: dict[str, Any]) -> None:
    engine = engine_with()
    with pytest.raises(InvalidRequest):
        add_request(engine, "a", **params)
    assert not engine.has_work
    fine = add_request(engine, "b", stop_ids=[99])
    engine.run()
    assert fine.num_generated == 12


@pytest.mark.parametrize("arrival", [float("nan"), "z"])
def test_an_arrival_that_is_not_a_time_is_refused(arrival: Any) -> None:
    with pytest.raises(InvalidRequest, match="arrival"):
        engine_with().add("a", [1], RequestParams(), arrival)


def run_cli(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """The error of an invocation that fails: one line, with exit code 2."""
    monkeypatch.setattr("sys.argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    error = str(capsys.readouterr().err)
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["simulate", "requests=2", "--trace-out", "/dev/full"], "cannot be written"),
        (["simulate", "requests=2", "--num-blocks", "1000000000000"], "num_blocks must be"),
        (["simulate", "requests=99999999999999"], "requests must be"),
        (["simulate", "requests=2", "--queue", "broken_policy:f"], "cannot load"),
        (["simulate", "requests=2", "--queue", "raising_policy:f"], "ZeroDivisionError"),
        (["compare", "requests=2", "--presets", "vllm_v1", "--variant", "a: vllm_v1; x=1"], "'x'"),
    ],
)
def test_a_wrong_argument_gives_a_one_line_error(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "broken_policy.py").write_text("def f(:\n")
    (tmp_path / "raising_policy.py").write_text("def f(request, view):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert part in run_cli(arguments, monkeypatch, capsys)


@pytest.mark.parametrize("mode", [[], ["--replay"], ["--perfetto", "out.json"]])
def test_a_trace_with_an_invalid_field_gives_a_one_line_error(
    mode: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lines, _ = random_run(3, 0)
    place = next(place for place, line in enumerate(lines) if b'"chunks"' in line)
    lines[place] = re.sub(rb'"chunks":\[.*?\]\]', b'"chunks":[["unknown"]]', lines[place])
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    monkeypatch.chdir(tmp_path)
    run_cli(["trace", "bad.jsonl", *mode], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("slot", "policy"),
    [
        ("victim", lambda request, view: None), ("victim", lambda request, view: 1 / 0),
        ("headroom", lambda request, view: "many"), ("swap", lambda request, view: 1 / 0),
    ],
)  # fmt: skip
def test_a_policy_that_fails_is_named_with_its_request(slot: str, policy: Any) -> None:
    config = {"num_blocks": 6, "block_size": 4, slot: policy}
    scheduler = Scheduler(preset("vllm_v1", **config))
    engine = Engine(scheduler, ShadowExecutor(scheduler), VirtualClock())
    for id in ("a", "b"):
        engine.add(id, range(10, 19), RequestParams(max_tokens=12, sampling=1))
    faults = set[str]()
    while engine.has_work:
        engine.step()
        faults |= {engine.fault} if engine.fault else set()
    assert faults and all(f"{slot} policy" in fault and "request '" in fault for fault in faults)
