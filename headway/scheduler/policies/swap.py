"""Swap rules: whether to keep the computed tokens of a preempted request on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.config import Checked, SchedulerView, number
from headway.request import Request


def recompute(request: Request, view: SchedulerView) -> bool:
    """Drop the victim's KV blocks; prompt and output are computed again."""
    return False


def swap(request: Request, view: SchedulerView) -> bool:
    """Copy the victim's KV blocks to the host, as long as it has free blocks."""
    return True


def discard_output(request: Request, view: SchedulerView) -> Literal["discard"]:
    """Drop KV blocks and output; the output is generated again. At most 8 times per request."""
    return "discard"


@dataclass(frozen=True)
class swap_if_cheaper(Checked):
    """Swap if copying out and in takes less time than recomputing. All costs are in seconds.

    The defaults are for a 70B model over PCIe 4: 2,048 tokens take 2 ms to copy one way, or 50 ms
    to compute.
    """

    copy: float = number(1e-6, 0)  # one token, one way
    compute: float = number(2.4e-5, 0)  # one token
    start: float = number(1e-4, 0)  # per copy, whatever its size
    pair: float = number(0.0, 0)  # one token, per token before it: attention

    def __call__(self, request: Request, view: SchedulerView) -> bool:
        swap, recompute = self.seconds(request, view)
        return swap < recompute

    def seconds(self, request: Request, view: SchedulerView) -> tuple[float, float]:
        """Estimated time to swap out and in, and to recompute."""
        private = view.num_private_blocks(request) * view.block_size
        tokens = min(private, request.num_computed)
        num_before = request.num_computed - tokens / 2  # shared tokens come first
        again = (self.compute + self.pair * num_before) * tokens
        return 2 * (self.start + self.copy * tokens), again
