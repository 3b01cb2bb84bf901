"""Attention of many new tokens per sequence over the paged cache: ragged, causal, grouped heads.

The keys and values of every token, including those of this pass, are in the cache before it runs.
It does not know where queries come from, how blocks are allocated, or what follows.

A tile is `tile_rows` queries of one sequence and one key-value head against `tile_keys` positions
at a time. Its rows are the (token, query head) pairs of the group in that order, so that keys and
values are read once for the whole group, and a group of 3 or 7 wastes nothing.

Legend: T tokens, H query heads, G key-value heads, group = H / G, D head size, S sequences,
B blocks, L layers, P positions in a block, R rows of the tables, W blocks in a row of the tables.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.attention.scoring import (
    DEFAULT,
    Scoring,
    finite,
    first_seen,
    sink_scores,
)
from headway.model.kernels.launch import begin, hopper_module, launch_options, launched, power_of_2

hopper_kernel = cache(partial(hopper_module, "attention.prefill_hopper"))  # if it can be used
FEW_ROWS = 16  # up to here memory is the limit, not arithmetic


class PrefillTile(NamedTuple):
    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def prefill_tile(head_dim: int, dtype: torch.dtype, num_rows: int) -> PrefillTile:
    """The tile for this head size and type; `num_rows` is the maximum of (token, head) pairs."""
    is_wide = head_dim > 128
    is_few = num_rows <= FEW_ROWS
    if dtype == torch.float32:  # no tensor cores at full precision: registers are the limit
        return PrefillTile(16 if is_few or is_wide else 32, 32, 8 if is_wide else 4, 2)
    if is_few:
        return PrefillTile(16, 32 if is_wide else 64, 4, 3)
    return PrefillTile(64, 32, 4, 2) if is_wide else PrefillTile(64, 64, 4, 3)


def prefill_attention(
    q_thd: Tensor,
    out_thd: Tensor,
    *,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    starts_s: Tensor,
    ends_s: Tensor,
    longest: int,
    num_tokens: int | None = None,
    counters: Tensor | None = None,
    scoring: Scoring = DEFAULT,
) -> None:
    """Write to out_thd the attention of each query over the tokens up to its own, or those of them
    in its window.

    Sequence s has the rows [starts_s[s], starts_s[s + 1]), the last of its ends_s[s] tokens, and
    row row_ids_s[s] of the tables. No sequence has more than `longest` rows, and all together have
    at most `num_tokens`, or as many as q_thd. Rows before the first sequence and after the last are
    not written. `counters` are zeros before and after, for kernels in which several programs share
    queries; without them, none does.
    """
    (num_rows, num_heads, head_dim), num_sequences = q_thd.shape, len(ends_s)
    num_tokens = num_rows if num_tokens is None else num_tokens
    if num_tokens == 0 or num_sequences == 0:
        return
    kv_heads, block_size = blocks.shape[3:5]
    group = num_heads // kv_heads
    assert q_thd.stride(2) == out_thd.stride(2) == tables.stride(1) == 1, "must be contiguous"
    assert blocks.is_contiguous(), "offsets in a block are computed from its shape"
    hopper = hopper_kernel() if longest * group > FEW_ROWS else None
    is_general = scoring.window is None and scoring.sinks is None
    if hopper is not None and is_general and hopper.supports(q_thd, blocks):
        hopper.prefill_attention_hopper(
            q_thd, out_thd, blocks=blocks, layer=layer, tables=tables, row_ids_s=row_ids_s,
            starts_s=starts_s, ends_s=ends_s, num_tokens=num_tokens, counters=counters,
            scoring=scoring,
        )  # fmt: skip
        return
    shape = prefill_tile(head_dim, q_thd.dtype, longest * group)
    num_slots = num_tokens * group // shape.tile_rows + num_sequences  # enough: see _sequence_at
    _prefill[(num_slots * kv_heads,)](
        q_thd, out_thd, blocks, tables, row_ids_s, starts_s, ends_s, scoring.sinks,
        layer, num_sequences, scoring.scale_for(head_dim),
        q_thd.stride(0), q_thd.stride(1), out_thd.stride(0), out_thd.stride(1),
        tables.stride(0), blocks.stride(0), block_size,
        kv_heads, group, head_dim, power_of_2(head_dim),
        shape.tile_rows, shape.tile_keys, scoring.window,
        **launch_options(shape.num_warps, shape.num_stages),
    )  # fmt: skip


# Not specialized, so that one build serves every layer and every number of sequences.
@launched
@triton.jit(do_not_specialize=["layer", "num_sequences"])
def _prefill(
    q, out, blocks, tables, row_ids_s, starts_s, ends_s, sinks,
    layer, num_sequences, scale,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_ROOM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile: ROWS queries of one sequence and key-value head, over all keys that they see."""
    begin(CHAINED)
    slot, kv_head = tl.program_id(0) // G, tl.program_id(0) % G
    sequence = _sequence_at(slot, starts_s, num_sequences, GROUP, ROWS)
    start, num_cached = tl.load(starts_s + sequence), tl.load(ends_s + sequence)
    row_id = tl.load(row_ids_s + sequence).to(tl.int64)
    num_tokens = tl.load(starts_s + sequence + 1) - start
    order = slot - ((start - tl.load(starts_s)) * GROUP // ROWS + sequence)
    tile = tl.cdiv(num_tokens * GROUP, ROWS) - 1 - order  # the last tile sees the most: it is first
    if tile < 0:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_ROOM)[None, :]
    token, head = (start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    is_held = (row < num_tokens * GROUP)[:, None] & (d < D)
    q_at = token * q_token_stride + head * q_head_stride
    query = tl.load(q + q_at[:, None] + d, mask=is_held, other=0.0)

    num_earlier = num_cached - num_tokens
    all_see = num_earlier + tile * ROWS // GROUP + 1  # positions that all rows of the tile see
    end = tl.minimum(num_cached, num_earlier + (tile * ROWS + ROWS - 1) // GROUP + 1)
    keys = blocks + (layer.to(tl.int64) * 2 * G + kv_head) * BLOCK_SIZE * D
    position = num_earlier + row // GROUP
    position = position if WINDOW is None else tl.minimum(position, end - 1)  # padding sees too
    sink = None if sinks is None else sink_scores(sinks, head, row >= 0)
    found = _attend(
        query, position, keys, tables + row_id * table_stride, sink, all_see, end,
        scale, BLOCK_STRIDE, BLOCK_SIZE, G, D, D_ROOM, ROWS, KEYS, WINDOW,
    )  # fmt: skip
    out_at = token * out_token_stride + head * out_head_stride
    tl.store(out + out_at[:, None] + d, found.to(out.dtype.element_ty), mask=is_held)


@triton.jit
def _sequence_at(slot, starts_s, num_sequences, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sequence to which a slot belongs.

    Sequence s, which starts r rows after the first one, starts at slot r * GROUP // ROWS + s. Up to
    the start of the next sequence there are at least as many slots as s has tiles, and the host
    knows the total number of slots.
    """
    sequence, origin = -1, tl.load(starts_s)
    for base in range(0, num_sequences, 256):
        s = base + tl.arange(0, 256)
        start = tl.load(starts_s + s, mask=s < num_sequences, other=0)
        first = (start - origin) * GROUP // ROWS + s
        sequence += tl.sum(((first <= slot) & (s < num_sequences)).to(tl.int32))
    return sequence


@triton.jit
def _attend(
    query, position, keys, table, sink, all_see, end, scale,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, D_ROOM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention over positions [0, end), each query up to its own; all see `all_see` of them.

    With a window, from the first tile on that the first query sees.
    """
    d = tl.arange(0, D_ROOM)[None, :]
    top = tl.full((ROWS,), -float("inf"), tl.float32) if sink is None else sink
    total = tl.full((ROWS,), 0.0 if sink is None else 1.0, tl.float32)
    mixed = tl.zeros((ROWS, D_ROOM), tl.float32)
    lane = tl.arange(0, KEYS)
    first = first_seen(all_see - 1, WINDOW)
    first_tile = first // KEYS
    index, offset = _home(first_tile, lane, BLOCK_SIZE, KEYS)
    block = tl.load(table + index, mask=lane < end - first_tile * KEYS, other=0)
    for tile in range(first_tile, tl.cdiv(end, KEYS)):
        place = keys + (block.to(tl.int64) * BLOCK_STRIDE + offset * D)[:, None] + d
        left = end - tile * KEYS
        is_key = (lane < left)[:, None] if D == D_ROOM else (lane < left)[:, None] & (d < D)
        if WINDOW is not None:  # tables have no blocks before the window
            is_key &= (lane >= first - tile * KEYS)[:, None]
        # Load the next tile's block numbers one tile ahead, or its key loads would wait for them.
        index, offset = _home(tile + 1, lane, BLOCK_SIZE, KEYS)
        block = tl.load(table + index, mask=lane < left - KEYS, other=0)
        key = tl.load(place, mask=is_key, other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if (tile + 1) * KEYS > all_see:
            seen = lane[None, :] <= (position - tile * KEYS)[:, None]
            score = tl.where(seen, score, -float("inf"))
        if WINDOW is not None:
            score = _in_window(score, lane, position - tile * KEYS, left - 1, WINDOW)
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        base = new_top if WINDOW is None else finite(new_top)  # without one all see position 0
        weight = tl.exp2(score * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, 1)
        value = tl.load(place + G * BLOCK_SIZE * D, mask=is_key, other=0.0).to(query.dtype)
        weight = weight.to(query.dtype)
        mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision="ieee")
        top = new_top
    return mixed / total[:, None]


@triton.jit
def _in_window(score, lane, position, last, WINDOW: tl.constexpr):
    """Scores in the windows of queries at these positions, up to `last`; -inf for the others."""
    if last >= WINDOW:
        score = tl.where(lane[None, :] > (position - WINDOW)[:, None], score, -float("inf"))
    return score


@triton.jit
def _home(tile, lane, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The index in the table, and the offset in that block, of each position of a tile."""
    if KEYS % BLOCK_SIZE == 0:  # then only the index changes from tile to tile
        index = tile * (KEYS // BLOCK_SIZE) + lane // BLOCK_SIZE
        offset = lane % BLOCK_SIZE
    else:
        index = (tile * KEYS + lane) // BLOCK_SIZE
        offset = (tile * KEYS + lane) % BLOCK_SIZE
    return index, offset
