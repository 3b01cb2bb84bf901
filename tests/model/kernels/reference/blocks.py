"""Reference of kernels/blocks.py in plain torch.

Legend: B blocks, n of them.
"""

from __future__ import annotations

from torch import Tensor


def gather_blocks(blocks: Tensor, numbers_n: Tensor, staging: Tensor) -> None:
    """Copy the blocks with these numbers (int64) to the start of `staging`, in this order."""
    staging[: len(numbers_n)] = blocks[numbers_n]


def scatter_blocks(staging: Tensor, numbers_n: Tensor, blocks: Tensor) -> None:
    """Copy the first blocks of `staging` to the blocks with these numbers, which must differ."""
    blocks[numbers_n] = staging[: len(numbers_n)]
