"""Decode steps captured as CUDA graphs, one for each size of batch, and for long contexts.

Captured when first needed. All share one pool of memory, since only one runs at a time. On other
devices the step runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

Step = Callable[[int, int], None]  # rows, and about the longest context
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
    """Capture what `work` launches. If that fails the capture is over too, or nothing could run."""
    try:
        tape.capture_begin(pool=pool, capture_error_mode="thread_local")
        work()
        tape.capture_end()
    except BaseException:
        with suppress(Exception):  # a call that no capture allows has broken it off already
            tape.capture_end()
        raise


class Graphs:
    """Runs a step, from its graph where there can be one."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._is_cuda = device.type == "cuda"
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._stream = torch.cuda.Stream() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, num_rows: int, longest: int) -> bool:
        """Whether the step can run at once."""
        return not self._is_cuda or (num_rows, longest) in self._graphs

    def run(self, num_rows: int, longest: int) -> None:
        if self._is_cuda:
            self._graphs[num_rows, longest].replay()
        else:
            self._step(num_rows, longest)

    def capture(self, num_rows: int, longest: int) -> None:
        """Run the step once, so that its kernels are there, and capture it."""
        if self._stream is None:
            return
        self._step(num_rows, longest)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                record(graph, self._pool, lambda: self._step(num_rows, longest))
        except BaseException:
            # If the driver broke it off, torch takes the pool for one that is still captured into,
            # and looks at the graph whenever memory is asked for: it must stay.
            self._pool = torch.cuda.graph_pool_handle()
            BROKEN.append(graph)
            raise
        self._graphs[num_rows, longest] = graph
