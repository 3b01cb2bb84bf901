"""Reference of kernels/norm.py in plain torch.

Legend: T rows, K numbers in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Rows over their root mean square, rounded to their type, times a weight per column."""
    wide = x_tk.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight_k * wide.to(x_tk.dtype)


def add_rms_norm(x_tk: Tensor, update_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Add an update to x in place, and return the norm of the rounded sum."""
    return rms_norm(x_tk.add_(update_tk), weight_k, epsilon)
