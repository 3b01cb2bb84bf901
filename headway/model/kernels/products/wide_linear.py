"""Products with tiles that have extra outputs, or that sum a part of the inputs.

All multiprocessors should read about the same number of outputs: otherwise some of them still read
while all others wait. So a tile may have a width that is not a power of 2, for example 32 + 16
outputs. Tiles of 16 rows have slices: with two products in a loop, Triton lets all warps compute
the same product of few rows; with slices, each warp sums different inputs.

From 65 rows on, bytes from the L2 cache limit the speed of a product with a large matrix: every
tile of outputs reads all rows of its row tile. So a tile has 128 rows and as many outputs as fit,
for example 256 + 32. A large matrix of few outputs has tiles that are summed over a part of the
inputs only, some of them from 17 rows on; a second kernel adds the parts in order.

tiles.balanced_tile_within, tiles.widened and tiles.wide_tile_within choose.

Shapes: M rows, N outputs, K inputs, P parts of the inputs, J parts of a sum of squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.epilogue import finish, load_ends, load_squares, norm_factor
from headway.model.kernels.products.tiles import Tile

ADDED = 1024  # outputs of a program that adds parts
AHEAD = 4  # lines of each output that are fetched while the previous kernel still runs


@triton.jit
def fetch_ahead(place, AHEAD: tl.constexpr):
    """Start to copy AHEAD lines of 128 bytes from each of these places to the L2 cache."""
    for line in tl.static_range(AHEAD):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64) + line * 128],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _two_products(
    x_m, weight_n, weight_n2, is_row, K: tl.constexpr, INPUTS: tl.constexpr, IS_MASKED: tl.constexpr
):
    """Rows times two groups of outputs, float32; the arguments point at the first inputs."""
    k = tl.arange(0, INPUTS)
    x = x_m[:, None] + k[None, :]
    weight, weight_2 = weight_n[None, :] + k[:, None], weight_n2[None, :] + k[:, None]
    total = tl.zeros((x_m.shape[0], weight_n.shape[0]), tl.float32)
    total_2 = tl.zeros((x_m.shape[0], weight_n2.shape[0]), tl.float32)
    for start in range(0, K, INPUTS):
        a = tl.load(x + start, mask=is_row[:, None] if IS_MASKED else None)
        total = tl.dot(a, tl.load(weight + start), total, input_precision="ieee")
        total_2 = tl.dot(a, tl.load(weight_2 + start), total_2, input_precision="ieee")
    return total, total_2


@triton.jit
def _two_sliced_products(
    x_m, weight_n, weight_n2, is_row, K: tl.constexpr, INPUTS: tl.constexpr, SLICES: tl.constexpr
):
    """Like `_two_products`, but each warp sums different inputs of all outputs."""
    s, k = tl.arange(0, SLICES)[:, None, None] * INPUTS, tl.arange(0, INPUTS)
    x, k = x_m[None, :, None] + s + k[None, None, :], k[None, :, None]
    weight, weight_2 = weight_n[None, None, :] + s + k, weight_n2[None, None, :] + s + k
    total = tl.zeros((SLICES, x_m.shape[0], weight_n.shape[0]), tl.float32)
    total_2 = tl.zeros((SLICES, x_m.shape[0], weight_n2.shape[0]), tl.float32)
    for start in range(0, K, INPUTS * SLICES):
        a = tl.load(x + start, mask=is_row[None, :, None], other=0.0)
        total = tl.dot(a, tl.load(weight + start), total, input_precision="ieee")
        total_2 = tl.dot(a, tl.load(weight_2 + start), total_2, input_precision="ieee")
    return tl.sum(total, 0), tl.sum(total_2, 0)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _wide(
    x_mk, weight_nk, squares_mj, bias_n, residual_mn, out_mn, squares_out_mj,
    num_rows, num_outputs, epsilon, x_stride, out_stride,
    K: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_ROOM: tl.constexpr,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, EXTRA: tl.constexpr,
    INPUTS: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile of OUTPUTS and then EXTRA outputs. Row tiles of the same outputs are consecutive."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0) // num_row_tiles
    first = tile * (OUTPUTS + EXTRA)
    first_2 = first + OUTPUTS
    m = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    n, n_2 = first + tl.arange(0, OUTPUTS), first_2 + tl.arange(0, EXTRA)
    near_m, is_row = m % num_rows, m < num_rows
    x_m = x_mk + near_m * x_stride
    weight_n = weight_nk + (n % num_outputs).to(tl.int64) * K
    weight_n2 = weight_nk + (n_2 % num_outputs).to(tl.int64) * K
    if CHAINED:
        fetch_ahead(weight_n, AHEAD)
        fetch_ahead(weight_n2, AHEAD)
    begin(CHAINED)
    # Loads for the end start before the product, so that nothing waits for them later.
    squares = load_squares(squares_mj, near_m, NUM_SQUARES, SQUARES_ROOM)
    bias, residual = load_ends(
        first, bias_n, residual_mn, near_m, is_row, num_outputs, out_stride, IS_GATED, OUTPUTS
    )
    bias_2, residual_2 = load_ends(
        first_2, bias_n, residual_mn, near_m, is_row, num_outputs, out_stride, IS_GATED, EXTRA
    )
    # Masks are slower in small tiles. In large tiles, padding rows that are not read are faster.
    IS_MASKED: tl.constexpr = OUTPUTS >= 128
    if SLICES == 1:
        total, total_2 = _two_products(x_m, weight_n, weight_n2, is_row, K, INPUTS, IS_MASKED)
    else:
        total, total_2 = _two_sliced_products(x_m, weight_n, weight_n2, is_row, K, INPUTS, SLICES)
    factor_m = norm_factor(squares, squares_mj, epsilon, K)
    out_squares = finish(
        total, first, factor_m, bias, residual, squares_mj, bias_n, residual_mn, out_mn, near_m,
        is_row, num_outputs, out_stride, IS_GATED,
    )  # fmt: skip
    out_squares += finish(
        total_2, first_2, factor_m, bias_2, residual_2, squares_mj, bias_n, residual_mn, out_mn,
        near_m, is_row, num_outputs, out_stride, IS_GATED,
    )  # fmt: skip
    if squares_out_mj is not None:
        home = squares_out_mj + near_m * tl.cdiv(num_outputs, OUTPUTS + EXTRA) + tile
        tl.store(home, out_squares, mask=is_row)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _part(
    x_mk, weight_nk, parts_pmn, num_rows, num_outputs, x_stride,
    K: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile, summed over one part of the inputs."""
    num_row_tiles, part = tl.cdiv(num_rows, ROWS), tl.program_id(1)
    m = tl.program_id(0) % num_row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // num_row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    SPAN: tl.constexpr = K // PARTS
    k, is_row = tl.arange(0, INPUTS), (m < num_rows)[:, None]
    x = x_mk + part * SPAN + (m % num_rows)[:, None] * x_stride + k[None, :]
    weight_n = weight_nk + part * SPAN + (n % num_outputs).to(tl.int64) * K
    weight = weight_n[None, :] + k[:, None]
    if CHAINED:
        fetch_ahead(weight_n, AHEAD)
    begin(CHAINED)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SPAN, INPUTS):
        a, b = tl.load(x + start, mask=is_row, other=0.0), tl.load(weight + start)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = (part * num_rows + m)[:, None] * num_outputs + n[None, :]
    tl.store(parts_pmn + place, total, mask=is_row & (n < num_outputs)[None, :])


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _add(
    parts_pmn, squares_mj, bias_n, residual_mn, out_mn, squares_out_mj,
    num_rows, num_outputs, epsilon, out_stride,
    K: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_ROOM: tl.constexpr,
    IS_GATED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Add the parts of some outputs, in order, and finish the product."""
    tile = tl.program_id(1)
    m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, near_m = m < num_rows, m % num_rows
    is_inside = is_row[:, None] & (n < num_outputs)[None, :]
    place = parts_pmn + near_m[:, None] * num_outputs + n[None, :]
    begin(CHAINED)
    squares = load_squares(squares_mj, near_m, NUM_SQUARES, SQUARES_ROOM)
    bias, residual = load_ends(
        tile * OUTPUTS,
        bias_n,
        residual_mn,
        near_m,
        is_row,
        num_outputs,
        out_stride,
        IS_GATED,
        OUTPUTS,
    )
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(place + part * num_rows * num_outputs, mask=is_inside, other=0.0)
    factor_m = norm_factor(squares, squares_mj, epsilon, K)
    out_squares = finish(
        total, tile * OUTPUTS, factor_m, bias, residual, squares_mj, bias_n, residual_mn, out_mn,
        near_m, is_row, num_outputs, out_stride, IS_GATED,
    )  # fmt: skip
    if squares_out_mj is not None:
        home = squares_out_mj + near_m * tl.cdiv(num_outputs, OUTPUTS) + tile
        tl.store(home, out_squares, mask=is_row)


def wide_linear(
    x_mk: Tensor,
    weight_nk: Tensor,
    out_mn: Tensor,
    tile: Tile,
    *,
    bias_n: Tensor | None = None,
    epsilon: float | None = None,
    squares_mj: Tensor | None = None,
    gate: int = 0,
    residual_mn: Tensor | None = None,
    squares_out_mj: Tensor | None = None,
) -> None:
    """Like linear.linear with several rows, for a tile that has extra outputs or parts.

    `gate` is the number of its activation in GATES; 0: there is none.
    """
    num_rows, (num_outputs, num_inputs) = len(x_mk), weight_nk.shape
    assert num_inputs % (tile.parts * tile.inputs * tile.slices) == 0, "a part has whole tiles"
    assert tile.parts == 1 or tile.extra == 0, "a tile has extra outputs or parts, not both"
    squares = None if epsilon is None else squares_mj
    num_parts = 1 if squares is None else squares.shape[1]
    norm = (num_inputs, num_parts, power_of_2(num_parts), gate)
    ends = (bias_n, residual_mn, out_mn, squares_out_mj, num_rows, num_outputs, epsilon or 0.0)
    options = launch_options(tile.warps, tile.stages, fuses=False)
    x_stride, out_stride = x_mk.stride(0), out_mn.stride(0)
    num_tiles = ceil_div(num_outputs, tile.width)
    num_programs = num_tiles * ceil_div(num_rows, tile.rows)
    if tile.parts == 1:
        _wide[(num_programs,)](
            x_mk, weight_nk, squares, *ends, x_stride, out_stride, *norm,
            tile.rows, tile.outputs, tile.extra, tile.inputs, tile.slices, AHEAD, **options,
        )  # fmt: skip
        return
    shape = (tile.parts, num_rows, num_outputs)
    parts_pmn = torch.empty(shape, dtype=torch.float32, device=x_mk.device)
    _part[(num_programs, tile.parts)](
        x_mk, weight_nk, parts_pmn, num_rows, num_outputs, x_stride, num_inputs, tile.parts,
        tile.rows, tile.outputs, tile.inputs, AHEAD, **options,
    )  # fmt: skip
    sum_parts(parts_pmn, squares, ends, norm, tile.outputs)


def sum_parts(
    parts_pmn: Tensor,
    squares_mj: Tensor | None,
    ends: tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, int, int, float],
    norm: tuple[int, int, int, int],
    outputs: int,
) -> None:
    """Add the parts and finish the product; `ends` and `norm` are arguments of `_add`, as there."""
    rows, num_rows, num_outputs = max(1, ADDED // outputs), *ends[4:6]
    _add[(ceil_div(num_rows, rows), ceil_div(num_outputs, outputs))](
        parts_pmn, squares_mj, *ends, ends[2].stride(0), *norm, len(parts_pmn), rows, outputs,
        **launch_options(4, 1, fuses=False),
    )  # fmt: skip
