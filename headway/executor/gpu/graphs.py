"""CUDA graphs of one function, one graph for each size of its work.

The graphs share one memory pool, because only one of them runs at a time. On other devices the
function runs directly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from headway.model.kernels.attention.splits import split_counts

GraphKey = tuple[int, ...]
StepFunction = Callable[..., None]  # takes the numbers of a graph key
FAILED_CAPTURES: list[torch.cuda.CUDAGraph] = []  # failed captures, kept until the process ends


def padded_rows(num_rows: int) -> int:
    """Rows of the graph that runs a batch: a few padding rows cost less than more graphs."""
    for limit, step in ((8, 1), (16, 4), (64, 8), (256, 16), (512, 32)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 64) * 64


def decode_sizes(num_rows: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """All (rows, splits) of decode steps of up to this many rows, largest first."""
    sizes = {padded_rows(count) for count in range(1, num_rows + 1)}
    return [
        (padded, num_splits)
        for padded in sorted(sizes, reverse=True)
        for num_splits in split_counts(padded * num_kv_heads)
    ]


def capture_into(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], None]) -> None:
    """Capture the launches of `work`. The capture also ends if `work` fails.

    Garbage collection is off meanwhile: freeing another graph would invalidate the capture.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        work()
        graph.capture_end()
    except BaseException:
        with suppress(Exception):  # a forbidden call has already ended the capture
            graph.capture_end()
        raise
    finally:
        if was_collecting:
            gc.enable()


class Graphs(dict[GraphKey, torch.cuda.CUDAGraph]):
    """The captured graphs of a function; runs the function, from its graph if it has one."""

    def __init__(self, step: StepFunction, device: torch.device) -> None:
        self._step, is_cuda = step, device.type == "cuda"
        self.num_captures = 0
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def is_enabled(self) -> bool:
        return self._stream is not None

    def disable(self) -> None:
        """Capture nothing from now on: every step launches its kernels one by one."""
        self._stream = None

    def run(self, key: GraphKey) -> None:
        graph = self.pop(key, None)
        if graph is None:
            self._step(*key)
        else:
            graph.replay()
            self[key] = graph  # a graph that fails is dropped

    def capture(self, key: GraphKey) -> None:
        """Capture without running. The function must have run before, so its kernels are loaded."""
        if self._stream is None:
            return
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                capture_into(graph, self._pool, lambda: self._step(*key))
        except BaseException:
            # If the driver ended the capture, torch still treats the pool as being captured into
            # and accesses the graph at every allocation, so the graph must stay alive.
            self._pool = torch.cuda.graph_pool_handle()
            FAILED_CAPTURES.append(graph)
            raise
        self[key] = graph
        self.num_captures += 1
