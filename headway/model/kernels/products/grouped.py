"""Products of many rows, each with the matrix of its expert.

A tile has rows of one expert. The tiles of all experts follow each other, and a program finds its own
from the numbers of pairs. The host does not know these, so it launches programs for the most tiles
that there can be, of which the last ones end at once.

Shapes: M rows, N outputs, K inputs, E experts, P pairs (see routing.py), J parts of a sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import (
    begin,
    ceil_div,
    is_compiling,
    launch_options,
    launched,
    power_of_2,
)
from headway.model.kernels.products.epilogue import finish, load_squares, norm_factor
from headway.model.kernels.products.linear import tile_at
from headway.model.kernels.products.tiles import Tile, device_limits
from headway.model.kernels.routing import Lists

# By the largest mean number of rows of an expert: most experts should need one tile, because another
# one reads the matrix again. Measured on an H200 with bfloat16 and the shape of Qwen3-30B-A3B.
TILES: dict[float, Tile] = {
    2: Tile(16, 64, 128, slices=1, warps=4, stages=4),
    8: Tile(16, 128, 128, slices=1, warps=4, stages=3),
    20: Tile(32, 128, 128, slices=1, warps=4, stages=3),
    48: Tile(64, 128, 64, slices=1, warps=4, stages=3),
    96: Tile(128, 256, 64, slices=1, warps=8, stages=4),
    float("inf"): Tile(128, 256, 64, slices=1, warps=8, stages=3),
}


class Stack(NamedTuple):
    """The matrices of all experts, and their biases."""

    weight_enk: Tensor
    bias_en: Tensor | None = None


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _grouped(
    x_mk, weight_enk, bias_en, counts_e, pairs_em, squares_mj, out_pn, num_rows, num_outputs,
    epsilon, x_stride, out_stride,
    K: tl.constexpr, NUM_SQUARES: tl.constexpr, SQUARES_ROOM: tl.constexpr,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, SHARING: tl.constexpr, GATE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile; SHARING pairs have the same row of x."""
    e, k = tl.arange(0, ROOM), tl.arange(0, INPUTS)
    begin(CHAINED)
    count_e = tl.load(counts_e + e, mask=e < EXPERTS, other=0)
    tiles_e = (count_e + ROWS - 1) // ROWS
    num_tiles, num_output_tiles = tl.sum(tiles_e, 0), tl.cdiv(num_outputs, OUTPUTS)
    if tl.program_id(0) >= num_tiles * num_output_tiles:
        return
    tile, output_tile = tile_at(tl.program_id(0), num_tiles, num_output_tiles)
    is_before = tl.cumsum(tiles_e, 0) <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(is_before, tiles_e, 0), 0)) * ROWS
    m = first + tl.arange(0, ROWS)
    is_row = m < tl.sum(tl.where(e == expert, count_e, 0), 0)
    pair_m = tl.load(pairs_em + expert * num_rows + m, mask=is_row, other=0).to(tl.int64)
    row_m = pair_m // SHARING
    n = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    near_n = expert.to(tl.int64) * num_outputs + tl.where(n < num_outputs, n, 0)
    x = x_mk + row_m[:, None] * x_stride + k[None, :]
    weight = weight_enk + near_n[None, :] * K + k[:, None]
    squares = load_squares(squares_mj, row_m, NUM_SQUARES, SQUARES_ROOM)
    bias = 0.0
    if bias_en is not None:
        bias = tl.load(bias_en + near_n)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, K, INPUTS):
        if K % INPUTS == 0:
            a, b = tl.load(x + start, mask=is_row[:, None], other=0.0), tl.load(weight + start)
        else:
            is_input = k < K - start
            a = tl.load(x + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            b = tl.load(weight + start, mask=is_input[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    factor_m = norm_factor(squares, squares_mj, epsilon, K)
    finish(
        total, output_tile * OUTPUTS, factor_m, bias, 0.0, squares_mj, bias_en, None, out_pn,
        pair_m, is_row, num_outputs, out_stride, GATE,
    )  # fmt: skip


def grouped(
    x_mk: Tensor,
    experts: Stack,
    lists: Lists,
    num_chosen: int,
    *,
    gate: int = 0,
    epsilon: float | None = None,
    squares_mj: Tensor | None = None,
) -> Tensor:
    """Each pair's row of x times the matrix of its expert: [P, N], or [P, N / 2] if gated.

    x has a row for each row of the lists, or for each pair. `gate` is the number of an activation
    in GATES, or 0. The norm is that of products.linear, but one row needs its squares too.
    """
    weight_enk = experts.weight_enk
    num_rows, (num_experts, num_outputs, num_inputs) = lists.pairs_et.shape[1], weight_enk.shape
    num_pairs, sharing = num_rows * num_chosen, num_rows * num_chosen // len(x_mk)
    assert x_mk.stride(1) == 1 and weight_enk.is_contiguous(), "rows must be contiguous"
    out_pn = x_mk.new_empty((num_pairs, num_outputs // 2 if gate else num_outputs))
    assert (epsilon is None) == (squares_mj is None), "a norm needs the squares of the rows"
    num_parts = 1 if squares_mj is None else squares_mj.shape[1]
    for tile in tiles_for(num_pairs / num_experts, x_mk.dtype):
        num_tiles = most_tiles(num_pairs, num_experts, tile.rows)
        _grouped[(num_tiles * ceil_div(num_outputs, tile.outputs),)](
            x_mk, *experts, *lists, squares_mj, out_pn, num_rows, num_outputs, epsilon or 0.0,
            x_mk.stride(0), out_pn.stride(0), num_inputs, num_parts, power_of_2(num_parts),
            num_experts, power_of_2(num_experts), sharing, gate, *tile[:3],
            **launch_options(tile.warps, tile.stages, fuses=False),
        )  # fmt: skip
    return out_pn


def tiles_for(mean_rows: float, dtype: torch.dtype) -> Iterator[Tile]:
    """The tile for this mean number of rows of an expert, with the stages that fit on this device.

    While kernels are compiled: all, so that none is left when a pass of another size comes.
    """
    for most, tile in TILES.items():
        if mean_rows <= most or is_compiling():
            stages = device_limits()[1] // ((tile.rows + tile.outputs) * tile.inputs * 2)
            inputs = tile.inputs * 2 // dtype.itemsize
            yield tile._replace(inputs=inputs, stages=max(1, min(tile.stages, stages)))
        if mean_rows <= most and not is_compiling():
            return


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles that any lists need: one of each expert may not be full."""
    return (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
