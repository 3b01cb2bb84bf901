"""The gated product of an MLP for many rows: silu(gate) * up of a product with a matrix.

cuBLAS computes the product and a second kernel the activation, or on Hopper GPUs one kernel both,
if its tiles keep the multiprocessors busy. Gate and up rows of the matrix are interleaved.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.kernels.activation import silu_multiply
from headway.model.kernels.hopper import hopper_module
from headway.model.kernels.launch import ceil_div, is_compiling
from headway.model.kernels.tiles import device_limits

MIN_ROWS = 256  # with fewer, reading the matrix limits the speed
# With a smaller share of the places in tiles filled, cuBLAS is as fast. Measured on an H200.
MIN_FILLED = 0.75


class GatedTile(NamedTuple):
    """How a product is divided. A tile has 2 * rows rows, and pairs + extra outputs."""

    rows: int
    pairs: int
    extra: int  # outputs with sums of their own, because only powers of 2 have a layout
    stages: int
    band: int  # row tiles that are read together, so that they stay in the L2 cache


# With the time that a place of a tile takes, measured on an H200. Large tiles read less.
TILES = {
    GatedTile(rows=64, pairs=64, extra=0, stages=6, band=16): 1.0,
    GatedTile(rows=64, pairs=64, extra=32, stages=5, band=16): 1.0,
    GatedTile(rows=128, pairs=64, extra=32, stages=3, band=8): 0.97,
}
START = 0.35  # tiles that a program could compute while it waits for the first and stores the last


def gated_product(x_tk: Tensor, weight_2nk: Tensor, bias_2n: Tensor | None) -> Tensor:
    """silu(gate) * up: [T, N]."""
    hopper = hopper_kernel()
    if hopper is not None and bias_2n is None and hopper.supports(x_tk, weight_2nk):
        tile = tile_for(len(x_tk), len(weight_2nk) // 2)
        if is_compiling():  # all of them, so that none is left when a pass of other sizes comes
            for each in TILES:
                hopper.gated_product_hopper(x_tk, weight_2nk, each)
        elif tile is not None:
            return hopper.gated_product_hopper(x_tk, weight_2nk, tile)  # type: ignore[no-any-return]
    return silu_multiply(F.linear(x_tk, weight_2nk, bias_2n))


@cache
def tile_for(num_rows: int, num_outputs: int) -> GatedTile | None:
    """The fastest tile, or None if cuBLAS is as fast as its kernel."""
    num_processors = device_limits()[0]

    def seconds(tile: GatedTile) -> float:
        """In places of tiles: every multiprocessor computes one tile after the other."""
        height, width = 2 * tile.rows, tile.pairs + tile.extra
        num_tiles = ceil_div(num_rows, height) * ceil_div(num_outputs, width)
        num_turns = ceil_div(num_tiles, num_processors)
        return (num_turns * TILES[tile] + START) * height * width

    best = min(TILES, key=seconds)
    num_filled = num_rows * num_outputs / num_processors
    if num_rows < MIN_ROWS or num_filled < MIN_FILLED * seconds(best):
        return None
    return best


@cache
def hopper_kernel() -> ModuleType | None:
    """gated_hopper.py, if it can be used."""
    return hopper_module("gated_hopper")
