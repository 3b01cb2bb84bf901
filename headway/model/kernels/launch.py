"""How kernels are compiled and launched: many at a time, and chained, where the device can.

A chained kernel may be on the device while the one before it still runs; `begin` waits until that
one is done and all it wrote can be seen. Every kernel in a chain begins so, in every program, or
the one after it could run ahead of the one before it.

Kernels are compiled when they are first launched, one after the other. Whoever knows what will be
launched has it compiled before, several at a time: see `compile_all`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import ContextVar, copy_context
from copy import copy
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

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


def power_of_2(count: int) -> int:
    """The least that is not less. Triton's own takes the host as long as a tenth of a launch."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


class launched:
    """A decorator of kernels, above triton.jit's: what is launched may be only compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        copies = COPIES.get()
        if copies is None:
            return partial(self.kernel.run, grid=grid, warmup=False)
        if self not in copies:
            copies[self] = _copied(self.kernel)
        return partial(copies[self].run, grid=grid, warmup=True)


COPIES: ContextVar[dict[launched, Any] | None] = ContextVar("copies", default=None)


def compile_all(work: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Compile what `work` launches, several kernels at a time, and launch nothing.

    An older Triton cannot; then everything is compiled when it is launched.
    """
    if hasattr(triton, "AsyncCompileMode"):
        copy_context().run(_compile_all, work, progress)  # whatever happens, nothing stays set


def _compile_all(work: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Copies of the kernels are compiled: nobody else meets one that is not done or never will be."""
    copies: dict[launched, Any] = {}
    COPIES.set(copies)
    threads = Threads(min(16, _num_processors()))
    try:
        with triton.AsyncCompileMode(threads):
            work()
            for num_done, _ in enumerate(as_completed(threads.given), start=1):
                progress(num_done, len(threads.given))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for original, copied in copies.items():
            _hand_over(copied, original.kernel)


def _copied(kernel: Any) -> Any:
    """With builds of its own, where kernels are built at all and not interpreted."""
    copied = copy(kernel)
    if isinstance(kernel, triton.JITFunction):
        known = {device: (dict(found), *rest) for device, (found, *rest) in _builds(kernel)}
        copied.device_caches = defaultdict(copied.create_binder, known)
    return copied


def _hand_over(copied: Any, kernel: Any) -> None:
    if isinstance(kernel, triton.JITFunction):
        for device, (found, *_) in _builds(copied):
            done = {key: build for key, build in found.items() if isinstance(build, CompiledKernel)}
            kernel.device_caches[device][0].update(done)


def _builds(kernel: Any) -> list[tuple[int, Any]]:
    """Of every device: those that Triton keeps, by what it tells them apart by, and more."""
    return list(kernel.device_caches.items())


def _num_processors() -> int:
    """That this process may use, where the system can tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Threads(ThreadPoolExecutor):
    """Keeps what it was given."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.given: list[Future[Any]] = []

    def submit(self, *task: Any, **options: Any) -> Future[Any]:
        self.given.append(super().submit(*task, **options))
        return self.given[-1]
