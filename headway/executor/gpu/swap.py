"""Copies KV blocks between device and host, concurrently with computing.

Blocks that leave are first copied to a staging buffer on the device, which takes microseconds.
Their blocks can then be overwritten, while the slow copy to the host runs on its own stream.
Blocks that return are fetched on that stream too, while earlier steps still run, and copied to
their place after these steps. Two staging buffers take turns. If a buffer is still being read, the
next use of it waits on the device, not on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.executor.gpu.row_state import upload
from headway.model.devices import size
from headway.model.kernels.blocks import gather_blocks, scatter_blocks
from headway.plan import Copy, Plan

MAX_STAGED_BLOCKS = 128  # blocks in a staging buffer
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Device memory for blocks between device and host."""

    blocks: Tensor
    reusable: torch.cuda.Event | None = None  # recorded when the buffer can be reused


@dataclass(slots=True, eq=False)
class SwapTimer:
    """The time from the first to the last copy of a plan from the host."""

    begun: Any  # torch.cuda.Event with timing, or seconds without CUDA
    ended: Any = None

    def seconds(self) -> float:
        if isinstance(self.begun, float):
            return float(self.ended - self.begun)
        self.ended.synchronize()  # the step waits for the copies, not for this event after them
        return float(self.begun.elapsed_time(self.ended)) / 1e3


class Swapper:
    """The host blocks, and the stream that copies blocks to and from them."""

    def __init__(self, device_blocks: Tensor, num_host_blocks: int) -> None:
        self.device_blocks = device_blocks
        self.is_cuda = device_blocks.is_cuda
        shape = device_blocks.shape[1:]
        self.host_blocks = torch.empty((num_host_blocks, *shape), dtype=device_blocks.dtype)
        max_staged = min(MAX_STAGED_BLOCKS, num_host_blocks)
        self._buffers = [StagingBuffer(device_blocks.new_empty((max_staged, *shape))) for _ in "ab"]
        self._stream = torch.cuda.Stream() if self.is_cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None and num_host_blocks:
            _pin(self.host_blocks)
            finalize(self, _unpin, self.host_blocks, self._stream).atexit = False

    def run(self, plan: Plan) -> SwapTimer | None:
        """Start a plan's copies, and time those from the host; None without any.

        Work launched later on this stream sees their result.
        """
        _in_parts(plan.copies_out, self._swap_out)
        if not plan.copies_in:
            return None
        timer = SwapTimer(self._now())
        _in_parts(plan.copies_in, self._swap_in)
        timer.ended = self._now()
        return timer

    def _now(self) -> Any:
        """The present of the copy stream."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def finish(self) -> None:
        """Wait until all copies to the host are done; a plan's result does not wait for them."""
        if self._stream is not None:
            self._stream.synchronize()

    def _swap_out(self, copies: list[Copy]) -> None:
        buffer, numbers = self._next_buffer(), self._block_numbers([copy.source for copy in copies])
        self._wait_for(buffer)
        gather_blocks(self.device_blocks, numbers, buffer.blocks)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._on_copy_stream():
            for copy, block in zip(copies, buffer.blocks, strict=False):
                self.host_blocks[copy.target].copy_(block, non_blocking=True)
            self._mark_reusable(buffer)

    def _swap_in(self, copies: list[Copy]) -> None:
        buffer, numbers = self._next_buffer(), self._block_numbers([copy.target for copy in copies])
        with self._on_copy_stream():
            self._wait_for(buffer)
            for copy, block in zip(copies, buffer.blocks, strict=False):
                block.copy_(self.host_blocks[copy.source], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        scatter_blocks(buffer.blocks, numbers, self.device_blocks)
        self._mark_reusable(buffer)

    def _block_numbers(self, blocks: list[int]) -> Tensor:
        return upload(np.array(blocks), self.device_blocks.device)

    def _on_copy_stream(self) -> AbstractContextManager[object]:
        """Use the copy stream. Without CUDA, everything runs in order."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _next_buffer(self) -> StagingBuffer:
        self._buffers.reverse()
        return self._buffers[0]

    def _wait_for(self, buffer: StagingBuffer) -> None:
        """Make the current stream wait until the buffer can be reused."""
        if buffer.reusable is not None:
            torch.cuda.current_stream().wait_event(buffer.reusable)

    def _mark_reusable(self, buffer: StagingBuffer) -> None:
        """Mark the buffer as reusable after the current stream's work so far."""
        if self.is_cuda:
            buffer.reusable = torch.cuda.current_stream().record_event()


def _in_parts(copies: list[Copy], copy_blocks: Callable[[list[Copy]], None]) -> None:
    """Copy at most as many blocks at once as a staging buffer holds."""
    for first in range(0, len(copies), MAX_STAGED_BLOCKS):
        copy_blocks(copies[first : first + MAX_STAGED_BLOCKS])


def _pin(blocks: Tensor) -> None:
    """Pin the blocks, so that the device can copy them directly.

    They are written first, by all threads: pinning pages that are not mapped yet takes one thread
    several times as long. torch's own pinned memory would be rounded up to a power of two.
    """
    blocks.view(torch.uint8).zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(blocks.data_ptr(), blocks.nbytes, PORTABLE)
    if status != cudart.cudaError.success:
        with suppress(RuntimeError):  # the next CUDA call reports this error; discard it
            torch.zeros(1, device="cuda")
        raise ConfigError(
            f"cannot pin {size(blocks.nbytes)} of host memory for swapped blocks "
            f"({cudart.cudaGetErrorString(status)}); lower --num-host-blocks"
        )


def _unpin(blocks: Tensor, stream: torch.cuda.Stream) -> None:
    """Unpin the memory after the last copy; the stream of a lost device raises, which is fine."""
    with suppress(RuntimeError):
        stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(blocks.data_ptr())  # type: ignore[no-untyped-call]
