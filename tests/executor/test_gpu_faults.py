"""A failing device: requests in flight get the reason, and no later request gets a wrong token.

Without a GPU, the GPU executor runs plain torch here, so a run takes a fraction of a second. With
a GPU, failures inside captures are tested too.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import Plan, Scheduler
from headway.engine.engine import MAX_FAULTS, Engine
from headway.errors import ExecutorError
from headway.executor.gpu.graphs import capture_into
from headway.model.backends.base import ForwardPass, PassArguments
from headway.model.backends.plain import PlainBackend, PlainPass
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.request import Request, RequestParams
from tests.support.waiting import LIMIT

pytest.importorskip("triton")
from headway.executor.gpu.executor import GpuExecutor, PendingStep
from headway.model.backends.gpu import GpuBackend
from tests.executor.test_gpu import Loud, fail_captures, model, settings

pytestmark = pytest.mark.usefixtures("small_padding")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip
PROMPTS = [[7, 3], [1, 2, 3, 4, 5], [9, 8, 7], [4]]
LIMITS = [3, 4, 2, 5]
NUMBERS = itertools.count()


class DecodesFirst(PlainBackend):
    """Plain torch for the batches of the GPU executor, in which decodes come first."""

    def begin(self, given: PassArguments) -> ForwardPass:
        batch, count = given.batch, given.batch.num_decodes
        starts, ends = torch.arange(count + 1), batch.positions_t[:count] + 1
        if count < len(batch.tokens_t):
            starts = torch.cat([starts[:count], batch.starts_s])
            ends = torch.cat([ends, batch.ends_s])
        whole = replace(batch, starts_s=starts, ends_s=ends)
        return PlainPass(self, given._replace(batch=whole))


class Tripwire:
    """A decoder that raises at its nth forward pass and at the `times - 1` passes after it."""

    def __init__(self, decoder: Decoder, error: BaseException, first: int, times: int = 1) -> None:
        self._decoder, self._error = decoder, error
        self._count, self._broken = 0, range(first, first + times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: ForwardBatch, blocks: Tensor, **more: Any) -> Tensor:
        self._count += 1
        if self._count in self._broken:
            raise self._error
        return self._decoder.forward(batch, blocks, **more)


def trip(executor: GpuExecutor, wire: Tripwire) -> None:
    """Route all later passes through the tripwire."""
    executor.decoder = executor.mixed.decoder = wire  # type: ignore[assignment]


class Line:
    """Raises at the nth line that the executor runs, of one function or of any function."""

    def __init__(self, at: int = 0, error: BaseException | None = None, only: str = "") -> None:
        self.num_seen = 0
        self._at, self._error, self._only = at, error, only

    def __enter__(self) -> Line:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, value: object) -> Any:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        is_meant = name == self._only or (not self._only and name != "_discard_launch")
        is_executor = module.startswith("headway.executor") and "faults" not in module
        return self._line if is_executor and is_meant else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        self.num_seen += event == "line"
        if event == "line" and self.num_seen == self._at and self._error:
            raise self._error
        return self._line


def make(async_scheduling: int = 0, **more: Any) -> tuple[Engine, GpuExecutor]:
    config = settings(**{"max_num_seqs": 3, **more})
    has_gpu = torch.cuda.is_available()
    backend = GpuBackend(torch.float32, "cuda") if has_gpu else DecodesFirst()
    executor = GpuExecutor(Decoder(Loud(model("Llama", **TINY)), backend), config)
    return Engine(Scheduler(config), executor, async_scheduling=async_scheduling), executor


def ask(engine: Engine, count: int = len(PROMPTS)) -> list[Request]:
    """Add requests of different lengths, with new ids."""
    return [
        engine.add(str(next(NUMBERS)), prompt, RequestParams(max_tokens=limit))[0]
        for prompt, limit in list(zip(PROMPTS, LIMITS, strict=True))[:count]
    ]


def finish(engine: Engine) -> None:
    """Run to the end, whatever is raised on the way."""
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()


def outputs(requests: list[Request]) -> list[list[int]]:
    return [list(request.output) for request in requests]


@cache
def expected() -> list[list[int]]:
    """The outputs without any failure."""
    engine, _ = make()
    requests = ask(engine)
    engine.run()
    assert engine.is_healthy and len(set(map(tuple, outputs(requests)))) == len(PROMPTS)
    return outputs(requests)


def check_sent_state(executor: GpuExecutor) -> None:
    """The state that the host believes to have sent is on the device."""
    assert not executor.state._places and not executor.state._values
    if executor._sent is not None:
        count, held = len(executor._sent), executor._decoding.cpu().numpy()
        assert executor._order is not None and (held[count:] == executor.state.spare).all()
        assert np.array_equal(held[:count][executor._order], executor._sent)


def check_after(engine: Engine, executor: GpuExecutor, requests: Sequence[Request] = ()) -> None:
    """Outputs so far are correct prefixes, and new requests get complete outputs."""
    for request, right in zip(requests, expected(), strict=False):
        assert list(request.output) == right[: request.num_generated]
        if request.finish_reason != "error":
            assert list(request.output) == right
    check_sent_state(executor)
    again = ask(engine)
    engine.run()
    assert engine.is_healthy and outputs(again) == expected()
    check_sent_state(executor)


@each_scheduling
@pytest.mark.parametrize("first", [1, 2, 4])
def test_requests_in_flight_fail_with_the_reason_and_others_finish(
    async_scheduling: int, first: int
) -> None:
    engine, executor = make(async_scheduling)
    trip(executor, Tripwire(executor.decoder, RuntimeError("no more"), first))
    requests = ask(engine)
    faults = []
    while engine.has_work:
        engine.step()
        faults.append(engine.fault)
    failed = [request for request in requests if request.finish_reason == "error"]
    assert "RuntimeError: no more" in faults and 1 <= len(failed) <= 3
    assert {request.error for request in failed} == {"RuntimeError: no more"}
    check_after(engine, executor, requests)


@each_scheduling
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["e", "k"])
def test_an_interrupted_launch_changes_no_later_token(
    async_scheduling: int, error: BaseException
) -> None:
    engine, executor = make(async_scheduling, num_blocks=9)
    with Line() as lines:
        ask(engine)
        engine.run()
    source = Random(async_scheduling)
    for _ in range(3):
        requests = ask(engine)
        with Line(source.randint(1, lines.num_seen), error) as line:
            finish(engine)
        finish(engine)
        assert line.num_seen > 0
        check_after(engine, executor, requests)


@pytest.mark.parametrize("function", ["_send_rows", "_put"])
def test_state_that_was_sent_partly_is_sent_again(function: str) -> None:
    """Interrupt each line of the functions that send state the host remembers as sent."""
    engine, executor = make(1)
    ask(engine)
    with Line(only=function) as lines:
        engine.run()
    assert lines.num_seen >= 8
    for at in range(1, 9):
        requests = ask(engine, 2)
        with Line(at, KeyboardInterrupt(), only=function):
            finish(engine)
        finish(engine)
        assert any(request.finish_reason == "error" for request in requests)
        check_sent_state(executor)
    check_after(engine, executor)


class Lost:
    """An event of a device that fails while the host waits."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")


