"""Attention of one new token per sequence, for many sequences, over their blocks.

The same launch normalizes and rotates the new token's queries and key, and stores its key and
value, unless this was done before. A program computes one sequence, one key-value head and all its
query heads, so that each key is read once. If sequences are few or long, several programs split a
sequence, and a second, small kernel combines their results.

Shapes: S sequences, H query heads, G key-value heads, D head size, C splits of a sequence; blocks
are [B, L, 2, G, P, D], tables [R, W].
"""

from __future__ import annotations

from dataclasses import dataclass
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
from headway.model.kernels.attention.splits import DecodeSplit, split_for
from headway.model.kernels.launch import begin, launch_options, launched, power_of_2


class PartialAttention(NamedTuple):
    """The partial results of the programs that split a sequence."""

    sums: Tensor  # [S, H, C, D] float32
    tops: Tensor  # [S, H, C] float32: the maximum score, to base 2
    weights: Tensor  # [S, H, C] float32: the sum of exp2(score - top)

    @staticmethod
    def allocate(
        shape: tuple[int, int, int], head_dim: int, device: torch.device
    ) -> PartialAttention:
        sums = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        return PartialAttention(
            sums, *(torch.empty(shape, dtype=torch.float32, device=device) for _ in "tw")
        )


@triton.jit
def _weighted(x, norm, is_inside, dtype: tl.constexpr):
    """Round to the type and multiply by the norm's weight, as in torch."""
    weight = tl.load(norm, mask=is_inside, other=0.0).to(tl.float32)
    return (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    place, norm, cosine, sine, d, is_inside, epsilon, D: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads [.., D] at `place`, normalized and rotated, rounded; d, cosine and sine are [1, D].

    Without a cosine they are not rotated.
    """
    half: tl.constexpr = D // 2
    dtype: tl.constexpr = place.dtype.element_ty
    other = tl.where(d < half, d + half, d - half)
    x = tl.load(place + d, mask=is_inside, other=0.0).to(tl.float32)
    y = tl.load(place + other, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        x = _weighted(x * rms, norm + d, d < D, dtype)
        y = _weighted(y * rms, norm + other, d < D, dtype)
    if cosine is not None:
        x = x * cosine + tl.where(d < half, -y, y) * sine
    return x.to(dtype)


@triton.jit
def _numbers(table, at, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block numbers of the tile at position `at`; one number if no tile spans two blocks.

    Tiles are aligned to position 0, whichever position a program starts at.
    """
    place = at if BLOCK_SIZE % TILE == 0 else at + tl.arange(0, TILE)
    return tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0)


