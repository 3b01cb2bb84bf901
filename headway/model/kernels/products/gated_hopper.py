"""The gated product of an MLP for many rows on Hopper GPUs, in Gluon; see gated.py for the task.

As many programs as multiprocessors walk over the tiles of the output. A program has three groups of
warps. One copies tiles of rows and of the matrix to shared memory, as far ahead as there is room,
also for the next tile of the output. The two others multiply ROWS rows each, and gate and store
their sums while the other one multiplies.

Legend: T rows, K inputs, N outputs; an output has a pair of rows of the matrix, its gate and its up.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.model.kernels.hopper_ring import COLUMNS, SHARED, load_rows
from headway.model.kernels.launch import ceil_div, launch_options, launched
from headway.model.kernels.products.gated import GatedTile
from headway.model.kernels.products.tiles import device_limits

# Triton 3.6 and later versions have different names.
store_rows = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
LOADER_REGISTERS = gl.constexpr(40)
READER_REGISTERS = gl.constexpr(232)


def supports(x_tk: Tensor, weight_2nk: Tensor) -> bool:
    """Whether the kernel can read these types and sizes."""
    num_pairs, num_inputs = len(weight_2nk) // 2, weight_2nk.shape[1]
    return (
        len(x_tk) > 0
        and x_tk.dtype == weight_2nk.dtype
        and x_tk.dtype in (torch.bfloat16, torch.float16)
        and weight_2nk.is_contiguous()
        and x_tk.is_contiguous()
        and num_inputs % COLUMNS == 0
        and num_pairs % 8 == 0  # for copies of 16 bytes
        and x_tk.data_ptr() % 16 == weight_2nk.data_ptr() % 16 == 0
    )


def gated_product_hopper(x_tk: Tensor, weight_2nk: Tensor, tile: GatedTile) -> Tensor:
    """Like gated_product, for what `supports` accepts."""
    (num_rows, num_inputs), num_pairs = x_tk.shape, len(weight_2nk) // 2
    out_tn = torch.empty((num_rows, num_pairs), dtype=x_tk.dtype, device=x_tk.device)
    # A row of this view is that of a gate, and then that of its up.
    pairs = weight_2nk.view(num_pairs, 2 * num_inputs)
    num_tiles = ceil_div(num_rows, 2 * tile.rows) * ceil_div(num_pairs, tile.pairs + tile.extra)
    _gated_product[(min(num_tiles, device_limits()[0]),)](
        _describe(x_tk, tile.rows, COLUMNS),
        _describe(pairs, tile.pairs, COLUMNS),
        _describe(pairs, tile.extra, COLUMNS) if tile.extra else None,
        _describe(out_tn, tile.rows, tile.pairs),
        _describe(out_tn, tile.rows, tile.extra) if tile.extra else None,
        num_rows, num_pairs, num_inputs, *tile, **launch_options(num_warps=4, num_stages=1),
    )  # fmt: skip
    return out_tn


def _describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The matrix, to be copied by `rows` and `columns`."""
    layout = gl.NVMMASharedLayout(min(2 * columns, 128), element_bitwidth=16, rank=2)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout
    )


