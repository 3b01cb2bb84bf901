"""Laws of a failing device: whoever was in flight is told why, and nobody gets a wrong token later.

The device executor runs here over plain torch, so that a run takes a fraction of a second. Where
there is a GPU they run on it, and failures inside of captures are tried too.
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

from headway.engine.engine import MAX_FAULTS, Engine
from headway.errors import ExecutorError
from headway.executor.gpu.graphs import record
from headway.model.backends.base import Pass
from headway.model.backends.plain import PlainBackend, PlainPass
from headway.model.batch import Batch
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.plan import Plan
from headway.request import Params, Request
from headway.scheduler import Scheduler

pytest.importorskip("triton")
from headway.executor.gpu.executor import DeviceExecutor, Flight
from headway.model.backends.gpu import GpuBackend
from tests.executor.test_gpu import Loud, model, settings

pytestmark = pytest.mark.usefixtures("few_rows_of_nobody")
each_scheduling = pytest.mark.parametrize("async_scheduling", [0, 1])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1}  # fmt: skip
PROMPTS = [[7, 3], [1, 2, 3, 4, 5], [9, 8, 7], [4]]
LIMITS = [3, 4, 2, 5]
NUMBERS = itertools.count()


class DecodesFirst(PlainBackend):
    """Plain torch over batches as the device executor makes them."""

    def begin(
        self, config: ModelConfig, batch: Batch, blocks: Tensor, cosine: Tensor, sine: Tensor
    ) -> Pass:
        count = batch.num_decodes
        starts, ends = torch.arange(count + 1), batch.positions_t[:count] + 1
        if count < len(batch.tokens_t):
            starts = torch.cat([starts[:count], batch.starts_s])
            ends = torch.cat([ends, batch.ends_s])
        whole = replace(batch, starts_s=starts, ends_s=ends)
        return PlainPass(self, config, whole, blocks, cosine, sine)


class Tripwire:
    """A decoder that raises at its nth forward pass, and at so many after it."""

    def __init__(self, decoder: Decoder, error: BaseException, first: int, times: int = 1) -> None:
        self._decoder, self._error = decoder, error
        self._count, self._broken = 0, range(first, first + times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Batch, blocks: Tensor) -> Tensor:
        self._count += 1
        if self._count in self._broken:
            raise self._error
        return self._decoder.forward(batch, blocks)


def trip(executor: DeviceExecutor, wire: Tripwire) -> None:
    """All passes go through it from now on."""
    executor.decoder = executor.mixed.decoder = wire  # type: ignore[assignment]


class Line:
    """Raises at the nth line that the executor runs, of one function or of any."""

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
        is_meant = name == self._only or (not self._only and name != "_forget")
        is_executor = module.startswith("headway.executor.factory") and "faults" not in module
        return self._line if is_executor and is_meant else None

    def _line(self, frame: FrameType, event: str, value: object) -> Any:
        self.num_seen += event == "line"
        if event == "line" and self.num_seen == self._at and self._error:
            raise self._error
        return self._line


def make(async_scheduling: int = 0, **more: Any) -> tuple[Engine, DeviceExecutor]:
    config = settings(**{"max_num_seqs": 3, **more})
    has_gpu = torch.cuda.is_available()
    backend = GpuBackend(torch.float32, "cuda") if has_gpu else DecodesFirst()
    executor = DeviceExecutor(Decoder(Loud(model("Llama", **TINY)), backend), config)
    return Engine(Scheduler(config), executor, async_scheduling=async_scheduling), executor


def ask(engine: Engine, count: int = len(PROMPTS)) -> list[Request]:
    """Requests of different lengths; ids are new every time."""
    return [
        engine.add(str(next(NUMBERS)), prompt, Params(max_tokens=limit))[0]
        for prompt, limit in list(zip(PROMPTS, LIMITS, strict=True))[:count]
    ]


def finish(engine: Engine) -> None:
    """To the end, whatever is raised on the way."""
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()


def outputs(requests: list[Request]) -> list[list[int]]:
    return [list(request.output) for request in requests]


@cache
def expected() -> list[list[int]]:
    """What is said when nothing fails."""
    engine, _ = make()
    requests = ask(engine)
    engine.run()
    assert engine.is_healthy and len(set(map(tuple, outputs(requests)))) == len(PROMPTS)
    return outputs(requests)


def check_beliefs(executor: DeviceExecutor) -> None:
    """What the host takes for told to the device is what the device was told."""
    assert not executor.seats._places and not executor.seats._values
    if executor._sent is not None:
        count, held = len(executor._sent), executor._decoding.cpu().numpy()
        assert executor._order is not None and (held[count:] == executor.seats.spare).all()
        assert np.array_equal(held[:count][executor._order], executor._sent)


def check_after(engine: Engine, executor: DeviceExecutor, requests: Sequence[Request] = ()) -> None:
    """What was said is right as far as it goes, and what is asked now is answered whole."""
    for request, right in zip(requests, expected(), strict=False):
        assert list(request.output) == right[: request.num_generated]
        if request.finish_reason != "error":
            assert list(request.output) == right
    check_beliefs(executor)
    again = ask(engine)
    engine.run()
    assert engine.is_healthy and outputs(again) == expected()
    check_beliefs(executor)


# A step that fails.


@each_scheduling
@pytest.mark.parametrize("first", [1, 2, 4])
def test_whoever_was_in_flight_is_told_why_and_the_others_are_served(
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
def test_a_launch_broken_off_anywhere_changes_no_later_token(
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
def test_what_was_told_by_half_is_told_again(function: str) -> None:
    """Each line of the functions that tell the device what the host takes for told afterwards."""
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
        check_beliefs(executor)
    check_after(engine, executor)


class Lost:
    """An event that never comes: the device fails when it is waited for."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it")


