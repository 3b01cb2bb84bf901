"""Compiling ahead launches nothing, while other threads still launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime.errors import InterpreterError

from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.kernels.blocks import gather_blocks
from headway.model.kernels.launch import CompilePool, can_chain, compile_all
from tests.executor.test_gpu import Loud, model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def copied() -> Tensor:
    """Zeros, or ones if the kernel ran."""
    blocks = torch.ones((4, 8), device=DEVICE)
    staging = torch.zeros((4, 8), device=DEVICE)
    gather_blocks(blocks, torch.arange(4, device=DEVICE), staging)
    return staging.cpu()


def ignore(_done: int, _total: int) -> None: ...


def test_compiling_ahead_launches_nothing() -> None:
    found = list[Tensor]()
    compile_all(lambda: found.append(copied()), ignore)
    assert len(found) == 1 and not found[0].any() and copied().all()


def test_other_threads_launch_while_one_compiles() -> None:
    found = list[Tensor]()
    with ThreadPoolExecutor(1) as other:
        compile_all(lambda: found.append(other.submit(copied).result()), ignore)
    assert len(found) == 1 and found[0].all()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_launches_work_after_a_failure_while_compiling(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    for _ in range(2):
        with pytest.raises(error):
            compile_all(fail, ignore)
        assert copied().all()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize(("num_failures", "is_compiled"), [(0, True), (3, True), (100, False)])
def test_a_source_that_was_parsed_beside_another_is_parsed_again(
    num_failures: int, is_compiled: bool, is_called: bool
) -> None:
    """Also the source of a function that the kernel calls."""
    failures = iter(
        ["AST constructor recursion depth mismatch (before=36, after=31)"] * num_failures
    )

    def compiled() -> Any:
        if problem := next(failures, None):
            if is_called:
                raise CompilationError("", None, None) from SystemError(problem)
            raise SystemError(problem)
        return build

    build = SimpleNamespace(run=None)
    pool = CompilePool(1)
    task = pool.submit(compiled)
    pool.shutdown()
    if is_compiled:
        assert task.result() is build
    else:
        assert isinstance(task.exception(), CompilationError if is_called else SystemError)


def test_other_errors_of_a_compilation_are_raised_at_once() -> None:
    calls = []

    def compiled() -> Any:
        calls.append(None)
        raise CompilationError("", None, None) from SystemError("another problem")

    pool = CompilePool(1)
    task = pool.submit(compiled)
    pool.shutdown()
    assert isinstance(task.exception(), CompilationError) and len(calls) == 1


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_launches_are_chained_from_hopper_on_and_with_a_triton_that_can(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", ..., raising=False)
    assert can_chain.__wrapped__() == (capability >= (9, 0))
    monkeypatch.delattr(tl.extra.cuda, "gdc_wait")
    assert not can_chain.__wrapped__()


def test_a_shortened_decoder_gets_all_its_layers_back() -> None:
    decoder = Decoder(Loud(model(num_hidden_layers=3)), PlainBackend())
    layers = decoder.layers
    with pytest.raises(ZeroDivisionError), decoder.shortened(2):
        assert decoder.layers == layers[:2]
        print(1 // 0)
    assert decoder.layers is layers


@triton.jit
def _scaled(x, out, factor):
    tl.store(out, tl.load(x) * factor)


@triton.jit
def _scaled_pair(x, out, factor):
    places = tl.arange(0, 2)
    tl.store(out + places, tl.load(x + places) * factor)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel wraps around")
def test_an_interpreted_kernel_reports_integer_overflow() -> None:
    x, out = torch.tensor([1, 2**30], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for kernel, numbers in ((_scaled, x[1:]), (_scaled_pair, x)):
        kernel[(1,)](numbers, out, -2)
        assert out[: len(numbers)].tolist() == [-2, -(2**31)][-len(numbers) :]
        for factor in (2, -3):
            with pytest.raises(InterpreterError, match="mul: int32 overflows"):
                kernel[(1,)](numbers, out, factor)
