"""Laws of the engine: what it counts as work, as idle time, as a failure, and whom it tells."""

from __future__ import annotations

from typing import Any

import pytest

from headway import Scheduler, VirtualClock, preset
from headway.engine import gc_freeze as module
from headway.engine.engine import MAX_FAULTS, MAX_SAMPLES, Engine
from headway.errors import ConfigError, ExecutorError, InvalidRequest
from headway.events import Aborted, Event
from headway.plan import Failure, Plan, StepResult
from headway.request import Request, RequestParams
from tests.support.drive import result
from tests.support.events import Events

each_scheduling = pytest.mark.parametrize("async_scheduling", (False, True))


class Stub:
    """An executor whose steps take 2 seconds, with failures that a test sets by step."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.engine = clock, None
        self.failed: dict[int, dict[str, Failure]] = {}  # by step and request
        self.errors: dict[int, BaseException] = {}  # by step, when the result is waited for
        self.seen: list[tuple[float | None, int]] = []

    def launch(self, plan: Plan) -> Any:
        stub = self

        class Handle:
            def wait(self) -> StepResult:
                pass_time(stub.clock, 2.0)
                assert stub.engine is not None
                stub.seen.append((stub.engine.step_seconds, stub.engine.num_in_flight))
                if plan.step in stub.errors:
                    raise stub.errors.pop(plan.step)
                answer = result(plan)
                requests = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
                failed = stub.failed.get(plan.step, {})
                answer.failed = {r: failed[r.id] for r in requests if r.id in failed}
                return answer

        return Handle()


def an_engine(async_scheduling: bool = False, **changes: Any) -> tuple[Engine, Stub]:
    clock = VirtualClock()
    values = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    scheduler, stub = Scheduler(preset("vllm_v1", **{**values, **changes})), Stub(clock)
    engine = Engine(scheduler, stub, clock, async_scheduling=async_scheduling)
    stub.engine = engine
    return engine, stub


def pass_time(clock: VirtualClock, seconds: float) -> None:
    clock.advance_to(clock.now() + seconds)


def params(max_tokens: int = 4, **more: Any) -> RequestParams:
    return RequestParams(max_tokens=max_tokens, **more)


def test_idle_time_counts_from_the_last_step_or_from_the_first_work() -> None:
    engine, stub = an_engine()
    pass_time(stub.clock, 5.0)
    assert engine.seconds_since_progress == 5.0
    engine.add("a", [1, 2], params())
    assert engine.seconds_since_progress == 0.0  # work came to an engine without any
    pass_time(stub.clock, 3.0)
    engine.add("b", [1, 2], params())
    assert engine.seconds_since_progress == 3.0  # more work is no progress
    engine.step()
    assert engine.seconds_since_progress == 0.0
    engine.run()
    pass_time(stub.clock, 1.0)
    assert engine.seconds_since_progress == 1.0 and not engine.has_work


@each_scheduling
def test_a_step_is_timed_while_it_runs_and_not_between_two(async_scheduling: bool) -> None:
    engine, stub = an_engine(async_scheduling)
    engine.add("a", [1, 2], params())
    assert engine.step_seconds is None
    completed = [engine.step() for _ in range(5)]
    assert engine.step_seconds is None
    assert stub.seen[0] == (2.0, 1 + async_scheduling)
    starts = [each.planned.began for each in completed if each is not None]
    ends = [each.planned.time for each in completed if each is not None]
    assert starts == ends == ([0.0, 0.0, 2.0, 4.0] if async_scheduling else [0.0, 2.0, 4.0, 6.0])


@each_scheduling
def test_the_arrival_of_a_request_is_now_unless_it_is_given(async_scheduling: bool) -> None:
    engine, stub = an_engine(async_scheduling)
    pass_time(stub.clock, 5.0)
    assert engine.add("a", [1], params())[0].arrival == 5.0
    assert engine.add("b", [1], params(), 0.0)[0].arrival == 0.0
    assert all(sample.arrival == 5.0 for sample in engine.add("c", [1], params(n=3)))


def test_the_number_of_samples_has_its_bounds() -> None:
    engine, _ = an_engine()
    assert MAX_SAMPLES == 1024
    samples = engine.add("a", [1, 2], params(n=MAX_SAMPLES))
    assert len(samples) == MAX_SAMPLES and [s.sample for s in samples] == list(range(MAX_SAMPLES))
    assert [s.id for s in samples[:3]] == ["a", "a/1", "a/2"]
    assert samples[0].parent is None and all(s.parent is samples[0] for s in samples[1:])
    wrong: tuple[Any, ...] = (0, -1, MAX_SAMPLES + 1, True, 1.0, "1", None)
    for number, n in enumerate(wrong):
        with pytest.raises(InvalidRequest, match="n must be"):
            engine.add(f"b{number}", [1, 2], params(n=n))
    for id in (5, None, b"a"):
        with pytest.raises(InvalidRequest, match="id"):
            engine.add(id, [1], params())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="params"):
        engine.add("c", [1], {"max_tokens": 3})  # type: ignore[arg-type]


def test_an_abort_ends_a_request_with_all_its_samples_and_a_sample_alone() -> None:
    engine, _ = an_engine()
    parent, first, second = engine.add("a", [1, 2], params(n=3))
    other = engine.add("b", [1, 2], params())[0]
    assert engine.abort("a/1")
    assert first.is_finished and not parent.is_finished and not second.is_finished
    assert engine.abort("a") and parent.is_finished and second.is_finished
    assert not other.is_finished and not engine.abort("a") and not engine.abort("a/1")
    assert not engine.abort("never added")


def test_an_abort_of_a_running_request_ends_every_sample() -> None:
    engine, _ = an_engine()
    samples = engine.add("a", [1, 2], params(n=3))
    assert engine.abort("a") and all(sample.is_finished for sample in samples)


def test_an_abort_spares_a_request_that_is_only_named_like_a_sample() -> None:
    engine, _ = an_engine()
    engine.add("a", [1, 2, 3], RequestParams(n=3, max_tokens=9))
    assert engine.abort("a/1")
    engine.step()
    named_alike = [engine.add(id, [1, 2, 3])[0] for id in ("a/0", "a/1", "a/3", "a/2/1")]
    assert engine.abort("a/2") and engine.abort("a")
    assert not any(request.is_finished for request in named_alike)


def test_a_sample_is_stopped_by_its_number() -> None:
    engine, _ = an_engine()
    samples = engine.add("a", [1, 2], params(n=3))
    for number in (2, 0, 1):
        assert engine.stop_sample("a", number) and samples[number].finish_reason == "stop"
        assert not engine.stop_sample("a", number)
    assert not engine.stop_sample("a", 3) and not engine.stop_sample("never added", 0)


def test_samples_are_aborted_by_the_id_of_a_request_that_has_ended() -> None:
    engine, _ = an_engine()
    parent, first, second = engine.add("a", [1, 2], params(n=3))
    other = engine.add("b", [1, 2], params(n=2))
    assert engine.stop("a") and parent.finish_reason == "stop" and not first.is_finished
    assert engine.abort("a") and first.is_finished and second.is_finished
    assert [s.finish_reason for s in (first, second)] == ["abort", "abort"]
    assert not any(sample.is_finished for sample in other)
    assert not engine.stop("a")


@each_scheduling
def test_an_engine_has_work_until_everything_is_reported(async_scheduling: bool) -> None:
    engine, _ = an_engine(async_scheduling)
    engine.observers.append(events := Events())
    assert not engine.has_work and engine.step() is None
    engine.add("a", [1, 2], params(1))
    assert engine.has_work
    completed = [engine.step() for _ in range(1 + async_scheduling)]
    assert [each is None for each in completed] == [True, False][-len(completed) :]
    assert not engine.has_work and engine.num_in_flight == 0
    engine.add("b", [1, 2], params())
    engine.abort("b")
    assert engine.has_work  # the abort is not reported yet
    assert engine.step() is None and not engine.has_work
    aborted = events[-1]
    assert isinstance(aborted, Aborted) and aborted.request.id == "b"
    assert aborted.time == engine.clock.now()


def test_observers_see_every_event_and_one_that_fails_hides_nothing() -> None:
    engine, _ = an_engine()
    seen: list[str] = []
    forgiven: list[tuple[Any, str]] = []

    def broken(event: Event) -> None:
        raise ValueError("no")

    engine.observers += [broken, lambda event: seen.append(type(event).__name__)]
    engine.add("a", [1, 2], params(3))
    with pytest.raises(ValueError, match="no"):
        engine.step()
    assert seen == ["Added", "Planned", "Completed"]
    engine.on_observer_error = lambda observer, error: forgiven.append((observer, str(error)))
    engine.run()
    assert seen[3:] == ["Planned", "Completed"] * 2 and forgiven == [(broken, "no")] * 4


def test_async_scheduling_is_true_or_false() -> None:
    scheduler, clock = Scheduler(preset("vllm_v1")), VirtualClock()
    wrong: tuple[Any, ...] = (2, -1, "yes", None)
    for value in wrong:
        with pytest.raises(ConfigError, match="async_scheduling"):
            Engine(scheduler, Stub(clock), clock, async_scheduling=value)
    assert Engine(scheduler, Stub(clock), clock).async_scheduling is False


def test_a_request_that_fails_ends_with_its_reason_and_the_others_go_on() -> None:
    engine, stub = an_engine()
    good, bad, last = (
        engine.add(id, [1, 2], params(n))[0] for id, n in (("g", 4), ("b", 4), ("l", 2))
    )
    stub.failed[1] = {"b": Failure(0, "bad grammar", "grammar"), "l": Failure(0, "too late")}
    engine.run()
    assert (bad.finish_reason, bad.error, bad.error_code) == ("error", "bad grammar", "grammar")
    assert bad.num_generated == 2
    # `l` reached its limit in the same step: the failure wins.
    assert (last.finish_reason, last.error, last.error_code) == ("error", "too late", None)
    assert (good.finish_reason, good.error, good.num_generated) == ("length", None, 4)
    assert engine.is_healthy


def test_a_failure_after_the_end_of_a_request_is_ignored() -> None:
    """In a plan of three decode steps, the request ends with the second; the third is not its own."""
    engine, stub = an_engine(num_scheduler_steps=3)
    request = engine.add("a", [1, 2], params(3))[0]
    other = engine.add("b", [1, 2], params(9))[0]
    stub.failed[1] = {"a": Failure(2, "too late", "grammar"), "b": Failure(2, "in time")}
    engine.run()
    assert (request.finish_reason, request.error, request.error_code) == ("length", None, None)
    assert (other.finish_reason, other.error) == ("error", "in time")


def test_failed_steps_end_requests_and_three_in_a_row_end_the_engine() -> None:
    engine, stub = an_engine()
    engine.observers.append(events := Events())
    assert MAX_FAULTS == 3
    for number in range(MAX_FAULTS):
        request = engine.add(f"a{number}", [1, 2], params())[0]
        assert not engine.has_given_up and engine.is_healthy is (number == 0)
        stub.errors = {step: RuntimeError("no device") for step in range(99)}
        assert engine.step() is None and events.ended[number:] == [request]
        assert request.error == engine.fault == "RuntimeError: no device"
        assert engine.num_in_flight == 0 and not engine.has_work
    assert engine.has_given_up
    with pytest.raises(ExecutorError, match="no device"):
        engine.add("b", [1, 2], params())


def test_failures_are_counted_anew_after_a_step_that_succeeds() -> None:
    engine, stub = an_engine()
    for num_failures in (MAX_FAULTS - 1, MAX_FAULTS):
        engine.add("works", [1, 2], params())
        engine.run()
        for number in range(num_failures):
            assert not engine.has_given_up
            engine.add(f"fails{number}", [1, 2], params())
            stub.errors = {engine.scheduler.num_steps: RuntimeError("no device")}
            engine.step()
    assert engine.has_given_up


def test_after_the_last_failure_waiting_requests_end_too() -> None:
    engine, stub = an_engine(max_num_seqs=1)
    engine.observers.append(events := Events())
    requests = [engine.add(f"a{number}", [1, 2], params())[0] for number in range(5)]
    stub.errors = {step: RuntimeError("no device") for step in range(99)}
    for number in range(2):
        engine.step()
        assert sum(r.is_finished for r in requests) == number + 1
    assert engine.step() is None
    assert all(r.finish_reason == "error" and r.error == engine.fault for r in requests)
    assert sorted(r.id for r in events.ended) == [r.id for r in requests] and not engine.has_work


def test_a_step_that_succeeds_makes_the_engine_healthy_again() -> None:
    engine, stub = an_engine()
    for number in range(5):
        stub.errors = {engine.scheduler.num_steps: RuntimeError("no device")}
        engine.add(f"a{number}", [1, 2], params())
        engine.step()
        assert not engine.is_healthy and not engine.has_given_up
        engine.add(f"b{number}", [1, 2], params())
        engine.run()
        assert engine.is_healthy


@each_scheduling
def test_an_interrupt_leaves_nothing_half_done(async_scheduling: bool) -> None:
    engine, stub = an_engine(async_scheduling, max_num_seqs=1)
    running, waiting = (engine.add(id, [1, 2], params())[0] for id in "ab")
    stub.errors[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            engine.step()
    assert running.finish_reason == "error" and running.error == "interrupted"
    assert engine.num_in_flight == 0 and engine.step_seconds is None and engine.is_healthy
    engine.run()
    assert waiting.finish_reason == "length" and engine.scheduler.is_idle


def test_a_restart_begins_with_nothing() -> None:
    engine, _ = an_engine(True)
    engine.scheduler.records_answers = True
    engine.add("a", [1, 2], params())
    engine.step()
    assert engine.num_in_flight == 1
    config = engine.scheduler.config
    engine.restart()
    assert engine.scheduler.records_answers
    assert engine.num_in_flight == 0 and not engine.has_work and engine.scheduler.is_idle
    assert engine.scheduler.config is config
    again = engine.add("a", [1, 2], params())[0]
    engine.run()
    assert isinstance(again, Request) and again.finish_reason == "length"


def test_a_nested_block_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Recorded:
        """Stands in for the module gc."""

        def __getattr__(self, name: str) -> object:
            return lambda: calls.append(name)

    monkeypatch.setattr(module, "gc", Recorded())
    monkeypatch.setattr(module, "_is_frozen", False)
    for _ in range(2):
        with pytest.raises(KeyError), module.gc_freeze():
            with module.gc_freeze():
                pass
            assert calls == ["collect", "freeze"]
            raise KeyError
        assert calls == ["collect", "freeze", "unfreeze"]
        calls.clear()