class LostInFlight:
    """An executor whose plans of some steps are lost after they were launched."""

    def __init__(self, executor: DeviceExecutor, steps: set[int]) -> None:
        self._executor, self._steps = executor, steps

    def launch(self, plan: Plan) -> Flight:
        flight = self._executor.launch(plan)
        if plan.step in self._steps:
            flight.arrived = Lost()  # type: ignore[assignment]
        return flight


@each_scheduling
@pytest.mark.parametrize("step", [0, 2])
def test_a_plan_that_fails_on_the_device_is_told_of_like_one_that_fails_at_launch(
    async_scheduling: int, step: int
) -> None:
    engine, executor = make(async_scheduling)
    engine.executor = LostInFlight(executor, {step})
    requests = ask(engine)
    engine.run()
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed and all("illegal memory" in (request.error or "") for request in failed)
    check_after(engine, executor, requests)


# A device that is lost.


def raising(error: BaseException) -> Callable[[], None]:
    def probe() -> None:
        raise error

    return probe


@each_scheduling
def test_a_lost_device_ends_everything_with_the_first_reason(async_scheduling: int) -> None:
    engine, executor = make(async_scheduling)
    engine.executor = LostInFlight(executor, {1})
    executor.faults.probe = raising(RuntimeError("CUDA error: unspecified launch failure"))
    requests = [request for _ in range(MAX_FAULTS + 1) for request in ask(engine)]
    engine.run()
    reason = "the device is lost to this process (CUDA error: an illegal memory access was "
    assert engine.fault and reason in engine.fault and "start the program again" in engine.fault
    assert "\n" not in engine.fault and "unspecified" not in engine.fault
    assert not engine.is_healthy and not engine.has_work
    failed = [request for request in requests if request.finish_reason == "error"]
    assert len(failed) > 12 and {request.error for request in failed} == {engine.fault}
    with pytest.raises(ExecutorError, match=r"the engine has stopped: .*start the program again"):
        ask(engine)


def test_a_lost_device_is_not_tried_again() -> None:
    engine, executor = make()
    wire = Tripwire(executor.decoder, RuntimeError("astray"), 2, times=99)
    trip(executor, wire)
    executor.faults.probe = raising(RuntimeError("astray"))
    ask(engine)
    engine.run()
    assert wire._count == 2 and not engine.is_healthy