@triton.jit
def _tile(
    keys, values, numbers, at, first, end, d, block_stride,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The keys and values of the tile at position `at`, whose block numbers are `numbers`.

    `first` is the start of a window, or None. Keys outside are read as well, from some block: skipping them would be slower.
    """
    p = tl.arange(0, TILE)
    is_cached = _is_seen(p, at, first, end)[:, None]
    if BLOCK_SIZE % TILE == 0:  # contiguous: little arithmetic
        home = numbers.to(tl.int64) * block_stride + (at % BLOCK_SIZE) * D
        inside = p[:, None] * D + d
    else:
        home = (numbers.to(tl.int64) * block_stride + ((at + p) % BLOCK_SIZE) * D)[:, None]
        inside = d
    if d.shape[1] == D:
        k = tl.load(keys + home + inside)
        v = tl.load(values + home + inside, mask=is_cached, other=0.0)
    else:
        k = tl.load(keys + home + inside, mask=d < D, other=0.0)
        v = tl.load(values + home + inside, mask=is_cached & (d < D), other=0.0)
    return k, v


@triton.jit
def _is_seen(p, at, first, end):
    """Which positions at + p are before the end, and in the window if there is one."""
    return p < end - at if first is None else (p < end - at) & (p >= first - at)


@triton.jit
def _with_tile(q, k, v, top, weight, total, at, first, end, scale, TILE: tl.constexpr):
    """Add a tile to the maximum score, the weights and the weighted values; masks what is beyond
    the end or before the window."""
    is_cached = _is_seen(tl.arange(0, TILE), at, first, end)[None, :]
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    scores = tl.where(is_cached, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)
    scores = tl.exp2(scores - new_top[:, None])
    weight = weight * fade + tl.sum(scores, 1)
    total = tl.dot(scores.to(q.dtype), v.to(q.dtype), total * fade[:, None], input_precision="ieee")
    return new_top, weight, total


@triton.jit
def _with_sinks(top, weight, total, sinks, head, is_here):
    """Add the sinks of these heads, if there are any, to what is here."""
    if sinks is not None:
        sink = sink_scores(sinks, head, is_here)
        new_top = tl.maximum(top, sink)
        fade, share = tl.exp2(top - finite(new_top)), tl.exp2(sink - finite(new_top))
        top, weight, total = new_top, weight * fade + share, total * fade[:, None]
    return top, weight, total


@triton.jit
def _scaled(q, query_scale_p, position):
    """Queries times the factor of their position, if there are factors; rounded."""
    if query_scale_p is not None:
        factor = tl.load(query_scale_p + position).to(q.dtype).to(tl.float32)
        q = (q.to(tl.float32) * factor).to(q.dtype)
    return q


@triton.jit
def _over_cache(
    q, keys, values, table, numbers, top, weight, total, start, first, end, d, scale, block_stride,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the positions in [start, end) that are seen; `numbers` are the block numbers of the first tile."""
    for at in range(start, end, TILE):
        k, v = _tile(keys, values, numbers, at, first, end, d, block_stride, D, BLOCK_SIZE, TILE)
        # One tile ahead: key loads can start early only if their block numbers are known.
        numbers = _numbers(table, at + TILE, end, BLOCK_SIZE, TILE)
        top, weight, total = _with_tile(q, k, v, top, weight, total, at, first, end, scale, TILE)
    return top, weight, total


@triton.jit
def _positions_per_split(
    num_cached, SPLITS: tl.constexpr, MIN_POSITIONS: tl.constexpr, TILE: tl.constexpr
):
    """Positions per program of a sequence."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_cached, SPLITS), TILE) * TILE, MIN_POSITIONS)


@launched
@triton.jit(do_not_specialize=["layer"])
def _attend(
    qkv, q_norm, k_norm, cosine_pd, sine_pd, query_scale_p, positions_s, slots_s, sinks,
    blocks, tables, row_ids_s, out, sums, tops, weights,
    layer, epsilon, scale, qkv_stride, out_stride, block_stride, layer_stride, table_width,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_ROOM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_POSITIONS: tl.constexpr,
    IS_NEW: tl.constexpr, IS_EARLY: tl.constexpr, HAS_NORM: tl.constexpr, WINDOW: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One split of one sequence and one key-value head; split 0 also has the new token, and sinks.

    Splits divide the positions from the first tile of the window on.

    Positions, slots, block tables and, if the token is new, all cached tokens were final before the
    embedding, which is not chained. So they are read while the previous kernel still runs: of the
    tokens only those of the first tile, if IS_EARLY.
    """
    group: tl.constexpr = H // G
    split_id, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_s + sequence).to(tl.int32)
    num_cached = position if IS_NEW else position + 1
    first = None if WINDOW is None else first_seen(position, WINDOW)
    lead = 0 if WINDOW is None else first // TILE * TILE
    num_positions = (
        _positions_per_split(num_cached - lead, SPLITS, MIN_POSITIONS, TILE)
        if SPLITS > 1
        else num_cached
    )
    start = lead + split_id * num_positions
    end = tl.minimum(num_cached, start + num_positions)
    table = tables + tl.load(row_ids_s + sequence).to(tl.int64) * table_width
    numbers = _numbers(table, start, end, BLOCK_SIZE, TILE)
    d = tl.arange(0, D_ROOM)[None, :]
    keys = blocks + layer.to(tl.int64) * layer_stride + kv_head * (BLOCK_SIZE * D)
    values = keys + G * BLOCK_SIZE * D
    if IS_NEW:
        angle = position * (D // 2) + tl.where(d < D // 2, d, d - D // 2)
        cosine = None if cosine_pd is None else tl.load(cosine_pd + angle, mask=d < D, other=0.0)
        sine = None if sine_pd is None else tl.load(sine_pd + angle, mask=d < D, other=0.0)
        slot = tl.load(slots_s + sequence).to(tl.int64)
    if IS_EARLY:
        k, v = _tile(keys, values, numbers, start, first, end, d, block_stride, D, BLOCK_SIZE, TILE)
    begin(CHAINED)
    if (split_id > 0) & (start >= num_cached):
        return
    head = tl.arange(0, HEADS)[:, None]
    is_head = (head < group) & (d < D)
    row = qkv + sequence.to(tl.int64) * qkv_stride
    q_place = row + (kv_head * group + head) * D
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, D_ROOM), tl.float32)
    if IS_NEW:
        q = _rotated(q_place, q_norm, cosine, sine, d, is_head, epsilon, D, HAS_NORM)
        q = _scaled(q, query_scale_p, position)
        if split_id == 0:
            k_place = row + (H + kv_head) * D + tl.zeros((1, 1), tl.int32)
            k_new = _rotated(k_place, k_norm, cosine, sine, d, d < D, epsilon, D, HAS_NORM)
            k_new = k_new.to(blocks.dtype.element_ty)
            v_new = tl.load(row + (H + G + kv_head) * D + d, mask=d < D, other=0.0)
            v_new = v_new.to(blocks.dtype.element_ty)
            if slot >= 0:
                home = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * D + d
                tl.store(keys + home, k_new, mask=d < D)
                tl.store(values + home, v_new, mask=d < D)
            # The new token comes first, rounded as it will be read from the cache later.
            top = tl.sum(q.to(tl.float32) * k_new.to(q.dtype).to(tl.float32), 1) * scale
            weight += 1.0
            total += v_new.to(q.dtype).to(tl.float32)
    else:
        q = tl.load(q_place + d, mask=is_head, other=0.0)
    own = tl.arange(0, HEADS)
    top, weight, total = _with_sinks(
        top, weight, total, sinks, kv_head * group + own, (own < group) & (split_id == 0)
    )
    if IS_EARLY:
        top, weight, total = _with_tile(q, k, v, top, weight, total, start, first, end, scale, TILE)
        start += TILE
        numbers = _numbers(table, start, end, BLOCK_SIZE, TILE)
    top, weight, total = _over_cache(
        q, keys, values, table, numbers, top, weight, total,
        start, first, end, d, scale, block_stride, D, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if SPLITS == 1:
        home = out + sequence.to(tl.int64) * out_stride + (kv_head * group + head) * D + d
        tl.store(home, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_head)
    else:
        is_here = tl.arange(0, HEADS) < group
        place = (sequence * H + kv_head * group + tl.arange(0, HEADS)) * SPLITS + split_id
        tl.store(sums + place[:, None] * D + d, total, mask=is_head)
        tl.store(tops + place, top, mask=is_here)
        tl.store(weights + place, weight, mask=is_here)


@launched
@triton.jit
def _join(
    out, sums, tops, weights, positions_s, out_stride,
    D: tl.constexpr, D_ROOM: tl.constexpr, SPLITS: tl.constexpr, MIN_POSITIONS: tl.constexpr,
    TILE: tl.constexpr, IS_NEW: tl.constexpr, WINDOW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Combine all splits of one sequence and query head."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_s + sequence).to(tl.int32)
    begin(CHAINED)
    num_cached = position if IS_NEW else position + 1
    num_cached -= first_seen(position, WINDOW) // TILE * TILE
    num_splits = tl.maximum(
        tl.cdiv(num_cached, _positions_per_split(num_cached, SPLITS, MIN_POSITIONS, TILE)), 1
    )
    c, d = tl.arange(0, SPLITS), tl.arange(0, D_ROOM)
    place = (sequence * tl.num_programs(0) + head) * SPLITS + c
    tops_c = tl.load(tops + place, mask=c < num_splits, other=-float("inf"))
    weights_c = tl.load(weights + place, mask=c < num_splits, other=0.0)
    shares = tl.exp2(tops_c - tl.max(tops_c, 0))
    is_inside = (c[:, None] < num_splits) & (d[None, :] < D)
    found = tl.load(sums + place[:, None] * D + d[None, :], mask=is_inside, other=0.0)
    total = tl.sum(found * shares[:, None], 0) / tl.sum(weights_c * shares, 0)
    home = sequence.to(tl.int64) * out_stride + head * D + d
    tl.store(out + home, total.to(out.dtype.element_ty), mask=d < D)


@dataclass(frozen=True, slots=True, eq=False)
class HeadTransform:
    """The norms and rotation of a new token's heads; either both norms are given or neither."""

    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    epsilon: float
    cosine_pd: Tensor | None  # float32 [positions, D / 2]; None: heads are not rotated
    sine_pd: Tensor | None
    query_scale_p: Tensor | None = None  # float32 [positions]: the factor of queries


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    row_ids_s: Tensor,
    positions_s: Tensor,
    slots_s: Tensor | None = None,
    transform: HeadTransform | None = None,
    num_splits: int = 1,
    split: DecodeSplit | None = None,
    scoring: Scoring = DEFAULT,
) -> None:
    """Write [S, H * D] to `out`: each sequence's token at `positions_s` over all up to itself.

    With a window only over the latest of them; other entries of the tables are not used.

    With `transform` the token is new: it is rotated, and stored in `slots_s` (negative: not stored,
    but the token always sees itself). Without, queries and cache are ready. `num_splits` changes
    only how the work is split, and so the speed: see splits.choose_num_splits.
    """
    _, _, _, num_kv_heads, block_size, head_dim = blocks.shape
    num_sequences = len(row_ids_s)
    if not num_sequences:
        return
    dim_room, is_new = power_of_2(head_dim), transform is not None
    max_positions, row_bytes = tables.shape[1] * block_size, dim_room * blocks.element_size()
    if scoring.window is not None:
        max_positions = min(max_positions, scoring.window)
    split = split or split_for(num_sequences * num_kv_heads, num_splits, max_positions, row_bytes)
    assert split.min_positions % split.tile == 0, "a program must start at the start of a tile"
    partials: tuple[Tensor | None, ...] = (None, None, None)
    if split.num_splits > 1:
        shape = num_sequences, num_heads, split.num_splits
        partials = PartialAttention.allocate(shape, head_dim, blocks.device)
    inputs: tuple[Tensor | None, ...] = (None,) * 5
    if transform is not None:
        norms, rope = (transform.q_norm, transform.k_norm), (transform.cosine_pd, transform.sine_pd)
        inputs = (*norms, *rope, transform.query_scale_p)
    has_norm, epsilon = inputs[0] is not None, transform.epsilon if transform else 0.0
    heads_room = max(16, power_of_2(num_heads // num_kv_heads))
    _attend[(split.num_splits, num_kv_heads, num_sequences)](
        qkv, *inputs, positions_s, slots_s, scoring.sinks, blocks, tables, row_ids_s, out, *partials,
        layer, epsilon, scoring.scale_for(head_dim), qkv.stride(0), out.stride(0),
        blocks.stride(0), blocks.stride(1), tables.shape[1],
        num_heads, num_kv_heads, head_dim, dim_room, heads_room, block_size,
        split.tile, split.num_splits, split.min_positions, is_new, is_new and split.warps > 1, has_norm,
        scoring.window,
        **launch_options(split.warps, split.stages, fuses=False),
    )  # fmt: skip
    if split.num_splits > 1:
        _join[(num_heads, num_sequences)](
            out, *partials, positions_s, out.stride(0), head_dim, dim_room,
            split.num_splits, split.min_positions, split.tile, is_new, scoring.window,
            **launch_options(2, 1, fuses=False),
        )  # fmt: skip
