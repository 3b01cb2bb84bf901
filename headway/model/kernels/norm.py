"""RMS norm: one program per row, which reads the row once.

Knows rows and a weight, not the model. The norm is rounded to the rows' type before it is
multiplied by the weight, as in torch and transformers.

Legend: T rows, K numbers in a row; any K whose row fits in a program.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import launched, power_of_2


@launched
@triton.jit
def _rms_norm(
    out_tk, x_tk, weight_k, x_stride, epsilon, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_here = column < WIDTH

    weight = tl.load(weight_k + column, mask=is_here, other=0.0).to(tl.float32)
    x = tl.load(x_tk + row * x_stride + column, mask=is_here, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + epsilon)
    normed = (wide * scale).to(x_tk.dtype.element_ty).to(tl.float32)
    out = (normed * weight).to(out_tk.dtype.element_ty)
    tl.store(out_tk + row * WIDTH + column, out, mask=is_here)


def rms_norm(x_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Rows over their root mean square, rounded to their type, times a weight per column."""
    num_rows, width = x_tk.shape
    assert x_tk.stride(1) == 1, "a row must be contiguous"
    out_tk = torch.empty((num_rows, width), dtype=x_tk.dtype, device=x_tk.device)
    if num_rows == 0:
        return out_tk
    padded = power_of_2(width)
    _rms_norm[(num_rows,)](
        out_tk, x_tk, weight_k, x_tk.stride(0), epsilon,
        WIDTH=width, PADDED=padded, num_warps=_num_warps(padded),
    )  # fmt: skip
    return out_tk


def _num_warps(padded: int) -> int:
    """A thread holds 16 numbers: two wide loads in flight, and a short sum over the row."""
    return min(max(padded // 512, 1), 16)
