"""Whole blocks moved within a device, in plain torch.

Legend: B blocks, n of them.
"""

from __future__ import annotations

from torch import Tensor


def gather_blocks(blocks: Tensor, numbers_n: Tensor, staging: Tensor) -> None:
    """Copy the blocks of these numbers (int64) to the first of `staging`, in this order."""
    staging[: len(numbers_n)] = blocks[numbers_n]


def scatter_blocks(staging: Tensor, numbers_n: Tensor, blocks: Tensor) -> None:
    """Copy the first of `staging` to the blocks of these numbers, of which none comes twice."""
    blocks[numbers_n] = staging[: len(numbers_n)]
