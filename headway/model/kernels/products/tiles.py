"""How products of few rows are divided into tiles. Knows shapes and device limits, no kernel."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

LARGE = 2**25  # numbers of a matrix from which on its parts are worth a second kernel
WIDE_ROOM = 4 * 1024  # bytes of the reserve of `device_limits` that wide tiles may use
MANY_ROWS = 640  # from here on, invariant tiles do not depend on the number of rows


class Tile(NamedTuple):
    """The part of a product that a program computes, and the slices in which it sums the inputs."""

    rows: int
    outputs: int
    inputs: int
    slices: int
    warps: int
    stages: int
    extra: int = 0  # outputs beyond `outputs`, in a second piece
    parts: int = 1  # of the inputs, each summed by a program of its own

    @property
    def width(self) -> int:
        """All outputs of a tile."""
        return self.outputs + self.extra


@cache
def tile_for(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Tile:
    """The tile for a product on this device; `dtype` is that of the matrix."""
    if dtype.itemsize == 1:
        return fp8_tile_within(device_limits(), num_rows, num_outputs, num_inputs)
    shape = (num_rows, num_outputs, num_inputs, dtype)
    tile = wide_tile_within(device_limits(), *shape)
    tile = tile or balanced_tile_within(device_limits(), *shape)
    return tile or widened(tile_within(device_limits(), *shape), device_limits(), *shape)


def tile_within(
    limits: tuple[int, int],
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    least_outputs: int = 8,
) -> Tile:
    """About one tile per multiprocessor, with as many stages as fit in its shared memory.

    Tiles of 8 outputs have slices. Measured on an H200 with bfloat16.
    """
    if num_rows == 1:
        outputs, inputs, warps = _one_row(num_outputs, num_inputs, dtype)
        return Tile(1, outputs, inputs, 1, warps, 1)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    processors, memory = limits
    outputs, num_row_tiles = max(least_outputs, 8 if rows <= 32 else 16), -(-num_rows // rows)
    while outputs < 128 and num_row_tiles * num_outputs > 1.4 * outputs * processors:
        outputs *= 2
    num_large = num_outputs // 128 * -(-num_rows // 128)  # tiles of 128 rows and 128 outputs
    if num_rows > 128 and outputs == 128 and num_large >= 0.7 * processors:
        rows = 128
    slices = 4 if outputs == 8 and num_inputs % 512 == 0 else 1
    width = rows + outputs
    is_roomy = memory >= 192 * 1024
    inputs = 64 if width > (192 if is_roomy else 160) else 128
    narrow = 80 if is_roomy and outputs == 16 and num_inputs > 2048 else 64
    if width <= narrow and slices == 1 and num_inputs % 256 == 0:
        inputs = 256
    inputs = inputs * 2 // dtype.itemsize
    stage = width * inputs * slices * dtype.itemsize
    most_stages = 8 if (rows, outputs) == (16, 64) else 6  # measured
    stages = max(1, min(most_stages, memory // stage))
    return Tile(rows, outputs, inputs, slices, 8 if rows * outputs >= 128 * 128 else 4, stages)


def _one_row(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Outputs, inputs and warps of a tile of one row.

    Measured on an H200 in whole layers of Qwen3-0.6B, Qwen2.5-7B and Llama 8B in bfloat16.
    """
    if num_inputs <= 1024:
        return 4, 512, 1
    if num_inputs <= 2048 or dtype.itemsize > 2:
        return 4, 2048, 4
    if num_inputs <= 4096:
        if num_outputs > 4096:
            return 4, 1024, 2
        return (4, 4096, 8) if num_outputs <= 2048 else (4, 2048, 4)
    return (2, 2048, 2) if num_inputs % 2048 == 0 else (2, 4096, 4)