@each_scheduling
def test_a_step_without_memory_says_what_to_lower_and_is_not_the_end(async_scheduling: int) -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. If reserved is large"
    engine, executor = make(async_scheduling)
    trip(executor, Tripwire(executor.decoder, torch.OutOfMemoryError(said), 2))
    requests = ask(engine)
    engine.run()
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed
    for request in failed:
        assert request.error and "ran out of memory: CUDA out of memory" in request.error
        assert "--max-num-batched-tokens" in request.error and "If reserved" not in request.error
    check_after(engine, executor, requests)


# Captures.


class Recorder:
    """A tape that says what was done with it."""

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
def test_a_capture_that_fails_is_ended_and_its_own_error_is_told(
    error: BaseException, end: BaseException | None
) -> None:
    tape = Recorder(end)
    with pytest.raises(type(error), match="step"):
        record(tape, "pool", raising(error))
    assert tape.calls == ["begin pool thread_local", "end"]


def test_a_capture_that_cannot_be_ended_is_no_capture() -> None:
    tape = Recorder(RuntimeError("no graph"))
    with pytest.raises(RuntimeError, match="no graph"):
        record(tape, None, lambda: None)
    assert tape.calls == ["begin None thread_local", "end", "end"]


def test_a_capture_that_succeeds_is_ended_once() -> None:
    tape = Recorder()
    record(tape, "pool", lambda: tape.calls.append("work"))
    assert tape.calls == ["begin pool thread_local", "work", "end"]


@pytest.mark.parametrize("error", [None, RuntimeError("step")])
def test_nothing_is_collected_during_a_capture(error: BaseException | None) -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(gc.isenabled())
        if error:
            raise error

    with suppress(RuntimeError):
        record(Recorder(), None, work)
    assert seen == [False] and gc.isenabled()


class Unsuitable(Tripwire):
    """Does in its nth pass what no capture allows."""

    def forward(self, batch: Batch, blocks: Tensor) -> Tensor:
        self._count += 1
        if self._count in self._broken:
            torch.cuda.synchronize()
        return self._decoder.forward(batch, blocks)


def fail_in_a_capture(kind: type[Tripwire], first: int, async_scheduling: int) -> None:
    """All that is asked after a capture has failed is answered, from graphs."""
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
def test_a_capture_that_fails_on_a_gpu_is_made_again(first: int, async_scheduling: int) -> None:
    fail_in_a_capture(Tripwire, first, async_scheduling)


def in_a_process(script: str) -> str:
    """What a script prints: for what a process does not recover from."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@on_gpu
def test_a_capture_that_the_driver_breaks_off_is_made_again() -> None:
    start = "from tests import test_device_faults as tests\n"
    in_a_process(f"{start}tests.fail_in_a_capture(tests.Unsuitable, 3, 1)")


ASTRAY = """
import os
import torch
from headway.errors import ExecutorError
from tests import test_device_faults as tests

class Astray(tests.Tripwire):
    def forward(self, batch, blocks):
        self._count += 1
        if self._count in self._broken:
            torch.zeros(4, device="cuda")[batch.tokens_t + 1000]
        return self._decoder.forward(batch, blocks)

engine, executor = tests.make(1)
tests.trip(executor, Astray(executor.decoder, RuntimeError(), 1))
requests = tests.ask(engine) + tests.ask(engine)
engine.run()
assert all(r.finish_reason == "error" and "is lost to this process" in r.error for r in requests)
assert not engine.is_healthy
for _ in range(3):
    try:
        tests.ask(engine, 1)
        engine.run()
    except ExecutorError as error:
        print(error, flush=True)
os._exit(0)  # what is destroyed at the end would ask the device
"""


@on_gpu
def test_a_kernel_that_goes_astray_ends_the_engine_and_hangs_nothing() -> None:
    said = in_a_process(ASTRAY)
    assert "the engine has stopped" in said and "start the program again" in said
