"""Runs work that is too long for the event loop on threads that release the GIL regularly.

A thread that only computes takes the GIL back every few milliseconds, and one engine step on a CPU
needs the GIL a hundred times. Offloaded work therefore calls `yield_gil` between small parts.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MAX_INLINE_SIZE = 4000  # characters, token ids or log probabilities handled on the event loop
LARGE = 1 << 18  # work of this size runs one at a time, so that memory stays bounded
SLICE = 0.004  # seconds of work between two pauses
PAUSE = 2.0  # seconds of sleep per second of work
_LARGE_WORK = ThreadPoolExecutor(1, "large-requests")
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
_thread = threading.local()  # has `worked_since` only on threads started by `offload`


async def offload(size: int, work: Callable[[], T]) -> T:
    """Return `work()`: called directly up to MAX_INLINE_SIZE, on another thread above it."""
    if size <= MAX_INLINE_SIZE:
        return work()
    executor = _LARGE_WORK if size > LARGE else None
    return await asyncio.get_running_loop().run_in_executor(executor, _with_pauses, work)


def _with_pauses(work: Callable[[], T]) -> T:
    _thread.worked_since = time.perf_counter()
    try:
        return work()
    finally:
        del _thread.worked_since


async def return_memory() -> None:
    """Return memory freed by large requests to the system; glibc would keep some of it."""
    if _TRIM is not None:
        await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, _TRIM, 0)


def yield_gil() -> None:
    """Sleep if the calling thread runs offloaded work and its time slice is over."""
    since = getattr(_thread, "worked_since", None)
    if since is not None:
        worked = time.perf_counter() - since
        if worked >= SLICE:
            time.sleep(worked * PAUSE)
            _thread.worked_since = time.perf_counter()
