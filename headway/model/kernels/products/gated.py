"""The gated product of an MLP for many rows: silu(gate) * up of a product with a matrix.

cuBLAS computes the product and a second kernel the activation, or on Hopper GPUs one kernel both,
if its tiles keep all multiprocessors busy. Gate and up rows of the matrix are interleaved.

Legend: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.kernels.activation import silu_multiply
from headway.model.kernels.launch import ceil_div, hopper_module, is_compiling
from headway.model.kernels.products.tiles import device_limits

hopper_kernel = cache(partial(hopper_module, "products.gated_hopper"))  # if it can be used
MIN_ROWS = 256  # with fewer, reading the matrix limits the speed
# The activation of its own takes 246 / K of the time of the product: 6 bytes of memory for an output
# against 4 K operations, measured on an H200.
ACTIVATION = 246


class GatedTile(NamedTuple):
    """How a product is divided. A tile has 2 * rows rows, and pairs + extra outputs."""

    rows: int
    pairs: int
    extra: int  # outputs with sums of their own, because only powers of 2 have a layout
    stages: int
    band: int  # row tiles that are read together, so that they stay in the L2 cache


# The larger tile reads less. Fewer programs wait for the last tiles if there are two sizes.
# The numbers are the relative times of an output, measured on an H200.
TILES = {
    GatedTile(rows=64, pairs=64, extra=32, stages=5, band=16): 1.02,
    GatedTile(rows=128, pairs=64, extra=0, stages=4, band=8): 1.0,
}


def gated_product(
    x_tk: Tensor, weight_2nk: Tensor, bias_2n: Tensor | None, activation: str = "silu"
) -> Tensor:
    """silu(gate) * up, or gelu: [T, N]."""
    hopper = None if IN_TWO_KERNELS.get() or activation != "silu" else hopper_kernel()
    if hopper is not None and bias_2n is None and hopper.supports(x_tk, weight_2nk):
        tile = tile_for(len(x_tk), len(weight_2nk) // 2, x_tk.shape[1])
        if is_compiling():  # all of them, so that none is left when a pass of other sizes comes
            for each in TILES:
                hopper.gated_product_hopper(x_tk, weight_2nk, each)
        elif tile is not None:
            return hopper.gated_product_hopper(x_tk, weight_2nk, tile)  # type: ignore[no-any-return]
    return silu_multiply(F.linear(x_tk, weight_2nk, bias_2n), activation)


IN_TWO_KERNELS: ContextVar[bool] = ContextVar("in_two_kernels", default=False)


@contextmanager
def in_two_kernels() -> Iterator[None]:
    """Use cuBLAS and the activation for any number of rows, which takes the most memory."""
    before = IN_TWO_KERNELS.set(True)
    try:
        yield
    finally:
        IN_TWO_KERNELS.reset(before)


@cache
def tile_for(num_rows: int, num_outputs: int, num_inputs: int) -> GatedTile | None:
    """The fastest tile, or None if cuBLAS and the activation are as fast.

    cuBLAS is taken to be as fast as a kernel whose tiles are all filled and end together.
    """
    if num_rows < MIN_ROWS:
        return None
    num_processors = device_limits()[0]

    def places(tile: GatedTile) -> int:
        """Outputs that a multiprocessor has time for: it computes one tile after the other."""
        height, width = 2 * tile.rows, tile.pairs + tile.extra
        num_tiles = ceil_div(num_rows, height) * ceil_div(num_outputs, width)
        return ceil_div(num_tiles, num_processors) * height * width

    tile = min(TILES, key=lambda tile: places(tile) * TILES[tile])
    filled = num_rows * num_outputs / (num_processors * places(tile))
    return tile if filled * (1 + ACTIVATION / num_inputs) > 1 else None
