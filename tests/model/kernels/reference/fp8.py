"""Reference of kernels/products/fp8.py in plain torch. Legend: T rows, K numbers in a row."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


def quantize_rows(x_tk: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit floats, and their scales [T, 1] float32."""
    wide = x_tk.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-30) / MAX_FP8
    return (wide / scale).clamp(-MAX_FP8, MAX_FP8).to(FP8), scale