class LostInFlight:
    """An executor that loses the plans of some steps after they were launched."""

    def __init__(self, executor: GpuExecutor, steps: set[int]) -> None:
        self._executor, self._steps = executor, steps

    def launch(self, plan: Plan) -> PendingStep:
        pending = self._executor.launch(plan)
        if plan.step in self._steps:
            pending.arrived = Lost()  # type: ignore[assignment]
        return pending


@each_scheduling
@pytest.mark.parametrize("step", [0, 2])
def test_a_plan_that_fails_on_the_device_is_reported_like_a_failed_launch(
    async_scheduling: int, step: int
) -> None:
    engine, executor = make(async_scheduling)
    engine.executor = LostInFlight(executor, {step})
    requests = ask(engine)
    engine.run()
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed and all("illegal memory" in (request.error or "") for request in failed)
    check_after(engine, executor, requests)


def raising(error: BaseException) -> Callable[[], None]:
    def probe() -> None:
        raise error

    return probe


@each_scheduling
def test_a_lost_device_stops_the_engine_with_the_first_reason(async_scheduling: int) -> None:
    engine, executor = make(async_scheduling)
    engine.executor = LostInFlight(executor, {1})
    executor.faults.probe = raising(RuntimeError("CUDA error: unspecified launch failure"))
    requests = [request for _ in range(MAX_FAULTS + 1) for request in ask(engine)]
    engine.run()
    assert engine.fault and "an illegal memory access was" in engine.fault
    assert "context is unusable" in engine.fault and "restart" in engine.fault
    assert "\n" not in engine.fault and "unspecified" not in engine.fault
    assert not engine.is_healthy and not engine.has_work
    failed = [request for request in requests if request.finish_reason == "error"]
    assert len(failed) > 12 and {request.error for request in failed} == {engine.fault}
    with pytest.raises(ExecutorError, match=r"illegal memory access.*restart"):
        ask(engine)


