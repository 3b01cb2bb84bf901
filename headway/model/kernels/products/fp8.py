"""Rows in 8-bit floats, and their products with 8-bit matrices.

A row has one scale, so that its largest number becomes the largest of the type. Products of many
rows use cuBLASLt (`torch._scaled_mm`), products of few rows our kernel. Knows no layers.

Legend: T rows, K numbers in a row, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, launch_options, launched, power_of_2

FP8 = torch.float8_e4m3fn
MAX_FP8 = tl.constexpr(448.0)
MIN_TOP = tl.constexpr(1e-30)  # so that a row of zeros has a scale
PIECE = 8192  # numbers of a row that a program holds at a time


class QuantizedRows(NamedTuple):
    """Rows as 8-bit floats: x = scale * values."""

    values_tk: Tensor  # float8_e4m3fn
    scale_t: Tensor  # float32 [T, 1]
    dtype: torch.dtype  # of the rows before, and of products with them

    @staticmethod
    def empty(width: int, like_tk: Tensor) -> QuantizedRows:
        """Room for rows of `width` numbers, as many as other rows, of their type."""
        values = torch.empty((len(like_tk), width), dtype=FP8, device=like_tk.device)
        scale = torch.empty((len(like_tk), 1), dtype=torch.float32, device=like_tk.device)
        return QuantizedRows(values, scale, like_tk.dtype)


@triton.jit
def row_scale(top):
    """The scale of a row whose largest magnitude is `top`."""
    return tl.maximum(top, MIN_TOP) / MAX_FP8


@launched
@triton.jit
def _quantize_rows(
    values_tk, scale_t, x_tk, x_stride,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, in pieces: the first pass finds the scale; the second reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PIECE)
    begin(CHAINED)
    x = x_tk + row * x_stride + column
    top = tl.zeros((PIECE,), tl.float32)
    for start in range(0, WIDTH, PIECE):
        piece = tl.load(x + start, mask=column < WIDTH - start, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(piece))
    scale = row_scale(tl.max(top, 0))
    tl.store(scale_t + row, scale)
    for start in range(0, WIDTH, PIECE):
        is_here = column < WIDTH - start
        piece = tl.load(x + start, mask=is_here, other=0.0).to(tl.float32)
        rounded = (piece / scale).to(values_tk.dtype.element_ty)
        tl.store(values_tk + row * WIDTH + column + start, rounded, mask=is_here)


def quantize_rows(x_tk: Tensor) -> QuantizedRows:
    """Round every row to 8 bits."""
    num_rows, width = x_tk.shape
    assert x_tk.stride(1) == 1, "a row must be contiguous"
    out = QuantizedRows.empty(width, x_tk)
    if num_rows:
        piece = min(power_of_2(width), PIECE)
        _quantize_rows[(num_rows,)](
            out.values_tk, out.scale_t, x_tk, x_tk.stride(0),
            WIDTH=width, PIECE=piece, **launch_options(row_warps(piece), 1),
        )  # fmt: skip
    return out


def row_warps(piece: int) -> int:
    """A thread holds 16 numbers: two wide loads in flight."""
    return min(max(piece // 512, 1), 16)


def scaled_linear(
    x: QuantizedRows, weight_nk: Tensor, scale_n: Tensor, bias_n: Tensor | None = None
) -> Tensor:
    """x weight^T times the scales, plus bias: [T, N] in the type of the rows.

    On a GPU, sizes must be multiples of 16 and the type bfloat16.
    """
    if x.values_tk.is_cuda:
        return torch._scaled_mm(
            x.values_tk, weight_nk.t(), x.scale_t, scale_n[None], bias=bias_n, out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip
    total_tn = x.values_tk.float() @ weight_nk.float().t() * x.scale_t * scale_n
    return (total_tn if bias_n is None else total_tn + bias_n).to(x.dtype)
