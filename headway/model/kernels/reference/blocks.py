"""Whole blocks moved within a device, in plain torch.

Legend: B blocks, n of them.
"""

from __future__ import annotations

from torch import Tensor


def set_aside(blocks: Tensor, numbers_n: Tensor, aside: Tensor) -> None:
    """Copy the blocks of these numbers (int64) to the first of `aside`, in this order."""
    aside[: len(numbers_n)] = blocks[numbers_n]


def put_back(aside: Tensor, numbers_n: Tensor, blocks: Tensor) -> None:
    """Copy the first of `aside` to the blocks of these numbers, of which none comes twice."""
    blocks[numbers_n] = aside[: len(numbers_n)]
