"""Where evaluations run: in this process, in several processes, or on a Ray cluster.

An executor has one method: `run(function, items)` yields (place, result) in any order.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, Protocol

from headway.errors import ConfigError

Function = Callable[[Any], Any]
Results = Iterator[tuple[int, Any]]  # (place of the item, result)


class JobExecutor(Protocol):
    """Runs a picklable function on picklable items."""

    def run(self, function: Function, items: Sequence[Any]) -> Results: ...
    def close(self) -> None: ...


class InProcess:
    """One after the other, in this process."""

    def run(self, function: Function, items: Sequence[Any]) -> Results:
        for place, item in enumerate(items):
            yield place, function(item)

    def close(self) -> None:
        pass


class Processes:
    """A pool of `count` processes, started when there is more than one item to run."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Function, items: Sequence[Any]) -> Results:
        if self._count == 1 or len(items) == 1:
            yield from InProcess().run(function, items)
            return
        if self._pool is None:
            # Not fork: the progress bar has a thread.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, context, _start_worker)
        with _interrupts_held():  # the first `submit` starts the workers
            places = {self._pool.submit(function, item): place for place, item in enumerate(items)}
        for future in as_completed(places):
            yield places[future], future.result()

    def close(self) -> None:
        """End the processes at once, also in the middle of an item."""
        if self._pool is None:
            return
        workers = list(self._pool._processes.values())  # Python 3.14 has terminate_workers()
        for worker in workers:
            worker.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes that start in it never receive Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set a handler, and only it receives Ctrl-C
        return
    held: list[int] = []
    # Other threads do not block the signal, so it can still reach the handler.
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which new processes inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _start_worker() -> None:
    """End with the main process even if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class OnRay:
    """Tasks of a Ray cluster; the address is Ray's own setting, RAY_ADDRESS."""

    def __init__(self) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError(
                "--ray needs ray, which is not installed: pip install '.[ray]' in Headway's folder"
            ) from None
        self._is_connected = False

    def run(self, function: Function, items: Sequence[Any]) -> Results:
        if not self._is_connected:  # late, because a local Ray takes seconds to start
            self._ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="WARNING")
            self._is_connected = True
        task = self._ray.remote(function)
        places = {task.remote(item): place for place, item in enumerate(items)}
        left = list(places)
        while left:
            done, left = self._ray.wait(left)
            for reference in done:
                yield places[reference], self._ray.get(reference)

    def close(self) -> None:
        if self._is_connected:
            self._ray.shutdown()
