"""Work captured as CUDA graphs, one for each size of it.

All of one kind share a pool of memory, since only one runs at a time. On other devices the work is
done as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch

Size = tuple[int, ...]
Step = Callable[..., None]  # takes the numbers of a size
BROKEN: list[torch.cuda.CUDAGraph] = []  # captures that failed, for as long as the process lives


def padded_rows(num_rows: int) -> int:
    """Rows of the graph that a batch runs in: a few empty ones cost less than many graphs."""
    for most, step in ((8, 1), (16, 4), (64, 8), (256, 16), (512, 32)):
        if num_rows <= most:
            return -(-num_rows // step) * step
    return -(-num_rows // 64) * 64


class Tape(Protocol):
    """What takes down launches, as torch's CUDAGraph does."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None: ...
    def capture_end(self) -> None: ...


def record(tape: Tape, pool: Any, work: Callable[[], None]) -> None:
    """Capture what `work` launches. If that fails the capture is over too, or nothing could run.

    Nothing is collected meanwhile: a graph of somebody else that is freed would break it off.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        tape.capture_begin(pool=pool, capture_error_mode="thread_local")
        work()
        tape.capture_end()
    except BaseException:
        with suppress(Exception):  # a call that no capture allows has broken it off already
            tape.capture_end()
        raise
    finally:
        if was_collecting:
            gc.enable()


class Graphs:
    """Runs a step, from its graph where there is one."""

    def __init__(self, step: Step, device: torch.device, most: int | None = None) -> None:
        """At most so many are kept: those used last."""
        self._step, self._most = step, most
        self._is_cuda = device.type == "cuda"
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream() if self._is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def is_enabled(self) -> bool:
        return self._stream is not None

    def disable(self) -> None:
        """Capture nothing from now on: every step launches its kernels one by one."""
        self._stream = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, size: Size) -> bool:
        return size in self._graphs

    def __iter__(self) -> Iterator[Size]:
        return iter(self._graphs)

    def run(self, size: Size) -> None:
        graph = self._graphs.pop(size, None)
        if graph is None:
            self._step(*size)
        else:
            graph.replay()
            self._graphs[size] = graph  # the last one again; one that cannot be replayed is gone

    def capture(self, size: Size) -> None:
        """Without running it. It must have run before, or its kernels would not be there."""
        if self._stream is None:
            return
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                record(graph, self._pool, lambda: self._step(*size))
        except BaseException:
            # If the driver broke it off, torch takes the pool for one that is still captured into,
            # and looks at the graph whenever memory is asked for: it must stay.
            self._pool = torch.cuda.graph_pool_handle()
            BROKEN.append(graph)
            raise
        self._graphs[size] = graph
        if self._most is not None and len(self._graphs) > self._most:
            del self._graphs[next(iter(self._graphs))]
