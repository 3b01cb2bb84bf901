"""Reference of kernels/norm.py in plain torch. Legend: T rows, K numbers in a row."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Rows over their root mean square, rounded to their type, times a weight per column."""
    wide = x_tk.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight_k * wide.to(x_tk.dtype)
