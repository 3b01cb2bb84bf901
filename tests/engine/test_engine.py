"""The engine reports every token once and in order; a failure ends only affected requests."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from headway import Plan, Scheduler, StepResult, VirtualClock, preset
from headway.engine.engine import MAX_FAULTS, Engine
from headway.errors import ConfigError, ExecutorError, InvalidRequest, RequestTooLong
from headway.events import Aborted, Added, Completed, Event, Failed
from headway.executor.base import Handle
from headway.request import Request, RequestParams
from tests.support.drive import check_no_leaks
from tests.support.events import Events
from tests.support.shadow import EOS, ShadowExecutor, oracle

each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
SMALL = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}


class Breakdown(RuntimeError):
    """The error of a broken device."""


@dataclass(slots=True)
class BrokenHandle:
    """A plan that has run, or that fails in `wait`."""

    owner: BrokenExecutor
    plan: Plan
    handle: Handle

    def wait(self) -> StepResult:
        if self.plan.step in self.owner.waits:
            self.owner.crash("wait")
        self.owner.flight.remove(self.plan)
        return self.handle.wait()


class BrokenExecutor:
    """The shadow executor, with steps that fail in `launch` or in `wait`."""

    def __init__(
        self,
        scheduler: Scheduler,
        launches: range | set[int] = range(0),
        waits: range | set[int] = range(0),
        error: type[BaseException] = Breakdown,
    ) -> None:
        self.inner = ShadowExecutor(scheduler)
        self.launches, self.waits, self.error = launches, waits, error
        self.flight: list[Plan] = []

    def launch(self, plan: Plan) -> BrokenHandle:
        self.flight.append(plan)
        if plan.step in self.launches:
            self.crash("launch")
        return BrokenHandle(self, plan, self.inner.launch(plan))

    def crash(self, where: str) -> None:
        self.inner.crash(self.flight)
        self.flight.clear()
        raise self.error(f"the device was lost at {where}")


def params(seed: int = 0, max_tokens: int | None = 8, **more: Any) -> RequestParams:
    return RequestParams(max_tokens=max_tokens, sampling=seed, **more)


def make(async_scheduling: int = 0, name: str = "headway", **changes: Any) -> tuple[Engine, Events]:
    """An engine with the shadow executor, and the events it reports."""
    scheduler = Scheduler(preset(name, **{**SMALL, **changes}))
    engine = Engine(
        scheduler, ShadowExecutor(scheduler), VirtualClock(), async_scheduling=async_scheduling
    )
    engine.observers.append(events := Events())
    return engine, events


def make_broken(async_scheduling: int = 0, **failures: Any) -> tuple[Engine, Events]:
    scheduler = Scheduler(preset(**SMALL))
    events = Events()
    executor = BrokenExecutor(scheduler, **failures)
    engine = Engine(
        scheduler, executor, VirtualClock(), async_scheduling=async_scheduling, observers=[events]
    )
    return engine, events


def streamed(events: Events) -> dict[str, list[int]]:
    """The tokens of every request, collected from the events."""
    tokens: dict[str, list[int]] = defaultdict(list)
    for completed in events.completed:
        for request, gained in completed.outputs():
            tokens[request.id] += gained
    return dict(tokens)


def expected(request: Request) -> tuple[list[int], str]:
    return oracle(request.prompt, request.params, 1 << 20)


@each_scheduling
@pytest.mark.parametrize("changes", [{}, {"num_blocks": 9}, {"num_scheduler_steps": 3}])
def test_reports_are_in_order_and_carry_every_token_once(
    async_scheduling: int, changes: dict[str, Any]
) -> None:
    engine, events = make(async_scheduling, "vllm_v1", **changes)
    requests: list[Request] = []
    for i in range(8):
        prompt = [i % 3] * (4 + i)
        requests += engine.add(f"r{i}", prompt, params(i, 6 + i, eos_ids=frozenset({EOS})))
    engine.run()
    steps = [completed.plan.step for completed in events.completed]
    assert steps == list(range(engine.scheduler.num_steps))
    tokens = streamed(events)
    for request in requests:
        assert (tokens[request.id], request.finish_reason) == expected(request)
        assert list(request.output) == tokens[request.id]
    ends = [r.id for r in events.ended]
    assert sorted(ends) == sorted(r.id for r in requests)
    check_no_leaks(engine.scheduler)


def test_with_async_scheduling_reports_lag_one_step_behind_plans() -> None:
    engine, events = make(1)
    engine.add("a", [1, 2, 3], params(max_tokens=2))
    assert engine.step() is None and engine.has_work
    assert engine.step() is events.completed[0] and engine.has_work
    assert engine.step() is events.completed[1] and not engine.has_work
    assert [r.id for r in events.completed[1].finished] == ["a"]


@pytest.mark.parametrize("async_scheduling", [-1, 2, 10])
def test_async_scheduling_must_be_true_or_false(async_scheduling: int) -> None:
    with pytest.raises(ConfigError, match=str(async_scheduling)):
        make(async_scheduling)


def test_a_step_with_nothing_to_do_reports_nothing() -> None:
    engine, events = make()
    assert engine.step() is None and not events and not engine.has_work
    engine.run()
    assert not events


@each_scheduling
def test_samples_of_one_prompt_compute_it_once_and_share_its_blocks(async_scheduling: int) -> None:
    engine, events = make(async_scheduling, num_blocks=64)
    prompt = list(range(40, 81))
    samples = engine.add("a", prompt, params(3, n=4))
    assert [s.id for s in samples] == ["a", "a/1", "a/2", "a/3"]
    most_shared = 0
    while engine.has_work:
        engine.step()
        held = [s.kv.blocks for s in samples if s.row >= 0]
        if len(held) == 4:
            most_shared = max(most_shared, len(set.intersection(*map(set, held))))
    chunks = [c for plan in events.plans for c in plan.chunks]
    num_computed = sum(c.end - c.start for c in chunks)
    assert num_computed <= len(prompt) + 3 * SMALL["block_size"]
    assert most_shared == len(prompt) // SMALL["block_size"]
    tokens = streamed(events)
    assert all(tokens[s.id] == expected(s)[0] for s in samples)


@pytest.mark.parametrize("n", [0, -1])
def test_fewer_than_one_sample_is_refused(n: int) -> None:
    engine, _ = make()
    with pytest.raises(InvalidRequest, match=f"n must be .*1, not {n}"):
        engine.add("a", [1], params(n=n))
    assert not engine.has_work


def test_an_id_in_use_is_refused_and_no_sample_is_added() -> None:
    engine, events = make()
    (first,) = engine.add("a/1", [1, 2], params())
    for id, n in (("a/1", 1), ("a", 2), ("a", 4)):
        with pytest.raises(InvalidRequest, match="'a/1'"):
            engine.add(id, [1, 2, 3], params(n=n))
        assert list(engine.scheduler.requests) == ["a/1"] and len(engine.scheduler.queue) == 1
    engine.run()
    assert streamed(events) == {"a/1": expected(first)[0]}
    engine.add("a/1", [1, 2], params())  # an id is free again once its request has ended


def test_a_request_that_can_never_run_is_refused_and_no_sample_is_added() -> None:
    engine, _ = make()
    with pytest.raises(RequestTooLong, match="24"):
        engine.add("a", [1] * 90, params(max_tokens=50, n=3))
    with pytest.raises(InvalidRequest, match="empty prompt"):
        engine.add("b", [], params(n=3))
    with pytest.raises(InvalidRequest, match="max_tokens must be .* 1, not 0"):
        engine.add("c", [1], params(max_tokens=0, n=3))
    assert not engine.has_work and not engine.scheduler.queue
    check_no_leaks(engine.scheduler)


@each_scheduling
def test_an_abort_is_reported_while_others_run(async_scheduling: int) -> None:
    engine, events = make(async_scheduling)
    _, other = engine.add("a", [1, 2], params()) + engine.add("b", [3, 4], params())
    engine.step()
    assert engine.abort("a") and not engine.abort("a") and not engine.abort("unknown")
    engine.run()
    ends = [(r.id, r.finish_reason) for r in events.ended]
    assert sorted(ends) == [("a", "abort"), ("b", "length")]
    assert streamed(events)["b"] == expected(other)[0]
    check_no_leaks(engine.scheduler)


@each_scheduling
def test_an_abort_with_nothing_left_to_run_is_reported_by_the_next_step(
    async_scheduling: int,
) -> None:
    engine, events = make(async_scheduling)
    (request,) = engine.add("a", [1, 2], params())
    engine.abort("a")
    assert not events and engine.has_work
    assert engine.step() is None and not engine.has_work
    assert [type(event) for event in events] == [Added, Aborted]
    assert events.ended == [request] and request.finish_reason == "abort"


@each_scheduling
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_to_the_end_reports_every_abort(async_scheduling: int, num_steps: int) -> None:
    engine, events = make(async_scheduling)
    engine.add("a", [1, 2], params())
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    assert engine.has_work  # the end of "a" is not reported yet
    engine.run()
    assert [r.id for r in events.ended] == ["a"]


@each_scheduling
@pytest.mark.parametrize("where", ["launches", "waits"])
def test_a_failed_step_ends_only_requests_in_flight(async_scheduling: int, where: str) -> None:
    engine, events = make_broken(async_scheduling, **{where: {3}})
    requests = [engine.add(f"r{i}", [i] * 5, params(i, 6))[0] for i in range(7)]  # four run at once
    faults = []
    while engine.has_work:
        engine.step()
        faults.append(engine.fault)
        assert engine.is_healthy == (engine.fault is None)
    assert any(faults) and engine.is_healthy  # set, then cleared by a successful step
    failed = [r for r in requests if r.finish_reason == "error"]
    assert 0 < len(failed) <= 4
    for request in failed:
        assert request.error is not None and "Breakdown: the device was lost" in request.error
        assert list(request.output) == expected(request)[0][: request.num_generated]
    tokens = streamed(events)
    for request in set(requests) - set(failed):
        assert (tokens[request.id], request.finish_reason) == expected(request)
    ends = [r.id for r in events.ended]
    assert sorted(ends) == sorted(r.id for r in requests)
    check_no_leaks(engine.scheduler)


@each_scheduling
def test_failures_that_are_not_consecutive_do_not_stop_the_engine(async_scheduling: int) -> None:
    engine, _ = make_broken(async_scheduling, launches={1, 4, 7, 10, 13})
    for i in range(20):
        engine.add(f"r{i}", [i] * 3, params(i, 5))
    engine.run()
    engine.add("last", [1], params())
    engine.run()
    assert engine.is_healthy


@each_scheduling
@pytest.mark.parametrize("where", ["launches", "waits"])
def test_after_too_many_consecutive_failures_all_requests_end(
    async_scheduling: int, where: str
) -> None:
    engine, events = make_broken(async_scheduling, **{where: range(100)})
    requests = [engine.add(f"r{i}", [i] * 5, params(i, 6))[0] for i in range(40)]
    engine.run()
    assert not engine.has_work and not engine.is_healthy
    assert {r.finish_reason for r in requests} == {"error"}
    assert all(r.error and "the device was lost" in r.error for r in requests)
    assert len(events.ended) == 40
    assert sum(isinstance(event, Failed) for event in events) == MAX_FAULTS
    with pytest.raises(ExecutorError, match=f"{MAX_FAULTS} .*the device was lost.*restart"):
        engine.add("late", [1], params())
    assert "the device was lost" in engine.why()


@each_scheduling
@pytest.mark.parametrize("where", ["launches", "waits"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_counted_as_a_failure(
    async_scheduling: int, where: str, error: type[BaseException]
) -> None:
    engine, events = make_broken(async_scheduling, error=error, **{where: {0}})
    engine.add("a", [1, 2], params())
    with pytest.raises(error):
        engine.run()
    assert engine.is_healthy and not events.completed


def test_an_observers_exception_reaches_the_caller() -> None:
    engine, events = make()

    def complain(event: Event) -> None:
        if isinstance(event, Completed):
            raise ValueError(f"cannot handle step {event.plan.step}")

    engine.observers.append(complain)
    engine.add("a", [1, 2], params())
    with pytest.raises(ValueError, match="cannot handle step 0"):
        engine.step()
    assert len(events.completed) == 1 and engine.is_healthy


# Explanations of waiting. The wording is tested with headway.record.sentences.


def has_line(text: str, *facts: object) -> bool:
    """True if one line of the text contains all these words and numbers."""
    patterns = [rf"(?<![\w/]){re.escape(str(fact))}(?![\w/])" for fact in facts]
    lines = text.splitlines()
    return any(all(re.search(pattern, line) for pattern in patterns) for line in lines)


def test_why_has_an_answer_without_requests() -> None:
    engine, _ = make()
    assert has_line(engine.why(), "No", "waiting", "running")


def test_why_counts_requests_that_arrived_after_the_latest_plan() -> None:
    engine, _ = make()
    engine.add("a", [1, 2], params())
    assert has_line(engine.why(), 1, "waiting")


def test_why_counts_running_requests_blocks_and_plans_in_flight() -> None:
    engine, _ = make(1)
    engine.add("a", [1, 2], params())
    engine.step()
    text = engine.why()
    assert has_line(text, 1, 4) and has_line(text, 1, 24, 23) and has_line(text, 1, "in flight")


WAITING: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[object, ...]]] = {
    "max_num_seqs": ({"max_num_seqs": 2}, (1, 1, 1, 1, 1), (3, 2)),
    "a prompt that cannot be split": ({"name": "minivllm"}, (20, 19, 5), ("b", 19, 12)),
    "a token budget that is used up": ({"name": "vllm_v1"}, (40, 5), (1, "token", "budget")),
    "needed and free blocks": ({"name": "vllm_v1", "num_blocks": 8}, (20, 16), ("b", 4, 3)),
}


@pytest.mark.parametrize(("changes", "lengths", "facts"), WAITING.values(), ids=WAITING)
def test_why_names_what_a_request_waits_for(
    changes: dict[str, Any], lengths: tuple[int, ...], facts: tuple[object, ...]
) -> None:
    engine, _ = make(**changes)
    for i, (id, length) in enumerate(zip("abcde", lengths, strict=False)):
        engine.add(id, [i] * length, params(i))
    engine.step()
    assert has_line(engine.why(), *facts)


def test_why_names_the_rows_that_fair_queueing_keeps_free() -> None:
    engine, _ = make(max_num_seqs=8, queue="fair", num_blocks=200)
    engine.add("small", [1], params(client="small"))
    for i in range(9):
        engine.add(f"r{i}", [i], params(i, client="heavy"))
    engine.step()
    assert has_line(engine.why(), "r6", 2, 1, "clients")


def test_why_names_the_blocks_that_the_headroom_keeps_free() -> None:
    engine, _ = make(name="vllm_v1", headroom="watermark(0.25)", num_blocks=8)
    engine.add("a", [1] * 12, params(max_tokens=4))
    engine.add("b", [2] * 15, params(max_tokens=2))
    engine.step()
    assert has_line(engine.why(), "b", 6, 5)


def test_why_names_preemptions_while_admission_backs_off() -> None:
    changes = {"headroom": "back_off(watermark(0.0), 0.5)", "num_blocks": 8, "max_num_seqs": 3}
    engine, events = make(name="vllm_v1", **changes)
    for i in range(3):
        engine.add(f"r{i}", [i] * 8, params(i, 20))
    while not events.preempted:
        engine.step()
    assert "preempt" in engine.why()
    texts = []
    while engine.has_work:
        engine.step()
        texts.append(engine.why())
    assert any("preempt" in text for text in texts)


def test_why_names_a_sample_that_waits_for_its_prompt() -> None:
    engine, _ = make()
    engine.add("a", [1] * 60, params(n=2))
    engine.step()  # computes only a part of the prompt
    engine.step()
    assert has_line(engine.why(), "a/1", "prompt")


def test_why_lists_a_few_requests_and_counts_the_rest() -> None:
    engine, _ = make(name="vllm_v1", queue="fcfs(20)", num_blocks=8)
    engine.add("a", [1] * 20, params())
    for i in range(10):
        engine.add(f"r{i}", [10 + i] * 16, params())
    engine.step()
    text = engine.why()
    assert sum(has_line(text, f"r{i}") for i in range(10)) == 5 and has_line(text, 5, "more")


def test_why_names_the_fault_until_a_step_succeeds() -> None:
    engine, _ = make_broken(launches={0})
    engine.add("a", [1, 2], params())
    engine.step()
    assert "Breakdown: the device was lost at launch" in engine.why()
    engine.add("b", [1, 2], params())
    assert "Breakdown" in engine.why() and has_line(engine.why(), 1, "waiting")
    engine.step()
    assert "Breakdown" not in engine.why()


@each_scheduling
@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm", "static"])
def test_why_can_be_called_at_any_time(async_scheduling: int, name: str) -> None:
    engine, _ = make(
        async_scheduling, name, num_blocks=10, num_host_blocks=8, queue="priority(max_overtakes=4)"
    )
    for i in range(9):
        engine.add(f"r{i}", [i % 3] * (3 + i), params(i, 3 + i, priority=i % 3, n=1 + i % 2))
        assert engine.why()
        engine.step()
        assert engine.why()
        if i == 5:
            engine.abort("r5")
            assert not has_line(engine.why(), "r5")
    while engine.has_work:
        engine.step()
        text = engine.why()
        assert "{" not in text and len(text) < 2000