def test_a_lost_device_is_not_used_again() -> None:
    engine, executor = make()
    wire = Tripwire(executor.decoder, RuntimeError("astray"), 2, times=99)
    trip(executor, wire)
    executor.faults.probe = raising(RuntimeError("astray"))
    ask(engine)
    engine.run()
    assert wire._count == 2 and not engine.is_healthy


@each_scheduling
def test_out_of_memory_names_the_flags_and_is_not_fatal(async_scheduling: int) -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. If reserved is large"
    engine, executor = make(async_scheduling)
    trip(executor, Tripwire(executor.decoder, torch.OutOfMemoryError(message), 2))
    requests = ask(engine)
    engine.run()
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed
    for request in failed:
        assert request.error and "CUDA out of memory" in request.error
        assert "--max-num-batched-tokens" in request.error and "If reserved" not in request.error
    check_after(engine, executor, requests)


@each_scheduling
@pytest.mark.parametrize("is_late", [False, True], ids=["capture", "first replay"])
def test_decodes_go_on_without_graphs_if_no_memory_is_left_for_them(
    async_scheduling: int, is_late: bool
) -> None:
    engine, executor = make(async_scheduling)
    graphs = executor.graphs
    tried = fail_captures(graphs, torch.OutOfMemoryError("no memory"), is_late)
    requests = ask(engine)
    engine.run()
    assert len(tried) == 1 and not graphs.is_enabled and not len(graphs)
    assert outputs(requests) == expected()


def test_the_time_of_a_swap_is_read_inside_the_guard() -> None:
    """Reading it waits for the device, so it can be the first call to see an error."""
    engine, executor = make()

    class LostTimer:
        def seconds(self) -> float:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    launch = executor.launch

    def launched(plan: Plan) -> PendingStep:
        pending = launch(plan)
        pending.swap_in = LostTimer()  # type: ignore[assignment]
        return pending

    executor.launch = launched  # type: ignore[method-assign]
    executor.faults.probe = raising(RuntimeError("CUDA error: unspecified launch failure"))
    requests = ask(engine)
    engine.run()
    assert engine.fault and "an illegal memory access was" in engine.fault
    assert all("context is unusable" in (request.error or "") for request in requests[:3])


