"""Reference of kernels/blocks.py in plain torch. Legend: B blocks, n of them."""

from __future__ import annotations

import torch
from torch import Tensor

BYTES = torch.uint8  # torch 2.8 does not index float8 on a CPU


def gather_blocks(blocks: Tensor, numbers_n: Tensor, staging: Tensor) -> None:
    """Copy the blocks with these numbers (int64) to the start of `staging`, in this order."""
    staging.view(BYTES)[: len(numbers_n)] = blocks.view(BYTES)[numbers_n]


def scatter_blocks(staging: Tensor, numbers_n: Tensor, blocks: Tensor) -> None:
    """Copy the first blocks of `staging` to the blocks with these numbers, which must differ."""
    blocks.view(BYTES)[numbers_n] = staging.view(BYTES)[: len(numbers_n)]
