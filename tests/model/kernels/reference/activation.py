"""Reference of kernels/activation.py in plain torch. Legend: T rows, N pairs in a row."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def silu_multiply(x_t2n: Tensor) -> Tensor:
    """silu of the first number of every pair, times the second: [T, N]."""
    return F.silu(x_t2n[:, 0::2]) * x_t2n[:, 1::2]
