"""Attention of many new tokens per sequence on Hopper GPUs, in Gluon; see prefill.py for the task.

A program has three groups of warps. One copies tiles of keys and values to shared memory, as far
ahead as there is room; see hopper_ring.py. The two others compute half of the rows each: while the
tensor cores multiply the next queries with keys and the previous weights with values, the other
units compute the softmax in between.

If tiles of queries are few, as in the rest of a long prompt, several programs share a tile, each
over a part of the keys; see split_tiles.py.

Legend: as in prefill.py.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from headway.model.kernels.attention.scoring import DEFAULT, Scoring
from headway.model.kernels.attention.split_tiles import (
    PADDING,
    SPLITS,
    join_parts,
    part_of,
    place_of,
    shared_sums,
    store_part,
)
from headway.model.kernels.attention.splits import MAX_TILE_ROWS, prefill_splits
from headway.model.kernels.hopper_ring import (
    SHARED,
    block_numbers,
    copy_tile,
    describe_rows,
    make_ring,
    set_free,
    wait_for,
)
from headway.model.kernels.launch import ceil_div, launch_options, launched
from headway.model.kernels.products.tiles import device_limits

ROWS, KEYS, STAGES = MAX_TILE_ROWS, 128, 2  # rows and positions of a tile, and tiles in a ring
# Triton 3.6 and later versions have different names.
load_numbers = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
SPARE = 4  # prompts beyond the first whose programs still start before those of empty slots
LOADER_REGISTERS = gl.constexpr(40)
READER_REGISTERS = gl.constexpr(232)


def supports(q_thd: Tensor, blocks: Tensor) -> bool:
    """Whether the kernel can read these types and sizes."""
    block_size, head_dim = blocks.shape[4:]
    return (
        q_thd.dtype == blocks.dtype
        and q_thd.dtype in (torch.bfloat16, torch.float16)
        and head_dim == 128  # with 64, exponentials are the limit, and prefill.py is as fast
        and q_thd.stride(0) % 16 == 0  # for copies of 16 bytes
        and block_size % 16 == 0
        and (KEYS % block_size == 0 or block_size % KEYS == 0)
        and blocks.numel() // head_dim < 2**31
    )


def prefill_attention_hopper(
    q_thd: Tensor,
    out_thd: Tensor,
    *,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    starts_s: Tensor,
    ends_s: Tensor,
    num_tokens: int,
    counters: Tensor | None = None,
    scoring: Scoring = DEFAULT,
) -> None:
    """Like prefill_attention, for what `supports` accepts, without a window or sinks."""
    (_, num_heads, head_dim), num_sequences = q_thd.shape, len(ends_s)
    kv_heads, block_size = blocks.shape[3:5]
    group = num_heads // kv_heads
    num_tiles = ceil_div(num_tokens * group, ROWS) * kv_heads
    most = 2 if num_tiles >= 2 * device_limits()[0] else 1  # tiles of a program
    num_slots = num_tokens * group // (most * ROWS) + num_sequences  # enough: see _tiles
    num_splits = prefill_splits(num_tiles, device_limits()[0])
    num_first = min(num_tokens * group // (most * ROWS) + SPARE, num_slots)
    if counters is None or num_first * kv_heads > len(counters):
        num_splits, counters = 1, ends_s  # not used
    num_sums = num_tokens * num_heads if num_splits > 1 else 0
    num_programs = (num_slots + num_first * (num_splits - 1)) * kv_heads
    _prefill_hopper[(num_programs,)](
        q_thd, out_thd, describe_rows(blocks, KEYS), tables, row_ids_s, starts_s, ends_s,
        shared_sums(num_sums, head_dim, q_thd.device), counters,
        layer, num_sequences, most, num_slots, num_first, num_splits, scoring.scale_for(head_dim),
        q_thd.stride(0), q_thd.stride(1), out_thd.stride(0), out_thd.stride(1), tables.stride(0),
        blocks.stride(0) // head_dim, block_size, kv_heads, group, head_dim, ROWS, KEYS, STAGES,
        **launch_options(num_warps=4, num_stages=1),
    )  # fmt: skip


# Not specialized, so that one build serves every layer and every number of sequences.
@launched
@gluon.jit(
    do_not_specialize=["layer", "num_sequences", "most", "num_slots", "num_first", "num_splits"]
)
def _prefill_hopper(
    q, out, cache_rows, tables, row_ids_s, starts_s, ends_s, sums, counters,
    layer, num_sequences, most, num_slots, num_first, num_splits, scale,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    G: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Up to two tiles of one sequence and key-value head, over all keys that their rows see, or one
    tile over a part of them."""
    if CHAINED:  # see launch.begin
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # One head after the other, so that programs that run together read the same keys and values.
    # All parts of the first slots, and then the slots that are empty unless prompts are many.
    rest = gl.program_id(0) - num_first * G * num_splits
    at, width = gl.program_id(0), num_first
    if rest >= 0:
        at, width = rest, num_slots - num_first
    slot, kv_head, split = at % width, at // width % G, at // (width * G)
    slot += gl.where(rest >= 0, num_first, 0)
    sequence, start, num_rows, num_earlier, low, high = _tiles(
        slot, starts_s, ends_s, num_sequences, most, GROUP, ROWS
    )
    most_parts = gl.where(slot + high < num_first, num_splits, 1)  # slot + high is the last slot
    num_parts, first_key, end_key = part_of(
        split, most_parts, num_earlier, num_earlier + num_rows // GROUP, KEYS
    )
    if (low > high) | (split >= num_parts):
        return
    table = tables + gl.load(row_ids_s + sequence).to(gl.int64) * table_stride

    dtype: gl.constexpr = q.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [4, ROWS // 2, D], SHARED)
    keys = make_ring(dtype, KEYS, D, STAGES)
    values = make_ring(dtype, KEYS, D, STAGES)
    cleared = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(2):
        mbarrier.init(cleared.index(each), count=2)
    hopper.fence_async_shared()
    q += start.to(gl.int64) * q_token_stride + kv_head * GROUP * q_head_stride
    out += start.to(gl.int64) * out_token_stride + kv_head * GROUP * out_head_stride
    strides = (q_token_stride, q_head_stride, out_token_stride, out_head_stride)
    row = (layer * 2 * G + kv_head) * BLOCK_SIZE
    # Positions are counted from the first key of the part from here on.
    pair = (low, high, num_rows, num_earlier - first_key, end_key - first_key)
    place = ((start - gl.load(starts_s)) * G + kv_head) * GROUP  # of row 0 in the shared sums
    sums += place * (SPLITS * (D + PADDING))
    shared = (sums + split * (D + PADDING), num_parts > 1)
    gl.warp_specialize(
        [
            (_attend_pair, (q, out, strides, pair, shared, queries, keys, values, cleared, scale,
                            0, G, GROUP, ROWS, KEYS, D, STAGES)),
            (_attend_pair, (q, out, strides, pair, shared, queries, keys, values, cleared, scale,
                            1, G, GROUP, ROWS, KEYS, D, STAGES)),
            (_copy_pair, (cache_rows, table, row, first_key, pair, keys, values,
                          BLOCK_ROWS, BLOCK_SIZE, G, GROUP, ROWS, KEYS, D, STAGES)),
        ],
        [4, 1],
        [READER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
    if num_parts > 1:
        join_parts(
            sums, counters + slot * G + kv_head, num_parts, out, out_token_stride, out_head_stride,
            low * ROWS, num_rows, G, GROUP, ROWS, D,
        )  # fmt: skip


@gluon.jit
def _tiles(slot, starts_s, ends_s, num_sequences, most, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """The tiles of a slot: one, or an early and a late one of a sequence, so that all slots of a
    sequence take equally long. The late one is before the early one if the slot is empty. See
    prefill._sequence_at for slots; here a slot has up to `most` tiles.
    """
    sequence = _sequence_at(slot, starts_s, num_sequences, most * ROWS, GROUP)
    start, num_cached = gl.load(starts_s + sequence), gl.load(ends_s + sequence)
    num_tokens = gl.load(starts_s + sequence + 1) - start
    num_rows, first = num_tokens * GROUP, (start - gl.load(starts_s)) * GROUP // (most * ROWS)
    order = slot - (first + sequence)
    high = gl.cdiv(num_rows, ROWS) - 1 - order  # late tiles first: they see the most
    low = gl.where(most == 1, gl.maximum(high, 0), order)
    return sequence, start, num_rows, num_cached - num_tokens, low, high


@gluon.jit
def _end(tile, num_rows, num_earlier, num_keys, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """The number of keys of a part that the last row of a tile sees."""
    last = num_earlier + (gl.minimum((tile + 1) * ROWS, num_rows) - 1) // GROUP
    return gl.minimum(last + 1, num_keys)


@gluon.jit
def _sequence_at(slot, starts_s, num_sequences, rows, GROUP: gl.constexpr):
    """The sequence to which a slot belongs, if slots have `rows` rows; as in prefill.py."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    sequence, origin = -1, gl.load(starts_s)
    for base in range(0, num_sequences, 256):
        s = base + gl.arange(0, 256, layout)
        start = gl.load(starts_s + s, mask=s < num_sequences, other=0)
        first = (start - origin) * GROUP // rows + s
        sequence += gl.sum(((first <= slot) & (s < num_sequences)).to(gl.int32), 0)
    return sequence


@gluon.jit
def _copy_pair(
    cache_rows, table, row, first_key, pair, keys, values,
    BLOCK_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values that both tiles see; `row` is that of the keys of block 0."""
    low, high, num_rows, num_earlier, num_keys = pair
    num_copied = 0
    for tile in range(low, high + 1, gl.maximum(high - low, 1)):
        end = first_key + _end(tile, num_rows, num_earlier, num_keys, GROUP, ROWS)
        last = gl.maximum(end - 1, 0) // BLOCK_SIZE
        numbers = block_numbers(table, first_key, last, BLOCK_SIZE, KEYS)
        for place in range(first_key, end, KEYS):
            # Load the next block numbers now, or their copies would wait for them.
            following = block_numbers(table, place + KEYS, last, BLOCK_SIZE, KEYS)
            at = row + place % BLOCK_SIZE
            copy_tile(
                cache_rows, numbers, keys, num_copied, at,
                BLOCK_ROWS, BLOCK_SIZE, KEYS, D, STAGES,
            )  # fmt: skip
            copy_tile(
                cache_rows, numbers, values, num_copied, at + G * BLOCK_SIZE,
                BLOCK_ROWS, BLOCK_SIZE, KEYS, D, STAGES,
            )  # fmt: skip
            numbers, num_copied = following, num_copied + 1


@gluon.jit
def _attend_pair(
    q, out, strides, pair, shared, queries, keys, values, cleared, scale,
    HALF: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of one half of the rows of each tile."""
    q_token_stride, q_head_stride, out_token_stride, out_head_stride = strides
    low, high, num_rows, num_earlier, num_keys = pair
    SIZE: gl.constexpr = ROWS // 2
    for each in gl.static_range(2):  # the second is copied while the first is computed
        first = gl.maximum(low if each == 0 else high, 0) * ROWS + HALF * SIZE
        _copy_queries(
            q, q_token_stride, q_head_stride, queries.index(2 * HALF + each), first, num_rows,
            GROUP, SIZE, D,
        )  # fmt: skip
    async_copy.wait_group(1)
    hopper.fence_async_shared()
    each, num_read = 0, 0
    for tile in range(low, high + 1, gl.maximum(high - low, 1)):
        end = _end(tile, num_rows, num_earlier, num_keys, GROUP, ROWS)
        if end > 0:  # padding may have rows without a position
            _attend(
                out, out_token_stride, out_head_stride, shared, queries.index(2 * HALF + each),
                keys, values, cleared.index(each), num_read, tile * ROWS + HALF * SIZE, num_rows,
                num_earlier, end, scale, HALF, G, GROUP, SIZE, KEYS, D, STAGES,
            )  # fmt: skip
        each, num_read = 1, num_read + gl.cdiv(gl.maximum(end, 0), KEYS)
        async_copy.wait_group(0)
        hopper.fence_async_shared()


@gluon.jit
def _copy_queries(
    q, token_stride, head_stride, queries, first, num_rows,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start to copy rows from `first` on; rows after the last are not copied, and never stored."""
    layout: gl.constexpr = _rows_layout(D, gl.num_warps())
    at, is_row = _row_places(first, num_rows, token_stride, head_stride, GROUP, ROWS, D, layout)
    load_numbers(queries, q + at, mask=is_row)
    async_copy.commit_group()


@gluon.jit
def _row_places(
    first, num_rows, token_stride, head_stride,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Offsets of the numbers of rows from `first` on, and which rows there are."""
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = (row // GROUP).to(gl.int64) * token_stride + row % GROUP * head_stride
    return at[:, None] + d[None, :], (row < num_rows)[:, None]


@gluon.jit
def _attend(
    out, out_token_stride, out_head_stride, shared, queries, keys, values, cleared, num_read,
    first, num_rows, num_earlier, end, scale,
    HALF: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of ROWS rows from `first` on; `out` points to row 0 of the sequence and head."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, KEYS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    position = num_earlier + (first + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))) // GROUP
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, score_layout))
    mixed = gl.zeros([ROWS, D], gl.float32, out_layout)
    score = _scores(queries, keys, num_read, score_layout, STAGES)
    score = hopper.warpgroup_mma_wait(0, deps=[score])
    set_free(keys, num_read, STAGES)
    score = _masked(score, position)
    weight, top, total, _ = _softmax(score, top, total, scale)
    weight = gl.convert_layout(weight.to(queries.dtype), gl.DotOperandLayout(0, out_layout, 2))
    num_tiles = gl.cdiv(end, KEYS)
    num_whole = (num_earlier + first // GROUP + 1) // KEYS  # tiles that all rows see
    for tile in range(1, gl.minimum(num_whole, num_tiles)):
        weight, top, total, mixed = _step(
            num_read + tile, queries, keys, values, weight, top, total, mixed, position, scale,
            False, STAGES,
        )  # fmt: skip
    for tile in range(gl.maximum(num_whole, 1), num_tiles):
        weight, top, total, mixed = _step(
            num_read + tile, queries, keys, values, weight, top, total, mixed, position - tile * KEYS,
            scale, True, STAGES,
        )  # fmt: skip
    last = num_read + num_tiles - 1
    left = num_earlier + num_rows // GROUP - (num_tiles - 1) * KEYS
    if left < KEYS:
        _clear_rest(wait_for(values, last, STAGES), left, cleared, HALF, KEYS, D)
    mixed = _add_values(weight, values, last, mixed, STAGES)
    mixed = hopper.warpgroup_mma_wait(0, deps=[mixed])
    set_free(values, last, STAGES)

    sums, is_part = shared
    if is_part:
        row = first + gl.arange(0, ROWS, gl.SliceLayout(1, out_layout))
        top = gl.convert_layout(top, gl.SliceLayout(1, out_layout))
        total = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
        store_part(sums, place_of(row, G, GROUP), row < num_rows, mixed, top, total)
    else:
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))
        queries.store((mixed * share[:, None]).to(queries.dtype))  # no longer needed for themselves
        _store_rows(
            queries, out, out_token_stride, out_head_stride, first, num_rows, GROUP, ROWS, D
        )


@gluon.jit
def _store_rows(
    rows, out, token_stride, head_stride, first, num_rows,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Store rows from `first` on, whole rows at a time; the layout of products has parts of them."""
    layout: gl.constexpr = _rows_layout(D, gl.num_warps())
    at, is_row = _row_places(first, num_rows, token_stride, head_stride, GROUP, ROWS, D, layout)
    gl.store(out + at, rows.load(layout), mask=is_row)


@gluon.jit
def _step(
    tile, queries, keys, values, weight, top, total, mixed, position, scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the previous tile's values, and compute the weights of this tile meanwhile."""
    score_layout: gl.constexpr = position.type.layout.parent
    out_layout: gl.constexpr = mixed.type.layout
    weight_layout: gl.constexpr = weight.type.layout
    score = _scores(queries, keys, tile, score_layout, STAGES)
    mixed = _add_values(weight, values, tile - 1, mixed, STAGES)
    score = hopper.warpgroup_mma_wait(1, deps=[score])
    set_free(keys, tile, STAGES)
    if MASKED:
        score = _masked(score, position)
    next_weight, top, total, fade = _softmax(score, top, total, scale)
    wait_for(values, tile - 1, STAGES)  # they are here: this only keeps the softmax before the wait
    mixed, weight = hopper.warpgroup_mma_wait(0, deps=[mixed, weight])
    set_free(values, tile - 1, STAGES)
    mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, out_layout))[:, None]
    return gl.convert_layout(next_weight.to(queries.dtype), weight_layout), top, total, mixed


@gluon.jit
def _scores(queries, keys, tile, layout: gl.constexpr, STAGES: gl.constexpr):
    """Start the product of queries and keys."""
    tile_keys = wait_for(keys, tile, STAGES)
    SHAPE: gl.constexpr = [queries.shape[0], tile_keys.shape[0]]
    zeros = gl.zeros(SHAPE, gl.float32, layout)
    return hopper.warpgroup_mma(
        queries, tile_keys.permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _add_values(weight, values, tile, mixed, STAGES: gl.constexpr):
    """Start the addition of the product of weights and values."""
    return hopper.warpgroup_mma(weight, wait_for(values, tile, STAGES), mixed, is_async=True)


@gluon.jit
def _masked(score, position):
    """Scores of the first keys of a tile up to each row's position in it; -inf for the others."""
    lane = gl.arange(0, score.shape[1], gl.SliceLayout(0, score.type.layout))
    return gl.where(lane[None, :] <= position[:, None], score, -float("inf"))


@gluon.jit
def _softmax(score, top, total, scale):
    """Weights, the new maximum and sum, and the factor of what was added up before."""
    new_top = gl.maximum(top, gl.max(score, 1) * scale)  # finite: all rows see position 0
    weight = gl.exp2(score * scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    return weight, new_top, total * fade + gl.sum(weight, 1), fade


@gluon.jit
def _clear_rest(
    tile_values, left, cleared, HALF: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr
):
    """Set the values after the sequence to zero: what an earlier owner left may not be finite, and
    then a weight of zero would not remove it. Each group of warps does this for a half of the tile,
    and then waits for the other group."""
    PART: gl.constexpr = 32
    layout: gl.constexpr = _rows_layout(D, gl.num_warps())
    lane = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(HALF, KEYS // PART, 2):
        rows = tile_values.slice(part * PART, PART)
        found = rows.load(layout)
        rows.store(gl.where((lane < left - part * PART)[:, None], found, 0.0))
    hopper.fence_async_shared()
    mbarrier.arrive(cleared)
    mbarrier.wait(cleared, 0)


@gluon.constexpr_function
def _rows_layout(head_dim, num_warps):
    """Threads that read or write 16 bytes of a row each."""
    lanes = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])
