"""Work that is too long for the event loop, on threads that leave the GIL to the others.

A thread that only computes takes the GIL again every few milliseconds, and a step of the engine on
a CPU needs it a hundred times. So such work calls `pause` between small parts.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
SHORT = 4000  # characters, ids or log probabilities; more would hold up other streams
LARGE = 1 << 18  # work of this size is done one at a time, so that memory stays bounded
SLICE = 0.004  # seconds of work between two pauses
PAUSE = 2.0  # seconds of pause for each second of work
_LARGE_WORK = ThreadPoolExecutor(1, "large-requests")
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
_thread = threading.local()  # `worked_since`: only on threads that `aside` uses


async def aside(size: int, work: Callable[[], Result]) -> Result:
    """Do work of this size: at once if it is short, else on another thread."""
    if size <= SHORT:
        return work()
    executor = _LARGE_WORK if size > LARGE else None
    return await asyncio.get_running_loop().run_in_executor(executor, _with_pauses, work)


def _with_pauses(work: Callable[[], Result]) -> Result:
    _thread.worked_since = time.perf_counter()
    try:
        return work()
    finally:
        del _thread.worked_since


async def return_memory() -> None:
    """Give what large requests have freed back to the system; glibc would keep some of it."""
    if _TRIM is not None:
        await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, _TRIM, 0)


def pause() -> None:
    """Sleep if this is a thread of `aside` and its slice of time is over; else do nothing."""
    since = getattr(_thread, "worked_since", None)
    if since is not None:
        worked = time.perf_counter() - since
        if worked >= SLICE:
            time.sleep(worked * PAUSE)
            _thread.worked_since = time.perf_counter()
