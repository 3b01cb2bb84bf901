"""Products of few rows with a large matrix, fused with the operations before and after them.

For decoding, where reading the matrix takes most of the time. Before the product: an RMS norm,
which is one factor per row and needs only the row's sum of squares. After it: a bias, a gated
activation (silu of one number times the other), or the sum with a residual. Prefills are limited by
arithmetic; cuBLAS is faster there. Knows no layers and no norm weights.

The matrix may be fp8, with a scale for each output. One row then has a wider type; several rows are
fp8 too, with a scale each.

Shapes: M rows, N outputs, K inputs, J parts of a sum of squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.activation import GATES, paired
from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.tiles import Tile, tile_for
from headway.model.kernels.products.wide_linear import wide_linear

BAND = tl.constexpr(8)  # row tiles
VECTOR = tl.constexpr(8)  # consecutive inputs of a thread: 16 bytes of a row


@triton.jit
def _scale(scales, place):
    """The scales at these places, or ones without scales: products with them are compiled away."""
    return tl.full(place.shape, 1.0, tl.float32) if scales is None else tl.load(scales + place)


@triton.jit
def _product(
    x_mk, weight_nk, near_m, near_n, k, is_row, x_stride, K: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some rows times some outputs, float32. Padding rows of fp8, where most may be, read nothing."""
    IS_FP8: tl.constexpr = x_mk.dtype.element_ty.primitive_bitwidth == 8
    x = x_mk + near_m[:, None] * x_stride + k[None, :]
    weight = weight_nk + near_n[None, :] * K + k[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, K, INPUTS):
        if K % INPUTS == 0:
            a = tl.load(x + start, mask=is_row[:, None]) if IS_FP8 else tl.load(x + start)
            b = tl.load(weight + start)
        else:
            a = tl.load(x + start, mask=k[None, :] < K - start, other=0.0)
            b = tl.load(weight + start, mask=k[:, None] < K - start, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def _sliced_product(
    x_mk, weight_nk, near_m, near_n, k, x_stride, K: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Like `_product`, but the warps sum different inputs of the same outputs concurrently."""
    SLICE: tl.constexpr = K // SLICES
    s = tl.arange(0, SLICES) * SLICE
    x = x_mk + s[:, None, None] + near_m[None, :, None] * x_stride + k[None, None, :]
    weight = weight_nk + s[:, None, None] + near_n[None, None, :] * K + k[None, :, None]
    totals = tl.zeros((SLICES, ROWS, OUTPUTS), tl.float32)
    for start in range(0, SLICE, INPUTS):
        a, b = tl.load(x + start), tl.load(weight + start)
        totals = tl.dot(a, b, totals, input_precision="ieee")
    return tl.sum(totals, 0)


@triton.jit
def tile_at(number, num_row_tiles, num_output_tiles):
    """The row and output of a tile, in bands of row tiles.

    In a band, tiles of the same outputs are consecutive. So few rows read the matrix once, and with
    many rows the tiles that run concurrently share rows as well as outputs.
    """
    per_band = BAND * num_output_tiles
    first, place = number // per_band * BAND, number % per_band
    num_rows = tl.minimum(num_row_tiles - first, BAND)
    return first + place % num_rows, place // num_rows


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_mk, weight_nk, squares_mj, bias_n, residual_mn, out_mn, squares_out_mj, scale_n, x_scale_m,
    num_rows, num_outputs, epsilon, x_stride, out_stride,
    K: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_ROOM: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr, LEAVES_SQUARES: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile."""
    row_tile, output_tile = tile_at(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    )
    m = row_tile * ROWS + tl.arange(0, ROWS)
    n = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    is_row, is_output = m < num_rows, n < num_outputs
    # Rows beyond the last one read different rows: if all of them read the same row, they would
    # wait for each other.
    near_m, near_n = (m % num_rows).to(tl.int64), tl.where(is_output, n, 0).to(tl.int64)
    begin(CHAINED)
    # Loads for the epilogue start before the product, so that nothing waits for them later.
    width: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    place_n = output_tile * width + tl.arange(0, width)
    place = near_m[:, None] * out_stride + place_n[None, :]
    is_inside = is_row[:, None] & (place_n < num_outputs // (2 if IS_GATED else 1))[None, :]
    if HAS_NORM:
        j = tl.arange(0, SQUARES_ROOM)
        squares = tl.load(
            squares_mj + near_m[:, None] * NUM_SQUARES + j[None, :],
            mask=j[None, :] < NUM_SQUARES, other=0.0,
        )  # fmt: skip
    scale, x_scale = _scale(scale_n, near_n[None, :]), _scale(x_scale_m, near_m[:, None])
    if HAS_BIAS:
        bias = tl.load(bias_n + near_n)
    if HAS_RESIDUAL:
        residual = tl.load(residual_mn + place, mask=is_inside, other=0.0)
    if SLICES == 1:
        total = _product(
            x_mk, weight_nk, near_m, near_n, k, is_row, x_stride, K, ROWS, OUTPUTS, INPUTS
        )
    else:
        total = _sliced_product(
            x_mk, weight_nk, near_m, near_n, k, x_stride, K, ROWS, OUTPUTS, INPUTS, SLICES
        )
    total *= scale * x_scale
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(squares, 1) / K + epsilon)[:, None]
    if HAS_BIAS:
        total += bias[None, :].to(tl.float32)
    if IS_GATED:
        total = paired(total, ROWS, OUTPUTS, IS_GATED)
    if HAS_RESIDUAL:
        total += residual.to(tl.float32)
    rounded = total.to(out_mn.dtype.element_ty)
    tl.store(out_mn + place, rounded, mask=is_inside)
    if LEAVES_SQUARES:
        wide = tl.where(is_inside, rounded.to(tl.float32), 0.0)
        home = squares_out_mj + near_m * tl.cdiv(num_outputs, OUTPUTS) + output_tile
        tl.store(home, tl.sum(wide * wide, 1), mask=is_row)


@launched
@triton.jit
def _vector(
    x_mk, weight_nk, bias_n, residual_mn, out_mn, scale_n,
    num_outputs, epsilon, x_stride, out_stride,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, without matrix units. The first load of the matrix starts before x is ready.

    A thread has the same inputs of x and of the matrix, and threads add up only at the end; so
    nothing but the end goes through shared memory.
    """
    row = tl.program_id(1)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.max_contiguous(tl.arange(0, INPUTS), VECTOR)
    is_output = n < num_outputs
    weight = weight_nk + tl.where(is_output, n, 0).to(tl.int64)[:, None] * K + k[None, :]
    x = x_mk + row * x_stride + k
    b = tl.load(weight, mask=k[None, :] < K, other=0.0)
    scale = _scale(scale_n, tl.where(is_output, n, 0))
    if HAS_BIAS:
        bias = tl.load(bias_n + n, mask=is_output, other=0.0)
    begin(CHAINED)
    width: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    place_n = tl.program_id(0) * width + tl.arange(0, width)
    place = row * out_stride + place_n
    is_inside = place_n < num_outputs // (2 if IS_GATED else 1)
    if HAS_RESIDUAL:
        residual = tl.load(residual_mn + place, mask=is_inside, other=0.0)
    totals = tl.zeros((OUTPUTS, INPUTS // VECTOR), tl.float32)
    squares = tl.zeros((INPUTS,), tl.float32)
    for start in tl.static_range(0, K, INPUTS):
        a = tl.load(x + start, mask=k < K - start, other=0.0).to(tl.float32)
        now = b
        if start + INPUTS < K:
            b = tl.load(weight + start + INPUTS, mask=k[None, :] < K - start - INPUTS, other=0.0)
        squares += a * a
        products = now.to(tl.float32) * a[None, :]
        totals += tl.sum(tl.reshape(products, (OUTPUTS, INPUTS // VECTOR, VECTOR)), 2)
    total = tl.sum(totals, 1) * scale
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    if HAS_BIAS:
        total += bias.to(tl.float32)
    if IS_GATED:
        total = tl.reshape(paired(total[None, :], 1, OUTPUTS, IS_GATED), (OUTPUTS // 2,))
    if HAS_RESIDUAL:
        total += residual.to(tl.float32)
    tl.store(out_mn + place, total.to(out_mn.dtype.element_ty), mask=is_inside)


def linear(
    x_mk: Tensor,
    weight_nk: Tensor,
    *,
    bias_n: Tensor | None = None,
    epsilon: float | None = None,
    squares_mj: Tensor | None = None,
    is_gated: bool = False,
    activation: str = "silu",
    residual_mn: Tensor | None = None,
    out_mn: Tensor | None = None,
    squares_out_mj: Tensor | None = None,
    scale_n: Tensor | None = None,
    x_scale_m: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x weight^T, in this order: times the scales of an fp8 matrix and of fp8 rows; divided by the
    root mean square of x if `epsilon` is given; plus bias; if gated, pairs of outputs become
    silu(first) * second, or another activation; plus residual (may be `out_mn`).

    With more than one row, `squares_mj` must contain the sums of squares of x for the norm, and
    `squares_out_mj` receives those of the output, both in any number of parts. fp8 rows need
    `out_mn`, and there must be more than one; several rows need the type of the matrix.
    """
    num_rows, (num_outputs, num_inputs) = len(x_mk), weight_nk.shape
    if out_mn is None:
        out_mn = x_mk.new_empty((num_rows, num_outputs // 2 if is_gated else num_outputs))
    if not num_rows:
        return out_mn
    assert x_mk.stride(1) == 1 and weight_nk.is_contiguous(), "rows must be contiguous"
    strides = (x_mk.stride(0), out_mn.stride(0))
    is_alike = residual_mn is None or num_rows == 1 or residual_mn.stride(0) == strides[1]
    assert is_alike, "the residual must have the output's stride"
    tile = tile or tile_for(num_rows, num_outputs, num_inputs, weight_nk.dtype)
    num_tiles = ceil_div(num_outputs, tile.width)
    gate = GATES[activation] if is_gated else 0
    flags = (epsilon is not None, bias_n is not None, residual_mn is not None, gate)
    options = launch_options(tile.warps, tile.stages, fuses=tile.rows == 1)
    if tile.rows == 1:
        _vector[(num_tiles, num_rows)](
            x_mk, weight_nk, bias_n, residual_mn, out_mn, scale_n, num_outputs, epsilon or 0.0, *strides,
            num_inputs, *flags, tile.outputs, tile.inputs, **options,
        )  # fmt: skip
        return out_mn
    assert x_mk.dtype == weight_nk.dtype, "several rows need the type of the matrix"
    assert epsilon is None or squares_mj is not None, "the norm of several rows needs their squares"
    assert squares_out_mj is None or squares_out_mj.shape == (num_rows, num_tiles), "one per tile"
    if tile.extra or tile.parts > 1:
        assert scale_n is None and x_scale_m is None, "wide tiles are not for fp8"
        wide_linear(
            x_mk, weight_nk, out_mn, tile, bias_n=bias_n, epsilon=epsilon, squares_mj=squares_mj,
            gate=gate, residual_mn=residual_mn, squares_out_mj=squares_out_mj,
        )  # fmt: skip
        return out_mn
    num_parts = squares_mj.shape[1] if squares_mj is not None else 1
    _linear[(num_tiles * ceil_div(num_rows, tile.rows),)](
        x_mk, weight_nk, squares_mj, bias_n, residual_mn, out_mn, squares_out_mj, scale_n, x_scale_m,
        num_rows, num_outputs, epsilon or 0.0, *strides, num_inputs, num_parts,
        power_of_2(num_parts), *flags, squares_out_mj is not None,
        tile.rows, tile.outputs, tile.inputs, tile.slices, **options,
    )  # fmt: skip
    return out_mn


def num_squares(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """The number of parts in which a product of this shape writes the squares of its output."""
    return ceil_div(num_outputs, tile_for(num_rows, num_outputs, num_inputs, dtype).width)


@launched
@triton.jit
def _row_squares(x_mk, out_m, x_stride, K: tl.constexpr, ROOM: tl.constexpr, CHAINED: tl.constexpr):
    """One row."""
    begin(CHAINED)
    row, k = tl.program_id(0), tl.arange(0, ROOM)
    x = tl.load(x_mk + row.to(tl.int64) * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out_m + row, tl.sum(x * x, 0))


def row_squares(x_mk: Tensor) -> Tensor:
    """[M, 1] float32: the sum of squares of every row, for a `linear` with a norm."""
    num_rows, width = x_mk.shape
    out = torch.empty((num_rows, 1), dtype=torch.float32, device=x_mk.device)
    if num_rows:
        room, options = power_of_2(width), launch_options(4, 1, fuses=False)
        _row_squares[(num_rows,)](x_mk, out, x_mk.stride(0), width, room, **options)
    return out