class Recorder:
    """A graph that records the calls to it."""

    def __init__(self, end: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._end = end

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.calls.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self._end:
            raise self._end


@pytest.mark.parametrize("error", [RuntimeError("step"), KeyboardInterrupt("step")])
@pytest.mark.parametrize("end", [None, RuntimeError("the capture was invalidated")])
def test_a_failed_capture_is_ended_and_raises_its_own_error(
    error: BaseException, end: BaseException | None
) -> None:
    graph = Recorder(end)
    with pytest.raises(type(error), match="step"):
        capture_into(graph, "pool", raising(error))
    assert graph.calls == ["begin pool thread_local", "end"]


def test_a_capture_that_cannot_be_ended_raises() -> None:
    graph = Recorder(RuntimeError("no graph"))
    with pytest.raises(RuntimeError, match="no graph"):
        capture_into(graph, None, lambda: None)
    assert graph.calls == ["begin None thread_local", "end", "end"]


def test_a_capture_that_succeeds_is_ended_once() -> None:
    graph = Recorder()
    capture_into(graph, "pool", lambda: graph.calls.append("work"))
    assert graph.calls == ["begin pool thread_local", "work", "end"]


@pytest.mark.parametrize("error", [None, RuntimeError("step")])
def test_garbage_is_not_collected_during_a_capture(error: BaseException | None) -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(gc.isenabled())
        if error:
            raise error

    with suppress(RuntimeError):
        capture_into(Recorder(), None, work)
    assert seen == [False] and gc.isenabled()


class Unsuitable(Tripwire):
    """Does something in its nth pass that a capture does not allow."""

    def forward(self, batch: ForwardBatch, blocks: Tensor, **more: Any) -> Tensor:
        self._count += 1
        if self._count in self._broken:
            torch.cuda.synchronize()
        return self._decoder.forward(batch, blocks, **more)


def fail_in_a_capture(kind: type[Tripwire], first: int, async_scheduling: int) -> None:
    """After a failed capture, all requests get outputs, from graphs."""
    engine, executor = make(async_scheduling)
    trip(executor, kind(executor.decoder, RuntimeError("in a capture"), first))
    requests = ask(engine)
    engine.run()
    assert any(request.finish_reason == "error" for request in requests)
    for _ in range(2):
        check_after(engine, executor, requests)
    assert len(executor.graphs) >= 2


@on_gpu
@each_scheduling
@pytest.mark.parametrize("first", [2, 3])  # after the prompts: run once, then captured
def test_a_failed_capture_on_a_gpu_is_repeated(first: int, async_scheduling: int) -> None:
    fail_in_a_capture(Tripwire, first, async_scheduling)


def in_a_process(script: str) -> str:
    """The output of a script, for failures from which a process does not recover."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@on_gpu
def test_a_capture_that_the_driver_ended_is_repeated() -> None:
    start = "from tests.executor import test_gpu_faults as tests\n"
    in_a_process(f"{start}tests.fail_in_a_capture(tests.Unsuitable, 3, 1)")


ASTRAY = """
import os
import torch
from headway.errors import ExecutorError
from tests.executor import test_gpu_faults as tests

class Astray(tests.Tripwire):
    def forward(self, batch, blocks, **more):
        self._count += 1
        if self._count in self._broken:
            torch.zeros(4, device="cuda")[batch.tokens_t + 1000]
        return self._decoder.forward(batch, blocks, **more)

engine, executor = tests.make(1)
tests.trip(executor, Astray(executor.decoder, RuntimeError(), 1))
requests = tests.ask(engine) + tests.ask(engine)
engine.run()
assert all(r.finish_reason == "error" and "context is unusable" in r.error for r in requests)
assert not engine.is_healthy
for _ in range(3):
    try:
        tests.ask(engine, 1)
        engine.run()
    except ExecutorError as error:
        print(error, flush=True)
os._exit(0)  # destructors would call the device
"""


@on_gpu
def test_an_illegal_memory_access_stops_the_engine_and_hangs_nothing() -> None:
    printed = in_a_process(ASTRAY)
    assert "context is unusable" in printed and "restart" in printed
