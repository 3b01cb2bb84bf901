"""Waiting in tests: for a condition, with one generous limit.

A test never states how fast something is: it waits until a condition is true, and `LIMIT` only ends
a test that would otherwise hang. Every timeout of a test that is not itself the subject of
the test is `LIMIT`: of subprocesses, connections, futures and browsers. `make soak` lists the tests
that take longer than half of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

LIMIT = 300.0  # seconds; the longest wait on a loaded machine is a small part of it
POLL = 0.005  # seconds between the first two looks at a condition; later ones are rarer
SLOWER = 0.05  # of the time since the first look: a look may cost CPU time that others wait for
T = TypeVar("T")


def wait_until(condition: Callable[[], T]) -> T:
    """Wait for a condition that other threads or processes make true; return its value."""
    for found, pause in _looks(condition):
        if found:
            return found
        time.sleep(pause)
    raise AssertionError("unreachable")


async def until(condition: Callable[[], T]) -> T:
    """Wait for a condition that other tasks, threads or processes make true; return its value."""
    for found, pause in _looks(condition):
        if found:
            return found
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def _looks(condition: Callable[[], T]) -> Iterator[tuple[T, float]]:
    """The values of a condition, and pauses between them; TimeoutError after `LIMIT` seconds."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < LIMIT:
        yield condition(), max(POLL, SLOWER * passed)
    raise TimeoutError(f"the condition did not become true in {LIMIT:.0f} s")


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in its own event loop, with a timeout."""

    @wraps(test)
    def run(*args: Any, **names: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **names), LIMIT))  # type: ignore[arg-type]

    return run
