"""Head norms, rotary embeddings and the store of keys and values: one launch over q, k and v.

A program computes a few query heads of one token, or a few key heads and their values. Queries and
keys are normalized (if the model has norm weights) and rotated. Queries are written back. Keys and
values are written to the token's cache slot only, where attention reads them. Knows slots, not
sequences or block tables, and not how the cosine tables were made.

Rounding: the norm as in norm.py, then the rotation in float32, rounded once. The cache holds that
rounded value, cast to the cache's type; a value too large for 8 bits saturates.

Legend: T tokens, H query heads, G key-value heads, D head size, B blocks, L layers, P positions in
a block, p rows of the rotary tables; in the kernel h heads of a program, d half a head.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import (
    begin,
    ceil_div,
    launch_options,
    launched,
    power_of_2,
)

MAX_QUERIES = 16  # heads per program: a thread has one wide load of each half
MAX_KEYS = 8  # key heads per program, which has as many value heads


@triton.jit
def _load(at_hd, is_here_hd, HALF: tl.constexpr):
    """Both halves of each head."""
    a_hd = tl.load(at_hd, mask=is_here_hd, other=0.0)
    return a_hd, tl.load(at_hd + HALF, mask=is_here_hd, other=0.0)


@triton.jit
def _store(at_hd, a_hd, b_hd, is_here_hd, HALF: tl.constexpr):
    """Both halves of each head, cast to the type of the place."""
    tl.store(at_hd, a_hd.to(at_hd.dtype.element_ty), mask=is_here_hd)
    tl.store(at_hd + HALF, b_hd.to(at_hd.dtype.element_ty), mask=is_here_hd)


@triton.jit
def _normed(x_hd, scale_h, weight, HALF: tl.constexpr, dtype: tl.constexpr):
    """Half of each head, scaled and weighted."""
    pair_d = tl.arange(0, x_hd.shape[1])
    weight_d = tl.load(weight + pair_d, mask=pair_d < HALF, other=0.0).to(tl.float32)
    scaled_hd = (x_hd * scale_h[:, None]).to(dtype).to(tl.float32)
    return (scaled_hd * weight_d[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _rotated(a_hd, b_hd, norm, cosine_pd, sine_pd, position, epsilon, HALF: tl.constexpr):
    """Both halves of each head, normalized unless the norm is None, and rotated."""
    dtype: tl.constexpr = a_hd.dtype
    pair_d = tl.arange(0, a_hd.shape[1])
    cosine_d = tl.load(cosine_pd + position * HALF + pair_d, mask=pair_d < HALF, other=0.0)
    sine_d = tl.load(sine_pd + position * HALF + pair_d, mask=pair_d < HALF, other=0.0)
    a_hd, b_hd = a_hd.to(tl.float32), b_hd.to(tl.float32)
    if norm is not None:
        scale_h = tl.rsqrt(tl.sum(a_hd * a_hd + b_hd * b_hd, axis=1) / (2 * HALF) + epsilon)
        a_hd = _normed(a_hd, scale_h, norm, HALF, dtype)
        b_hd = _normed(b_hd, scale_h, norm + HALF, HALF, dtype)
    turned_a_hd = a_hd * cosine_d[None, :] - b_hd * sine_d[None, :]
    turned_b_hd = b_hd * cosine_d[None, :] + a_hd * sine_d[None, :]
    return turned_a_hd.to(dtype), turned_b_hd.to(dtype)


@launched
@triton.jit(do_not_specialize=["layer"])  # one build for all layers
def _rotate_and_store(
    qkv, q_norm, k_norm, cosine_pd, sine_pd, positions_t, slots_t, blocks,
    qkv_stride, num_layers, layer, epsilon,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """QUERIES query heads of one token, or KEYS key heads and their values."""
    begin(CHAINED)
    num_q_parts: tl.constexpr = (H + QUERIES - 1) // QUERIES
    num_parts: tl.constexpr = num_q_parts + (G + KEYS - 1) // KEYS
    token = (tl.program_id(0) // num_parts).to(tl.int64)
    part = tl.program_id(0) % num_parts
    position = tl.load(positions_t + token).to(tl.int64)
    row = qkv + token * qkv_stride
    pair_d = tl.arange(0, PADDED)
    if part < num_q_parts:
        q_h = part * QUERIES + tl.arange(0, QUERIES)
        is_q_hd = (q_h < H)[:, None] & (pair_d < HALF)[None, :]
        q_hd = row + q_h[:, None] * (2 * HALF) + pair_d[None, :]
        q_a_hd, q_b_hd = _load(q_hd, is_q_hd, HALF)
        q_a_hd, q_b_hd = _rotated(
            q_a_hd, q_b_hd, q_norm, cosine_pd, sine_pd, position, epsilon, HALF
        )
        _store(q_hd, q_a_hd, q_b_hd, is_q_hd, HALF)
    else:
        slot = tl.load(slots_t + token).to(tl.int64)
        k_h = (part - num_q_parts) * KEYS + tl.arange(0, KEYS)
        is_k_hd = (k_h < G)[:, None] & (pair_d < HALF)[None, :]
        k_hd = row + (H + k_h)[:, None] * (2 * HALF) + pair_d[None, :]
        k_a_hd, k_b_hd = _load(k_hd, is_k_hd, HALF)
        v_a_hd, v_b_hd = _load(k_hd + G * 2 * HALF, is_k_hd, HALF)
        k_a_hd, k_b_hd = _rotated(
            k_a_hd, k_b_hd, k_norm, cosine_pd, sine_pd, position, epsilon, HALF
        )
        if slot >= 0:
            place_h = ((slot // P * num_layers + layer) * (2 * G) + k_h) * P + slot % P
            home_hd = blocks + place_h[:, None] * (2 * HALF) + pair_d[None, :]
            _store(home_hd, k_a_hd, k_b_hd, is_k_hd, HALF)
            _store(home_hd + G * P * 2 * HALF, v_a_hd, v_b_hd, is_k_hd, HALF)


def rotate_and_store(
    qkv: Tensor,  # [T, (H + 2 G) * D]: query heads, key heads, value heads
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    epsilon: float,
    cosine_pd: Tensor,  # [positions, D / 2] float32
    sine_pd: Tensor,
    positions_t: Tensor,
    slots_t: Tensor,  # block * P + offset to store at; negative: nowhere
    blocks: Tensor,  # [B, L, 2, G, P, D]
    layer: int,
) -> None:
    """Normalize (if given) and rotate q in place; store k, transformed alike, and v in their slots."""
    if len(qkv) == 0:
        return
    _, num_layers, _, _, block_size, head_size = blocks.shape
    assert qkv.stride(1) == 1, "a token's heads must be contiguous"
    assert blocks.is_contiguous(), "blocks must be contiguous"
    assert cosine_pd.is_contiguous() and sine_pd.is_contiguous(), "tables must be contiguous"
    padded = power_of_2(head_size // 2)
    queries, keys = min(power_of_2(num_heads), MAX_QUERIES), min(power_of_2(num_kv_heads), MAX_KEYS)
    num_parts = ceil_div(num_heads, queries) + ceil_div(num_kv_heads, keys)
    _rotate_and_store[(len(qkv) * num_parts,)](
        qkv, q_norm, k_norm, cosine_pd, sine_pd, positions_t, slots_t, blocks,
        qkv.stride(0), num_layers, layer, epsilon,
        H=num_heads, G=num_kv_heads, P=block_size, HALF=head_size // 2, PADDED=padded,
        QUERIES=queries, KEYS=keys, **launch_options(_num_warps(padded), 1),
    )  # fmt: skip


def _num_warps(padded: int) -> int:
    """A thread holds 8 pairs of queries: one wide load of each half."""
    return max(MAX_QUERIES * padded // 256, 1)
