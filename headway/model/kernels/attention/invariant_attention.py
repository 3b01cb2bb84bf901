"""Attention whose result for a token depends only on that token and those before it, bit for bit.

Positions are divided into splits that start at multiples of SPLIT. The softmax of a split is
computed on its own, in tiles that start at multiples of KEYS, and the splits of a sequence are
joined in order, after the sinks. Positions before a window add zeros to it. Other rows, the tokens of a prompt that are computed together, and the programs
that share a sequence do not change this order. One kernel computes decodes and chunks of prompts.

This needs one property of the device: an element of a product of tiles depends only on its own row
and column, not on the size of the tile or on its other elements. The weights of a softmax are
therefore added by a product too, because the order of a plain sum depends on the tile.

The keys and values of every token, including those of this pass, are in the cache before it runs.

Legend: T tokens, H query heads, G key-value heads, group = H / G, D head size, S sequences,
C splits of the longest sequence; blocks are [B, L, 2, G, P, D], tables [R, W].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.attention.decode import PartialAttention
from headway.model.kernels.attention.prefill import _sequence_at
from headway.model.kernels.attention.scoring import DEFAULT, Scoring, first_seen, sink_scores
from headway.model.kernels.attention.split_softmax import block_numbers, joined, with_tile
from headway.model.kernels.attention.splits import MANY, MIN_SPLITS, split_for
from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2

SPLIT = 128  # positions of a split
KEYS = 32  # positions of a tile
PREFILL_ROWS, PREFILL_WARPS = 64, 4  # of a tile of prompts
MAX_PARTIAL_BYTES = 256 * 2**20  # of partial results; with more, one program computes a sequence


@triton.jit
def _num_tiles(end, first, SPLIT: tl.constexpr, KEYS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The number of tiles in [0, end) of a program that has split `first`, which is not empty."""
    last = (end - 1) // SPLIT
    is_last = (last - first) % PROGRAMS == 0
    num_last = tl.where(is_last, tl.cdiv(end - last * SPLIT, KEYS), SPLIT // KEYS)
    return (last - first) // PROGRAMS * (SPLIT // KEYS) + num_last


@launched
@triton.jit(do_not_specialize=["layer", "num_sequences"])
def _attend(
    q, out, sums, tops, weights, blocks, tables, row_ids_s, starts_s, ends_s, sinks,
    layer, num_sequences, scale,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_ROOM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STEP: tl.constexpr, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    IS_DECODE: tl.constexpr, WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """ROWS (token, head) pairs of one sequence and key-value head, over every PROGRAMS-th split.

    A decode is the only token of its sequence; `ends_s` then has positions. A tile has KEYS
    positions, which are loaded in one or two steps. With a window, splits are counted from the
    first one that the first row sees.
    """
    first, kv_head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin(CHAINED)
    if IS_DECODE:
        sequence, start, num_tokens, tile = slot, slot, 1, 0
        num_cached = tl.load(ends_s + sequence).to(tl.int32) + 1
    else:
        sequence = _sequence_at(slot, starts_s, num_sequences, GROUP, ROWS)
        start, num_cached = tl.load(starts_s + sequence), tl.load(ends_s + sequence)
        num_tokens = tl.load(starts_s + sequence + 1) - start
        order = slot - ((start - tl.load(starts_s)) * GROUP // ROWS + sequence)
        tile = tl.cdiv(num_tokens * GROUP, ROWS) - 1 - order  # the last tile, the longest, first
    num_earlier = num_cached - num_tokens
    end = tl.minimum(num_cached, num_earlier + (tile * ROWS + ROWS - 1) // GROUP + 1)
    begin_at = None if WINDOW is None else first_seen(num_earlier + tile * ROWS // GROUP, WINDOW)
    lead = 0 if WINDOW is None else begin_at // SPLIT
    # Tiles of the first split that are before the window.
    skip = 0 if WINDOW is None else tl.where(first == 0, begin_at % SPLIT // KEYS, 0)
    first += lead
    is_idle = first * SPLIT >= end
    if not IS_DECODE:
        is_idle |= tile < 0
    if is_idle:
        return
    row, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, D_ROOM)[None, :]
    token, head = (start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    is_row, position = row < num_tokens * GROUP, num_earlier + row // GROUP
    position = position if WINDOW is None else tl.minimum(position, end - 1)  # padding sees too
    is_held = is_row[:, None] & (d < D)
    q_at = token * q_token_stride + head * q_head_stride
    query = tl.load(q + q_at[:, None] + d, mask=is_held, other=0.0)
    keys = blocks + (layer.to(tl.int64) * 2 * G + kv_head) * BLOCK_SIZE * D
    table = tables + tl.load(row_ids_s + sequence).to(tl.int64) * table_stride
    all_top, all_weight = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    all_total = tl.zeros((ROWS, D_ROOM), tl.float32)
    if sinks is not None and PROGRAMS == 1:
        all_top, all_weight = sink_scores(sinks, head, is_row), all_weight + 1.0
    # Of the current split; the weights in eight equal columns, the smallest tile.
    top, total = tl.full((ROWS,), -float("inf"), tl.float32), all_total
    weights_8 = tl.zeros((ROWS, 8), tl.float32)
    at, num_tiles = first * SPLIT + skip * KEYS, _num_tiles(end, first, SPLIT, KEYS, PROGRAMS)
    number = block_numbers(table, at, end, BLOCK_SIZE, STEP)
    number_2 = block_numbers(table, at + KEYS - STEP, end, BLOCK_SIZE, STEP)
    for index in range(skip, num_tiles):
        is_done = (index + 1) % (SPLIT // KEYS) == 0
        next_at = at + KEYS + tl.where(is_done, (PROGRAMS - 1) * SPLIT, 0)
        # One tile ahead: key loads can start early only if their block numbers are known.
        next_number = block_numbers(table, next_at, end, BLOCK_SIZE, STEP)
        next_number_2 = block_numbers(table, next_at + KEYS - STEP, end, BLOCK_SIZE, STEP)
        top, weights_8, total = with_tile(
            top, weights_8, total, query, position, keys, number, number_2, at, begin_at, end,
            scale, BLOCK_STRIDE, BLOCK_SIZE, G, D, D_ROOM, KEYS, STEP, WINDOW,
        )  # fmt: skip
        if is_done | (index + 1 == num_tiles):
            weight = tl.max(weights_8, 1)
            if PROGRAMS == 1:
                all_top, all_weight, all_total = joined(
                    all_top, all_weight, all_total, top, weight, total, WINDOW
                )
            else:
                place = (token * (G * GROUP) + head) * MAX_SPLITS + at // SPLIT - lead
                tl.store(sums + place[:, None] * D + d, total, mask=is_held)
                tl.store(tops + place, top, mask=is_row)
                tl.store(weights + place, weight, mask=is_row)
            top = tl.full((ROWS,), -float("inf"), tl.float32)
            weights_8 = tl.zeros((ROWS, 8), tl.float32)
            total = tl.zeros((ROWS, D_ROOM), tl.float32)
        at, number, number_2 = next_at, next_number, next_number_2
    if PROGRAMS == 1:
        out_at = token * out_token_stride + head * out_head_stride
        found = (all_total / all_weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + d, found, mask=is_held)


@launched
@triton.jit
def _join(
    out, sums, tops, weights, positions_s, sinks, out_token_stride, out_head_stride,
    D: tl.constexpr, D_ROOM: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Join the splits of one decode and query head, in order."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    begin(CHAINED)
    position = tl.load(positions_s + sequence).to(tl.int32)
    num_splits = position // SPLIT + 1 - first_seen(position, WINDOW) // SPLIT
    row, d = tl.arange(0, 1), tl.arange(0, D_ROOM)[None, :]
    top = tl.full((1,), -float("inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    if sinks is not None:
        top, weight = sink_scores(sinks, head + row, row == 0), weight + 1.0
    total = tl.zeros((1, D_ROOM), tl.float32)
    place = (sequence * tl.num_programs(0) + head) * MAX_SPLITS + row
    for split in range(num_splits):
        at = place + split
        next_total = tl.load(sums + at[:, None] * D + d, mask=d < D, other=0.0)
        top, weight, total = joined(
            top, weight, total, tl.load(tops + at), tl.load(weights + at), next_total, WINDOW
        )
    home = sequence.to(tl.int64) * out_token_stride + head * out_head_stride + row[:, None] + d
    tl.store(out + home, (total / weight[:, None]).to(out.dtype.element_ty), mask=d < D)


def invariant_decode_attention(
    q_shd: Tensor,
    out_shd: Tensor,
    *,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    positions_s: Tensor,
    num_splits: int = 1,
    num_programs: int | None = None,
    scoring: Scoring = DEFAULT,
) -> None:
    """Write to out_shd the attention of each sequence's token over all up to its position.

    `num_splits` (see splits.choose_num_splits) and `num_programs`, the programs that share a
    sequence, change only the speed.
    """
    num_sequences, num_heads, head_dim = q_shd.shape
    if num_sequences == 0:
        return
    kv_heads, block_size = blocks.shape[3:5]
    max_splits = ceil_div(tables.shape[1] * block_size, SPLIT)
    if scoring.window is not None:  # it may start and end in the middle of a split
        max_splits = min(max_splits, ceil_div(scoring.window - 1, SPLIT) + 1)
    if num_programs is None:
        shape, row_bytes = (num_sequences, num_heads, kv_heads), head_dim * blocks.element_size()
        num_programs = _num_programs(shape, head_dim, row_bytes, num_splits, max_splits)
    num_programs, parts = min(num_programs, max_splits), None
    if num_programs > 1:
        shape = num_sequences, num_heads, max_splits
        parts = PartialAttention.allocate(shape, head_dim, blocks.device)
    _launch(
        (num_programs, kv_heads, num_sequences), max(16, power_of_2(num_heads // kv_heads)), 1,
        q_shd, out_shd, parts, blocks, layer, tables, row_ids_s, None, positions_s, max_splits,
        scoring,
    )  # fmt: skip
    if parts is not None:
        _join[(num_heads, num_sequences)](
            out_shd, *parts, positions_s, scoring.sinks,
            out_shd.stride(0), out_shd.stride(1), head_dim, power_of_2(head_dim),
            SPLIT, max_splits, scoring.window, **launch_options(1, 2, fuses=False),
        )  # fmt: skip


def _num_programs(
    shape: tuple[int, int, int], head_dim: int, row_bytes: int, num_splits: int, max_splits: int
) -> int:
    """The programs that share a sequence; `shape` has sequences, heads and key-value heads."""
    num_sequences, num_heads, kv_heads = shape
    if num_sequences * kv_heads < MANY:
        num_splits = max(num_splits, MIN_SPLITS)
    split = split_for(num_sequences * kv_heads, num_splits, max_splits * SPLIT, row_bytes)
    num_bytes = num_sequences * num_heads * max_splits * head_dim * 4
    is_shared = split.num_splits > 1 and num_bytes <= MAX_PARTIAL_BYTES
    # Twice as many, because whole splits are not equal shares.
    return 2 * split.num_splits if is_shared else 1


def num_partials(
    shape: tuple[int, int, int], head_dim: int, row_bytes: int, num_splits: int, max_positions: int
) -> int:
    """The partial results of a launch, one for each sequence, head and split."""
    max_splits = ceil_div(max_positions, SPLIT)
    num_programs = _num_programs(shape, head_dim, row_bytes, num_splits, max_splits)
    return shape[0] * shape[1] * max_splits if min(num_programs, max_splits) > 1 else 0


def invariant_prefill_attention(
    q_thd: Tensor,
    out_thd: Tensor,
    *,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    starts_s: Tensor,
    ends_s: Tensor,
    scoring: Scoring = DEFAULT,
) -> None:
    """Like prefill.prefill_attention, and like invariant_decode_attention for each token."""
    (num_tokens, num_heads, _), num_sequences = q_thd.shape, len(ends_s)
    if num_tokens == 0 or num_sequences == 0:
        return
    kv_heads, rows = blocks.shape[3], PREFILL_ROWS
    num_slots = num_tokens * (num_heads // kv_heads) // rows + num_sequences  # see _sequence_at
    _launch(
        (1, kv_heads, num_slots), rows, PREFILL_WARPS, q_thd, out_thd, None, blocks, layer, tables,
        row_ids_s, starts_s, ends_s, 1, scoring,
    )  # fmt: skip


def _launch(
    grid: tuple[int, int, int],
    rows: int,
    num_warps: int,
    q_thd: Tensor,
    out_thd: Tensor,
    parts: PartialAttention | None,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    starts_s: Tensor | None,
    ends_s: Tensor,
    max_splits: int,
    scoring: Scoring,
) -> None:
    (_, num_heads, head_dim), (kv_heads, block_size) = q_thd.shape, blocks.shape[3:5]
    assert q_thd.stride(2) == out_thd.stride(2) == tables.stride(1) == 1, "must be contiguous"
    assert blocks.is_contiguous(), "offsets in a block are computed from its shape"
    buffers = parts or (None, None, None)
    dim_room = power_of_2(head_dim)
    num_stages = 3 if dim_room * q_thd.element_size() <= 256 else 2
    _attend[grid](
        q_thd, out_thd, *buffers, blocks, tables, row_ids_s, starts_s, ends_s,
        scoring.sinks, layer, len(row_ids_s), scoring.scale_for(head_dim),
        q_thd.stride(0), q_thd.stride(1), out_thd.stride(0), out_thd.stride(1), tables.stride(0),
        blocks.stride(0), block_size, kv_heads, num_heads // kv_heads, head_dim, dim_room,
        rows, KEYS, KEYS // 2 if starts_s is None else KEYS, SPLIT, grid[0], max_splits,
        starts_s is None, scoring.window,
        **launch_options(num_warps, num_stages, fuses=False),
    )  # fmt: skip
