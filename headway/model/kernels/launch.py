"""How kernels are compiled and launched: many at a time, and chained, where the device can.

A chained kernel may be on the device while the one before it still runs; `begin` waits until that
one is done and all it wrote can be seen. Every kernel in a chain begins so, in every program, or
the one after it could run ahead of the one before it.

Kernels are compiled when they are first launched, one after the other. Whoever knows what will be
launched has it compiled before, several at a time: see `compiling`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl

# For kernels in which several threads hold one sum, and one of them stores it. If a product were
# fused with an addition in some of them and not in others, it were chance what is stored.
ROUNDED_ALIKE = {"enable_fp_fusion": False}


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Let the kernel after this one come on to the device, and wait for the one before it."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def can_chain() -> bool:
    """Whether the device starts a kernel while another ends: NVIDIA's, from Hopper on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def launch_options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """The keywords of a launch."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "CHAINED": False}
    if can_chain():
        options |= {"CHAINED": True, "launch_pdl": True}
    return options


class launched:
    """A decorator of kernels, above triton.jit's: what is launched may be only compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.kernel.run, grid=grid, warmup=IS_COMPILING.get())


IS_COMPILING: ContextVar[bool] = ContextVar("is_compiling", default=False)


@contextmanager
def compiling(progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """In this thread, compile what is launched and launch nothing; at the end all of it is there."""
    was_compiling = IS_COMPILING.set(True)
    try:
        with Threads(progress) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        IS_COMPILING.reset(was_compiling)


class Threads(ThreadPoolExecutor):
    """A thread for every processor; tells how many of its tasks are done."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        super().__init__(os.cpu_count())
        self._progress, self._num_given, self._num_done = progress, 0, 0
        self._telling = Lock()

    def submit(self, *task: Any, **options: Any) -> Future[Any]:
        self._num_given += 1
        given = super().submit(*task, **options)
        given.add_done_callback(self._tell)
        return given

    def _tell(self, _: Future[Any]) -> None:
        with self._telling:
            self._num_done += 1
            if self._progress:
                self._progress(self._num_done, self._num_given)
