"""Blocks on their way between device and host, beside the computing.

What leaves is first set aside on the device, which takes microseconds; then its block may be
written again, and the slow copy to the host runs on a stream of its own. What returns is fetched
on that stream too, while earlier steps still run, and put into its blocks when they are done.
There are two rooms for what is set aside, used by turns. Whoever needs one that is still read from
waits for that on the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.executor.gpu.row_state import upload
from headway.model.devices import size
from headway.model.kernels.blocks import put_back, set_aside
from headway.plan import Copy, Plan

AT_ONCE = 128  # blocks set aside together
PORTABLE = 1  # CUDA's word for memory that is pinned for all devices, and unpinned from any


@dataclass(slots=True, eq=False)
class Room:
    """Blocks that are on their way."""

    blocks: Tensor
    left: torch.cuda.Event | None = None  # when they had been read


class Swapper:
    """The host's blocks, and the stream that carries blocks to them and back."""

    def __init__(self, device_blocks: Tensor, num_host_blocks: int) -> None:
        self.device_blocks = device_blocks
        self.is_cuda = device_blocks.is_cuda
        shape = device_blocks.shape[1:]
        self.host_blocks = torch.empty((num_host_blocks, *shape), dtype=device_blocks.dtype)
        most = min(AT_ONCE, num_host_blocks)
        self._rooms = [Room(device_blocks.new_empty((most, *shape))) for _ in "ab"]
        self._stream = torch.cuda.Stream() if self.is_cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None and num_host_blocks:
            _pin(self.host_blocks)
            finalize(self, _unpin, self.host_blocks, self._stream).atexit = False

    def run(self, plan: Plan) -> None:
        """Start a plan's copies; what the device is given after this sees their outcome."""
        for copies, carry in ((plan.copies_out, self._out), (plan.copies_in, self._in)):
            for first in range(0, len(copies), AT_ONCE):
                carry(copies[first : first + AT_ONCE])

    def finish(self) -> None:
        """Wait until what left is on the host; a plan is done without it."""
        if self._stream is not None:
            self._stream.synchronize()

    def _out(self, copies: list[Copy]) -> None:
        room, numbers = self._next_room(), self._numbers([copy.source for copy in copies])
        self._wait_for(room)
        set_aside(self.device_blocks, numbers, room.blocks)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._beside():
            for copy, block in zip(copies, room.blocks, strict=False):
                self.host_blocks[copy.target].copy_(block, non_blocking=True)
            self._leave(room)

    def _in(self, copies: list[Copy]) -> None:
        room, numbers = self._next_room(), self._numbers([copy.target for copy in copies])
        with self._beside():
            self._wait_for(room)
            for copy, block in zip(copies, room.blocks, strict=False):
                block.copy_(self.host_blocks[copy.source], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        put_back(room.blocks, numbers, self.device_blocks)
        self._leave(room)

    def _numbers(self, blocks: list[int]) -> Tensor:
        return upload(np.array(blocks), self.device_blocks.device)

    def _beside(self) -> AbstractContextManager[object]:
        """On the stream of copies; without one, everything is done in order anyway."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _next_room(self) -> Room:
        self._rooms.reverse()
        return self._rooms[0]

    def _wait_for(self, room: Room) -> None:
        """Before what the current stream is given next: until the room can be used again."""
        if room.left is not None:
            torch.cuda.current_stream().wait_event(room.left)

    def _leave(self, room: Room) -> None:
        """The current stream has nothing more to do with the room."""
        if self.is_cuda:
            room.left = torch.cuda.current_stream().record_event()


def _pin(blocks: Tensor) -> None:
    """Let the device reach them by itself.

    They are written first, by all threads: to pin memory that is not there yet takes one thread
    several times as long. Memory that torch pins would be rounded up to a power of two besides.
    """
    blocks.view(torch.uint8).zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(blocks.data_ptr(), blocks.nbytes, PORTABLE)
    if status != cudart.cudaError.success:
        with suppress(RuntimeError):  # whatever is launched next is told of the error, once
            torch.zeros(1, device="cuda")
        raise ConfigError(
            f"{size(blocks.nbytes)} of the host's memory for swapped blocks cannot be pinned "
            f"({cudart.cudaGetErrorString(status)}): lower --num-host-blocks"
        )


def _unpin(blocks: Tensor, stream: torch.cuda.Stream) -> None:
    """Before the memory is given back, and after the last copy; a lost device cannot be asked."""
    with suppress(RuntimeError):
        stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(blocks.data_ptr())  # type: ignore[no-untyped-call]
