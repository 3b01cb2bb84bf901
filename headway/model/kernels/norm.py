"""RMS norm: a program computes one row, or a few short ones, and reads them once.

Knows rows and a weight, not the model. The norm is rounded to the rows' type before it is
multiplied by the weight, as in torch and transformers. The result is optionally quantized to fp8
for the product that follows, after it is rounded to the rows' type, or added to other rows.

Legend: T rows, K numbers in a row; any K whose row fits in a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.fp8 import QuantizedRows, row_scale, row_warps

# Numbers of a program that computes several short rows. How many depends on the width, not on the
# number of rows, so that neither does the sum of a row.
NUMBERS = 2048


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    out_tk, x_tk, weight_k, scale_t, added_tk, x_stride, num_rows, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, IN_PLACE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS rows; adds `added_tk` to x first, in place, and quantizes the result if there is a scale."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row_r, column_k = tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_column = (column_k < WIDTH)[None, :]
    is_here = is_column
    if ROWS > 1:
        is_here = is_column & (first + row_r < num_rows)[:, None]
    at_x = x_tk + first * x_stride + row_r[:, None] * x_stride + column_k[None, :]
    at_out = first * WIDTH + row_r[:, None] * WIDTH + column_k[None, :]
    if IN_PLACE:
        at_out = first * x_stride + row_r[:, None] * x_stride + column_k[None, :]

    weight = tl.load(weight_k + column_k[None, :], mask=is_column, other=0.0).to(tl.float32)
    begin(CHAINED)
    x = tl.load(at_x, mask=is_here, other=0.0)
    if added_tk is not None:
        added = tl.load(added_tk + at_out, mask=is_here, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x_tk.dtype.element_ty)
        tl.store(at_x, x, mask=is_here)
    wide = x.to(tl.float32)
    factor_r = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + epsilon)
    normed = (wide * factor_r[:, None]).to(x_tk.dtype.element_ty).to(tl.float32)
    out = (normed * weight).to(x_tk.dtype.element_ty)
    if scale_t is not None:
        result = out.to(tl.float32)
        scale_r = row_scale(tl.max(tl.abs(result), axis=1))
        tl.store(scale_t + first + row_r, scale_r, mask=first + row_r < num_rows)
        out = result / scale_r[:, None]
    tl.store(out_tk + at_out, out.to(out_tk.dtype.element_ty), mask=is_here)


@launched
@triton.jit
def _add_normed(
    x_tk, added_tk, weight_k, squares_t, x_stride, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row."""
    row, column_k = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_here = column_k < WIDTH
    weight = tl.load(weight_k + column_k, mask=is_here, other=0.0).to(tl.float32)
    begin(CHAINED)
    wide = tl.load(added_tk + row * WIDTH + column_k, mask=is_here, other=0.0).to(tl.float32)
    x = tl.load(x_tk + row * x_stride + column_k, mask=is_here, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    dtype: tl.constexpr = x_tk.dtype.element_ty
    normed = ((wide * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    total = (x + normed).to(dtype)
    tl.store(x_tk + row * x_stride + column_k, total, mask=is_here)
    total = total.to(tl.float32)
    tl.store(squares_t + row, tl.sum(total * total, 0))


def add_normed(x_tk: Tensor, added_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Add the norm of `added_tk` to x, in place; returns the sums of squares of the rows [T, 1]."""
    num_rows, width = x_tk.shape
    assert x_tk.stride(1) == 1 and added_tk.is_contiguous(), "rows must be contiguous"
    squares_t = torch.empty((num_rows, 1), dtype=torch.float32, device=x_tk.device)
    if num_rows:
        padded = power_of_2(width)
        _add_normed[(num_rows,)](
            x_tk, added_tk, weight_k, squares_t, x_tk.stride(0), epsilon, WIDTH=width,
            PADDED=padded, **launch_options(row_warps(padded), 1, fuses=False),
        )  # fmt: skip
    return squares_t


def norm_in_place(x_tk: Tensor, weight_k: Tensor, epsilon: float) -> None:
    """Like `rms_norm`, in place of the rows."""
    _launch(x_tk, x_tk, weight_k, epsilon, in_place=True)


def rms_norm(x_tk: Tensor, weight_k: Tensor, epsilon: float) -> Tensor:
    """Rows over their root mean square, rounded to their type, times a weight per column."""
    out_tk = torch.empty(x_tk.shape, dtype=x_tk.dtype, device=x_tk.device)
    _launch(out_tk, x_tk, weight_k, epsilon)
    return out_tk


def rms_norm_quantized(
    x_tk: Tensor, weight_k: Tensor, epsilon: float, added_tk: Tensor | None = None
) -> QuantizedRows:
    """Like `rms_norm`, quantized; adds `added_tk` to x first, in place, if it is given."""
    assert added_tk is None or added_tk.is_contiguous(), "rows to add must be contiguous"
    out = QuantizedRows.empty(x_tk.shape[1], x_tk)
    _launch(out.values_tk, x_tk, weight_k, epsilon, out.scale_t, added_tk)
    return out


def _launch(
    out_tk: Tensor,
    x_tk: Tensor,
    weight_k: Tensor,
    epsilon: float,
    scale_t: Tensor | None = None,
    added_tk: Tensor | None = None,
    *,
    in_place: bool = False,
) -> None:
    num_rows, width = x_tk.shape
    assert x_tk.stride(1) == 1, "a row must be contiguous"
    if num_rows == 0:
        return
    padded = power_of_2(width)
    rows = max(NUMBERS // padded, 1) if scale_t is None else 1  # quantized: not faster
    _rms_norm[(ceil_div(num_rows, rows),)](
        out_tk, x_tk, weight_k, scale_t, added_tk, x_tk.stride(0), num_rows, epsilon,
        # Not fused, so that a row has the same bits in any place of its program.
        WIDTH=width, PADDED=padded, ROWS=rows, IN_PLACE=in_place,
        **launch_options(row_warps(rows * padded), 1, fuses=False),
    )  # fmt: skip
