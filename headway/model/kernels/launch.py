"""Compiles and launches kernels, in parallel and with programmatic dependent launch if possible.

A chained kernel may start while the previous one still runs. `begin` waits until the previous
kernel is done and its writes are visible. Every kernel in a chain must call it in every program;
otherwise the kernel after it could run before the one before it has ended.

Triton compiles and loads a kernel at its first launch, one after the other. `compile_all` does so
ahead of the launches, for several kernels at a time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from contextvars import ContextVar, copy_context
from copy import copy
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

NUMS_OF_WARPS = (1, 2, 4, 8, 16, 32)
MAX_PARSES = 8  # of one source, beside other threads
# For kernels in which several threads compute the same sum and one of them stores it. If only some
# of the threads fused a product with an addition, the stored value would vary from run to run.
NO_FP_FUSION: dict[str, int] = {"enable_fp_fusion": False}
# Versions of Triton with which the Gluon kernels were compiled; Gluon is still experimental.
MIN_GLUON, MAX_GLUON = (3, 6), (3, 9)


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Let the next kernel start, and wait for the previous one."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def can_chain() -> bool:
    """Whether device and Triton support dependent launch: NVIDIA GPUs from Hopper on."""
    if not torch.cuda.is_available() or torch.version.hip:
        return False
    has_wait = hasattr(tl.extra.cuda, "gdc_wait")  # not with an older Triton
    return has_wait and torch.cuda.get_device_capability() >= (9, 0)


def hopper_module(name: str) -> ModuleType | None:
    """A module of Gluon kernels, on a Hopper GPU with a Triton that can compile it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not MIN_GLUON <= version <= MAX_GLUON:
        return None
    return import_module(f"headway.model.kernels.{name}")


def launch_options(num_warps: int, num_stages: int, *, fuses: bool = True) -> dict[str, int]:
    """The keyword arguments of a launch; `fuses` is false for the kernels of NO_FP_FUSION."""
    assert num_warps in NUMS_OF_WARPS, f"no GPU runs a program with {num_warps} warps"
    options: dict[str, int] = {"num_warps": num_warps, "num_stages": num_stages, "CHAINED": False}
    if can_chain():
        options |= {"CHAINED": True, "launch_pdl": True}
    return options if fuses else options | NO_FP_FUSION


def power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least `count`; much faster than Triton's function."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


KERNELS: list[Any] = []  # all kernels below `launched`


class launched:
    """Decorator above triton.jit: inside `compile_all`, a launch only compiles the kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        KERNELS.append(kernel)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        copies = COPIES.get()
        if copies is None:
            return partial(self.kernel.run, grid=grid, warmup=False)
        if self not in copies:
            copies[self] = _copied(self.kernel)
        return partial(copies[self].run, grid=grid, warmup=True)


COPIES: ContextVar[dict[launched, Any] | None] = ContextVar("copies", default=None)


def is_compiling() -> bool:
    """Whether this is inside `compile_all`."""
    return COPIES.get() is not None


def compile_all(
    work: Callable[[], None], progress: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Compile and load the kernels that `work` launches, several at a time, without running them.

    Does nothing with an older Triton, which compiles each kernel at its first launch.
    """
    if hasattr(triton, "AsyncCompileMode"):
        copy_context().run(_compile_all, work, progress)  # restores COPIES in any case


def _compile_all(work: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Compile private copies, so that other threads never see an unfinished kernel."""
    copies: dict[launched, Any] = {}
    COPIES.set(copies)
    has_affinity = hasattr(os, "sched_getaffinity")  # the processors that this process may use
    num_processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    threads = CompilePool(min(16, num_processors))
    try:
        with triton.AsyncCompileMode(threads):
            work()
            for num_done, _ in enumerate(as_completed(threads.tasks), start=1):
                progress(num_done, len(threads.tasks))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for original, copied in copies.items():
            _merge_builds(copied, original.kernel)


def _copied(kernel: Any) -> Any:
    """Copy a kernel with its own table of builds, unless kernels are interpreted."""
    copied = copy(kernel)
    if isinstance(kernel, triton.JITFunction):
        builds = {device: (dict(found), *rest) for device, (found, *rest) in _builds(kernel)}
        copied.device_caches = defaultdict(copied.create_binder, builds)
    return copied


def _merge_builds(copied: Any, kernel: Any) -> None:
    if isinstance(kernel, triton.JITFunction):
        for device, (found, *_) in _builds(copied):
            done = {key: build for key, build in found.items() if isinstance(build, CompiledKernel)}
            kernel.device_caches[device][0].update(done)


def _builds(kernel: Any) -> list[tuple[int, Any]]:
    """Triton's caches by device; the first element of each maps launch keys to builds."""
    return list(kernel.device_caches.items())


def num_builds() -> int:
    """The number of kernels that this process has compiled or loaded."""
    kernels = [kernel for kernel in KERNELS if isinstance(kernel, triton.JITFunction)]
    return sum(len(found) for kernel in kernels for _, (found, *_) in _builds(kernel))


class CompilePool(ThreadPoolExecutor):
    """Threads that compile and load kernels on the device that is current in this thread."""

    def __init__(self, num_threads: int) -> None:
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            super().__init__(num_threads, initializer=torch.cuda.set_device, initargs=(device,))
        else:
            super().__init__(num_threads)
        self.tasks: list[Future[Any]] = []

    def submit(self, compiled: Callable[[], CompiledKernel]) -> Future[Any]:  # type: ignore[override]
        self.tasks.append(super().submit(_loaded, compiled))
        return self.tasks[-1]


def _loaded(compiled: Callable[[], CompiledKernel]) -> CompiledKernel:
    """Compile a kernel and load it; older versions of Triton also run a C compiler to load one.

    A kernel that is too large for this device only fails when it is launched.
    """
    build = _retried(compiled)
    with suppress(OutOfResources):
        _ = build.run
    return build


def _retried(compiled: Callable[[], CompiledKernel]) -> CompiledKernel:
    """Compile a kernel, several times if Python 3.11.7 or older cannot parse its source.

    Parsing fails there if another thread starts to parse while the garbage collector runs in this
    one: both count the depth of their trees in the same place.
    """
    for _ in range(MAX_PARSES):
        try:
            return compiled()
        except (SystemError, CompilationError) as error:
            if not any("recursion depth mismatch" in str(cause) for cause in _causes(error)):
                raise
    return compiled()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes: Triton raises its own one for functions that a kernel calls."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__
