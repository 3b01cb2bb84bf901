"""Rings of tiles of keys and values in the shared memory of a Hopper GPU, in Gluon.

A ring has its tiles, and for each of them a barrier that is passed when the tile is copied (`ready`)
and one that is passed when both groups of warps have read it (`free`). Tiles are numbered from 0 in
the order in which they are copied and read; tile n is in place n % STAGES.

One thread gives orders to the GPU's copy engine (TMA), one for each block of the cache and COLUMNS.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

COLUMNS = 64  # numbers of a row that are copied at once: 128 bytes, the width of the swizzle
# The layout of all tiles.
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# Triton 3.6 and later versions have different names.
load_rows = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def describe_rows(blocks: Tensor, most_rows: int) -> TensorDescriptor:
    """The cache as rows of a head's numbers, to be copied by block or `most_rows`."""
    block_size, head_dim = blocks.shape[4:]
    shape = [blocks.numel() // head_dim, head_dim]
    part = [min(block_size, most_rows), COLUMNS]
    return TensorDescriptor(blocks, shape, [head_dim, 1], part, SHARED.value)


@gluon.jit
def make_ring(dtype: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Tiles of KEYS rows, and their barriers `ready` and `free`."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return tiles, ready, free


@gluon.jit
def block_numbers(table, place, last, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """The blocks of KEYS positions from `place` on; the block at `last` instead of later ones."""
    SIZE: gl.constexpr = min(BLOCK_SIZE, KEYS)
    numbers = ()
    for at in gl.static_range(0, KEYS, SIZE):
        number = gl.load(table + gl.minimum((place + at) // BLOCK_SIZE, last))
        numbers = numbers + (number,)  # type: ignore[assignment]  # noqa: RUF005
    return numbers


@gluon.jit
def copy_tile(
    cache_rows, numbers, ring, tile, row,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the blocks with these numbers to their tile, when it is free."""
    tiles, ready, free = ring
    stage = tile % STAGES
    SIZE: gl.constexpr = min(BLOCK_SIZE, KEYS)
    PARTS: gl.constexpr = D // cache_rows.block_type.shape[1]
    SHAPE: gl.constexpr = [STAGES * PARTS, KEYS, D // PARTS]
    if HAS_REINTERPRET:
        parts = tiles.reinterpret(cache_rows.dtype, SHAPE, SHARED)
    else:
        parts = tiles._reinterpret(cache_rows.dtype, SHAPE, SHARED)
    mbarrier.wait(free.index(stage), tile // STAGES & 1 ^ 1)
    mbarrier.expect(ready.index(stage), KEYS * D * cache_rows.dtype.primitive_bitwidth // 8)
    for part in gl.static_range(PARTS):
        target = parts.index(stage * PARTS + part)
        for i in gl.static_range(KEYS // SIZE):
            at = [row + numbers[i] * BLOCK_ROWS, part * (D // PARTS)]
            load_rows(cache_rows, at, ready.index(stage), target.slice(i * SIZE, SIZE))


@gluon.jit
def wait_for(ring, tile, STAGES: gl.constexpr):
    """The tile, when it is copied."""
    tiles, ready, _ = ring
    mbarrier.wait(ready.index(tile % STAGES), tile // STAGES & 1)
    return tiles.index(tile % STAGES)


@gluon.jit
def set_free(ring, tile, STAGES: gl.constexpr):
    """Say that this group of warps has read the tile."""
    mbarrier.arrive(ring[2].index(tile % STAGES))
