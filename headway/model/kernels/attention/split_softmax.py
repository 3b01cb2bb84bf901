"""The softmax of a split of positions, tile by tile, in one order of summation.

For invariant_attention.py, which says what this order is for. A row of a tile is a query.

Legend as there: D head size, G key-value heads; KEYS positions of a tile, STEP loaded at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.model.kernels.attention.scoring import finite


@triton.jit
def block_numbers(table, at, end, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr):
    """The block numbers of positions [at, at + STEP); one if they are in one block."""
    place = at if BLOCK_SIZE % STEP == 0 else at + tl.arange(0, STEP)
    return tl.load(table + place // BLOCK_SIZE, mask=place < end, other=0).to(tl.int64)


@triton.jit
def _keys_and_values(
    keys, number, at, begin, end, dtype: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_ROOM: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Those of positions [at, at + STEP); zeros from `end` on, and before `begin` with a window."""
    lane, d = tl.arange(0, STEP), tl.arange(0, D_ROOM)[None, :]
    if BLOCK_SIZE % STEP == 0:  # contiguous: little arithmetic
        place = number * BLOCK_STRIDE + at % BLOCK_SIZE * D + (lane[:, None] * D + d)
    else:
        place = (number * BLOCK_STRIDE + (at + lane) % BLOCK_SIZE * D)[:, None] + d
    is_key = (lane < end - at)[:, None] & (d < D)
    if begin is not None:
        is_key &= (lane >= begin - at)[:, None]
    key = tl.load(keys + place, mask=is_key, other=0.0)
    value = tl.load(keys + G * BLOCK_SIZE * D + place, mask=is_key, other=0.0)
    return key.to(dtype), value.to(dtype)


@triton.jit
def _scores(query, key, position, at, scale, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """A row sees positions up to its own, or those of them in its window."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    lane = (at + tl.arange(0, STEP))[None, :]
    seen = lane <= position[:, None]
    if WINDOW is not None:
        seen &= lane > (position - WINDOW)[:, None]
    return tl.where(seen, score, -float("inf"))


@triton.jit
def _added(weights, total, score, base, value):
    """The sum of weights and the weighted values, each with those of one step."""
    weight = tl.exp2(score - base[:, None]).to(value.dtype)
    ones = tl.full((value.shape[0], weights.shape[1]), 1.0, value.dtype)
    weights = tl.dot(weight, ones, weights, input_precision="ieee")
    return weights, tl.dot(weight, value, total, input_precision="ieee")


@triton.jit
def with_tile(
    top, weights, total, query, position, keys, number, number_2, at, begin, end, scale,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    D_ROOM: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the KEYS positions from `at` on, in one or two steps, to what a split has found."""
    key, value = _keys_and_values(
        keys, number, at, begin, end, query.dtype, BLOCK_STRIDE, BLOCK_SIZE, G, D, D_ROOM, STEP
    )
    score = _scores(query, key, position, at, scale, STEP, WINDOW)
    new_top = tl.maximum(top, tl.max(score, 1))
    if STEP < KEYS:
        at += STEP
        key, value_2 = _keys_and_values(
            keys, number_2, at, begin, end, query.dtype, BLOCK_STRIDE, BLOCK_SIZE, G, D, D_ROOM,
            STEP,
        )  # fmt: skip
        score_2 = _scores(query, key, position, at, scale, STEP, WINDOW)
        new_top = tl.maximum(new_top, tl.max(score_2, 1))
    base = finite(new_top)  # of a row that sees nothing: zeros
    fade = tl.exp2(top - base)[:, None]
    weights, total = _added(weights * fade, total * fade, score, base, value)
    if STEP < KEYS:
        weights, total = _added(weights, total, score_2, base, value_2)
    return new_top, weights, total


@triton.jit
def joined(top, weight, total, next_top, next_weight, next_total, WINDOW: tl.constexpr):
    """Join what was found so far with the next split; with a window, both may have seen nothing."""
    new_top = tl.maximum(top, next_top)
    base = new_top if WINDOW is None else finite(new_top)
    share, next_share = tl.exp2(top - base), tl.exp2(next_top - base)
    weight = weight * share + next_weight * next_share
    return new_top, weight, total * share[:, None] + next_total * next_share[:, None]
