"""Blocks on their way between device and host, beside the computing.

What leaves is first set aside on the device, which takes microseconds; then its block may be
written again, and the slow copy to the host runs on a stream of its own. What returns is fetched
on that stream too, while earlier steps still run, and put into its blocks when they are done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.plan import Copy, Plan

AT_ONCE = 128  # blocks set aside together


class Swapper:
    """The host's blocks, and the stream that carries blocks to them and back."""

    def __init__(self, device_blocks: Tensor, num_host_blocks: int) -> None:
        self.device_blocks = device_blocks
        self.is_cuda = device_blocks.is_cuda
        self.host_blocks = torch.empty(
            (num_host_blocks, *device_blocks.shape[1:]), dtype=device_blocks.dtype,
            pin_memory=self.is_cuda and num_host_blocks > 0,
        )  # fmt: skip
        self._stream = torch.cuda.Stream() if self.is_cuda else None  # type: ignore[no-untyped-call]

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
        aside = self.device_blocks[self._index([copy.source for copy in copies])]
        if self._stream is None:
            for copy, block in zip(copies, aside, strict=True):
                self.host_blocks[copy.target].copy_(block)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            aside.record_stream(self._stream)
            for copy, block in zip(copies, aside, strict=True):
                self.host_blocks[copy.target].copy_(block, non_blocking=True)

    def _in(self, copies: list[Copy]) -> None:
        numbers = self._index([copy.target for copy in copies])
        if self._stream is None:
            self.device_blocks[numbers] = self.host_blocks[[copy.source for copy in copies]]
            return
        with torch.cuda.stream(self._stream):
            aside = torch.empty_like(self.device_blocks[: len(copies)])
            for copy, block in zip(copies, aside, strict=True):
                block.copy_(self.host_blocks[copy.source], non_blocking=True)
        compute = torch.cuda.current_stream()
        compute.wait_stream(self._stream)
        aside.record_stream(compute)
        self.device_blocks[numbers] = aside

    def _index(self, numbers: list[int]) -> Tensor:
        index = torch.tensor(numbers)
        if self.is_cuda:
            return index.pin_memory().to(self.device_blocks.device, non_blocking=True)
        return index