def widened(
    tile: Tile,
    limits: tuple[int, int],
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
) -> Tile:
    """The tile with extra outputs, if one per multiprocessor is then enough; see wide_linear.py.

    Otherwise some multiprocessors compute a second tile after the first, and all others wait. A
    tile is not changed if a multiprocessor computes two of them concurrently.
    """
    least = 16 if tile.rows >= 64 else 8  # loads of 8 outputs for 64 rows would not be pipelined
    processors, memory = limits
    num_row_tiles, stage = -(-num_rows // tile.rows), tile.inputs * dtype.itemsize
    has_room_for_two = 2 * tile.stages * (tile.rows + tile.outputs) * stage <= memory
    is_slower = tile.rows < 32  # measured on an H200: a second round of tiles of 16 rows is short
    if is_slower or has_room_for_two or tile.slices > 1 or num_inputs % tile.inputs:
        return tile
    if num_row_tiles * -(-num_outputs // tile.outputs) <= processors:
        return tile
    for extra in (tile.outputs // 4, tile.outputs // 2):
        stages = min(6, memory // ((tile.rows + tile.outputs + extra) * stage))
        num_tiles = num_row_tiles * -(-num_outputs // (tile.outputs + extra))
        if extra >= least and num_tiles <= processors and stages >= 3:
            return tile._replace(extra=extra, stages=stages)
    return tile


def balanced_tile_within(
    limits: tuple[int, int], num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> Tile | None:
    """The tile for 2 to 64 rows and many inputs that divides a matrix most evenly.

    None if `tile_within` is almost as good, or if there are few inputs, which are all on their way
    at once. See wide_linear.py; measured on an H200.
    """
    processors, memory = limits
    is_roomy = dtype.itemsize == 2 and memory >= 192 * 1024
    if not is_roomy or not 2 <= num_rows <= 64 or num_inputs <= 2048 or num_inputs % 256:
        return None
    usual = tile_within(limits, num_rows, num_outputs, num_inputs, dtype).outputs
    outputs, extra = _even_pieces(processors, num_outputs, num_rows <= 16, usual)
    width = outputs + extra
    if width == usual:
        return None
    if outputs == 128:
        room = memory // _num_rounds(processors, num_outputs, width)
        return Tile(64, outputs, 64, 1, 4, min(6, room // ((64 + width) * 64 * 2)), extra)
    if num_rows <= 16:
        inputs = 128 if num_inputs % 512 == 0 and width <= 48 else 64
        stages = 1 + memory // ((16 + width) * 4 * inputs * 2)  # one of them needs no memory
        return Tile(16, outputs, inputs, 4, 4, stages, extra)
    stages = min(7 if extra else 6, memory // ((64 + width) * 128 * 2))
    return Tile(64, outputs, 128, 1, 4, stages, extra)


def _even_pieces(processors: int, num_outputs: int, is_few: bool, usual: int) -> tuple[int, int]:
    """Outputs and extra outputs of tiles of 16 (few) or 64 rows; the usual ones if almost as good.

    The product takes as long as the multiprocessor that reads most.
    """

    def cost(width: int) -> int:
        """What the busiest multiprocessor reads; the rows of a tile count as 16 outputs."""
        return _num_rounds(processors, num_outputs, width) * (width + 16)

    def is_possible(piece: tuple[int, int]) -> bool:
        """Two rounds of large tiles are computed concurrently; more than two are slower."""
        most = 2 if piece[0] == 128 else 1
        return _num_rounds(processors, num_outputs, sum(piece)) <= most

    least = 8 if is_few else 16  # loads of 8 outputs for 64 rows would not be pipelined
    pieces = [(size, size // share) for size in (16, 32, 64, 128) for share in (2, 4, 8)]
    pieces = [piece for piece in pieces if piece[1] >= least and is_possible(piece)]
    if not is_few and is_possible((32, 0)):
        pieces.append((32, 0))
    best = min(pieces, key=lambda piece: (cost(sum(piece)), -sum(piece)), default=(usual, 0))
    return best if cost(sum(best)) <= 0.85 * cost(usual) else (usual, 0)


def _num_rounds(processors: int, num_outputs: int, width: int) -> int:
    """Tiles of the busiest multiprocessor, with one row tile."""
    return -(-num_outputs // width // processors)


def wide_tile_within(
    limits: tuple[int, int], num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> Tile | None:
    """The tile for 17 to 128 rows and a large matrix that reads the rows less often.

    From 65 rows on it has 128 rows. None if the matrix is too small for it, or its inputs are no
    whole tiles. See wide_linear.py.
    """
    processors, memory = limits
    is_roomy = dtype.itemsize == 2 and memory >= 192 * 1024
    if not is_roomy or not 16 < num_rows <= 128 or num_inputs % 64:
        return None
    if num_rows <= 64:
        is_idle = 0.7 < -(-num_outputs // 32) / processors < 0.9  # with tiles of 32 outputs
        is_large = num_outputs * num_inputs >= LARGE and num_inputs % 256 == 0
        return Tile(64, 64, 128, 1, 4, 6, parts=2) if is_idle and is_large else None

    def share_busy(extra: int) -> float:
        """Tiles over the places for them: each multiprocessor takes one after the other."""
        num_tiles = -(-num_outputs // (256 + extra))
        return num_tiles / (-(-num_tiles // processors) * processors)

    extra = max((0, 32), key=share_busy)
    if share_busy(extra) >= 0.75:
        stages = (memory + WIDE_ROOM) // ((128 + 256 + extra) * 64 * 2)
        return Tile(128, 256, 64, 1, 8, stages, extra)
    parts = max(n for n in (1, 2, 4) if -(-num_outputs // 128) * n <= processors or n == 1)
    if parts == 1 or num_outputs * num_inputs < LARGE or num_inputs % (64 * parts):
        return None
    return Tile(128, 128, 64, 1, 8, 6, parts=parts)


def fp8_tile_within(
    limits: tuple[int, int], num_rows: int, num_outputs: int, num_inputs: int
) -> Tile:
    """At most one tile per multiprocessor if possible; measured on an H200 with fp8 rows.

    No tile has fewer than 64 rows: padding rows cost nothing, and smaller tiles need an instruction
    that is slower.
    """
    processors, memory = limits
    if num_rows == 1:
        if num_inputs <= 2048:
            return Tile(1, 8, 2048, 1, 4, 1)
        if num_inputs > 4096:
            return Tile(1, 2, 4096, 1, 4, 1)
        if num_outputs <= 4096:
            return Tile(1, 4, 2048, 1, 4, 1)
        return Tile(1, 4, 1024, 1, 2, 1) if num_outputs <= 8192 else Tile(1, 4, 4096, 1, 4, 1)
    rows, outputs = 64, 16
    while outputs < 128 and -(-num_rows // rows) * -(-num_outputs // outputs) > processors:
        outputs *= 2
    if num_rows > 64 and -(-num_rows // rows) * -(-num_outputs // outputs) > processors:
        rows = 128
    inputs = 256 if outputs <= 64 and num_inputs % 256 == 0 else 128
    stages = max(1, min(6, memory // ((rows + outputs) * inputs)))
    return Tile(rows, outputs, inputs, 1, 8 if rows == 128 else 4, stages)


@cache
def invariant_tile(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Tile:
    """The tile for any number of rows, such that a row's result is the same bits for all of them.

    A tile sums the inputs in order, in one accumulator, with tensor cores; so there are no slices,
    and one row is computed as several. From MANY_ROWS on the tile does not change, so that no
    kernel is left to compile when a larger pass comes.
    """
    limits = processors, memory = device_limits()
    num_rows = min(max(num_rows, 2), MANY_ROWS)
    tile = tile_within(limits, num_rows, num_outputs, num_inputs, dtype, 16)
    num_wide = num_rows // 128 * (num_outputs // 256)  # tiles of 128 rows and 256 outputs
    is_roomy = dtype.itemsize == 2 and memory >= 192 * 1024
    if num_rows > 256 and is_roomy and num_wide >= processors // 2:
        tile = Tile(128, 256, 64, 1, 8, memory // ((128 + 256) * 64 * 2))
    elif num_rows == MANY_ROWS:
        tile = tile_within(limits, 2**20, num_outputs, num_inputs, dtype, 16)
        tile = tile._replace(warps=4, stages=min(tile.stages, 4))
    elif tile.rows + tile.outputs == 32 and is_roomy and num_inputs % 512 == 0:
        tile = tile._replace(inputs=512, stages=memory // (32 * 512 * 2))
    assert tile.rows >= 16 and tile.slices == 1, "the order of the sum must not depend on the rows"
    return tile


@cache
def device_limits() -> tuple[int, int]:
    """The number of multiprocessors, and bytes of shared memory for a program's tiles."""
    if not torch.cuda.is_available():
        return 132, 200 * 1024
    found = torch.cuda.get_device_properties()
    memory = getattr(found, "shared_memory_per_block_optin", 100 * 1024)
    return found.multi_processor_count, memory - 20 * 1024