# Not specialized, so that one build serves all sizes.
@launched
@gluon.jit(do_not_specialize=["num_rows", "num_pairs", "num_inputs"])
def _gated_product(
    x_rows, pair_rows, extra_rows, out_rows, extra_out_rows, num_rows, num_pairs, num_inputs,
    ROWS: gl.constexpr, PAIRS: gl.constexpr, EXTRA: gl.constexpr,
    STAGES: gl.constexpr, BAND: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Tiles of 2 * ROWS rows and PAIRS + EXTRA outputs, one after the other."""
    if CHAINED:  # see launch.begin
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: gl.constexpr = x_rows.dtype
    INPUTS: gl.constexpr = x_rows.block_type.shape[1]
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, INPUTS], SHARED)
    pairs = gl.allocate_shared_memory(dtype, [STAGES, 2 * PAIRS, INPUTS], SHARED)
    results = gl.allocate_shared_memory(dtype, [2, ROWS, PAIRS], out_rows.layout)
    extras, extra_results = pairs, results
    if EXTRA:
        extras = gl.allocate_shared_memory(dtype, [STAGES, 2 * EXTRA, INPUTS], SHARED)
        extra_results = gl.allocate_shared_memory(dtype, [2, ROWS, EXTRA], extra_out_rows.layout)
    # A stage is ready when its tiles are copied, and free when both groups have read them.
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    hopper.fence_async_shared()
    tiles = (x_tiles, pairs, extras)
    outs = (out_rows, extra_out_rows, results, extra_results)
    gl.warp_specialize(
        [
            (_multiply, (tiles, ready, free, outs, num_rows, num_pairs, num_inputs,
                         0, ROWS, PAIRS, EXTRA, STAGES, BAND)),
            (_multiply, (tiles, ready, free, outs, num_rows, num_pairs, num_inputs,
                         1, ROWS, PAIRS, EXTRA, STAGES, BAND)),
            (_copy, (x_rows, pair_rows, extra_rows, tiles, ready, free, num_rows, num_pairs,
                     num_inputs, ROWS, PAIRS, EXTRA, STAGES, BAND)),
        ],
        [4, 1],
        [READER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _num_tiles(num_rows, num_pairs, ROWS: gl.constexpr, PAIRS: gl.constexpr):
    return gl.cdiv(num_rows, ROWS) * gl.cdiv(num_pairs, PAIRS)


@gluon.jit
def _tile_at(
    number, num_rows, num_pairs, ROWS: gl.constexpr, PAIRS: gl.constexpr, BAND: gl.constexpr
):
    """First row and first output of a tile. All outputs of BAND row tiles come one after the other,
    so that tiles that are computed together share rows and pairs in the L2 cache."""
    num_row_tiles, num_columns = gl.cdiv(num_rows, ROWS), gl.cdiv(num_pairs, PAIRS)
    first = number // (BAND * num_columns) * BAND
    size = gl.minimum(num_row_tiles - first, BAND)
    within = number - first * num_columns
    return (first + within % size) * ROWS, within // size * PAIRS


@gluon.jit
def _copy(
    x_rows, pair_rows, extra_rows, tiles, ready, free, num_rows, num_pairs, num_inputs,
    ROWS: gl.constexpr, PAIRS: gl.constexpr, EXTRA: gl.constexpr,
    STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Copy rows and pairs of all tiles of this program; zeros after the last row or pair."""
    x_tiles, pairs, extras = tiles
    INPUTS: gl.constexpr = x_rows.block_type.shape[1]
    BYTES: gl.constexpr = 2 * (ROWS + PAIRS + EXTRA) * INPUTS * x_rows.dtype.primitive_bitwidth // 8
    step = 0
    for number in range(
        gl.program_id(0), _num_tiles(num_rows, num_pairs, 2 * ROWS, PAIRS + EXTRA),
        gl.num_programs(0),
    ):  # fmt: skip
        row, pair = _tile_at(number, num_rows, num_pairs, 2 * ROWS, PAIRS + EXTRA, BAND)
        for k in range(0, num_inputs, INPUTS):
            stage = step % STAGES
            arrived = ready.index(stage)
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
            mbarrier.expect(arrived, BYTES)
            for half in gl.static_range(2):  # rows of each group; gates, then ups
                x_tile = x_tiles.index(stage * 2 + half)
                load_rows(x_rows, [row + half * ROWS, k], arrived, x_tile)
                target = pairs.index(stage).slice(half * PAIRS, PAIRS)
                load_rows(pair_rows, [pair, k + half * num_inputs], arrived, target)
                if EXTRA:
                    target = extras.index(stage).slice(half * EXTRA, EXTRA)
                    load_rows(extra_rows, [pair + PAIRS, k + half * num_inputs], arrived, target)
            step += 1


@gluon.jit
def _multiply(
    tiles, ready, free, outs, num_rows, num_pairs, num_inputs,
    GROUP: gl.constexpr, ROWS: gl.constexpr, PAIRS: gl.constexpr,
    EXTRA: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Compute the rows of one group of all tiles of this program."""
    x_tiles, pairs, extras = tiles
    out_rows, extra_out_rows, results, extra_results = outs
    total = _zeros(ROWS, 2 * PAIRS)
    extra_total = _zeros(ROWS, 2 * EXTRA if EXTRA else 2 * PAIRS)
    step = 0
    for number in range(
        gl.program_id(0), _num_tiles(num_rows, num_pairs, 2 * ROWS, PAIRS + EXTRA),
        gl.num_programs(0),
    ):  # fmt: skip
        for k in range(num_inputs // x_tiles.shape[2]):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x_tile = x_tiles.index(stage * 2 + GROUP)
            pair_tile = pairs.index(stage).permute((1, 0))
            total = hopper.warpgroup_mma(x_tile, pair_tile, total, use_acc=k > 0, is_async=True)
            if EXTRA:
                extra_tile = extras.index(stage).permute((1, 0))
                extra_total = hopper.warpgroup_mma(
                    x_tile, extra_tile, extra_total, use_acc=k > 0, is_async=True
                )
            total, extra_total = _wait(1, total, extra_total, EXTRA)
            # The previous step is done. This one runs while the next one is prepared.
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        total, extra_total = _wait(0, total, extra_total, EXTRA)
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        row, pair = _tile_at(number, num_rows, num_pairs, 2 * ROWS, PAIRS + EXTRA, BAND)
        row += GROUP * ROWS
        tma.store_wait(0)  # the results of the previous tile are read
        _store_gated(total, out_rows, results.index(GROUP), row, pair)
        if EXTRA:
            target = extra_results.index(GROUP)
            _store_gated(extra_total, extra_out_rows, target, row, pair + PAIRS)
    tma.store_wait(0)


@gluon.jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = _layout(COLUMNS, gl.num_warps())
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.constexpr_function
def _layout(columns, num_warps):
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, columns, 16])


@gluon.jit
def _wait(STEPS: gl.constexpr, total, extra_total, EXTRA: gl.constexpr):
    """Wait until no more than STEPS steps of this group are unfinished."""
    if EXTRA:
        total, extra_total = hopper.warpgroup_mma_wait(2 * STEPS, deps=[total, extra_total])
    else:
        total = hopper.warpgroup_mma_wait(STEPS, deps=[total])
    return total, extra_total


@gluon.jit
def _store_gated(total, out_rows, target, row, pair):
    """Gate the sums, and start to copy the results to the output, except rows after the last."""
    ROWS: gl.constexpr = total.shape[0]
    PAIRS: gl.constexpr = total.shape[1] // 2
    gate, up = gl.split(gl.permute(gl.reshape(total, [ROWS, 2, PAIRS]), [0, 2, 1]))
    found = (gate * _sigmoid(gate) * up).to(out_rows.dtype)
    target.store(gl.convert_layout(found, _layout(PAIRS, gl.num_warps())))
    hopper.fence_async_shared()
    store_rows(out_rows, [row, pair], target)


@gluon.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in four instructions: gl.exp and a division take more for tiny numbers."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
