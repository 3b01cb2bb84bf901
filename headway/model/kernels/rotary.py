"""Head norms, rotary embeddings and the store of keys and values: one launch over q, k and v.

A program computes a few heads of one token. Queries and keys are normalized (if the model has norm
weights), rotated and written back; keys and values are also stored in the token's cache slot. Knows
slots, not sequences or block tables, and not how the cosine tables were made.

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

PIECE = 16  # heads per program, so that the rotary tables are a small part of what it reads


@triton.jit
def _normed(x_hd, scale_h, is_meant_h, weight, HALF: tl.constexpr, dtype: tl.constexpr):
    """Half of each head, scaled and weighted if `is_meant_h`; other heads are unchanged."""
    pair_d = tl.arange(0, x_hd.shape[1])
    weight_d = tl.load(weight + pair_d, mask=pair_d < HALF, other=0.0).to(tl.float32)
    scaled_hd = (x_hd * scale_h[:, None]).to(dtype).to(tl.float32)
    weighted_hd = (scaled_hd * weight_d[None, :]).to(dtype).to(tl.float32)
    return tl.where(is_meant_h[:, None], weighted_hd, x_hd)


@launched
@triton.jit(do_not_specialize=["layer"])  # one build for all layers
def _rotate_and_store(
    qkv, q_norm, k_norm, cosine_pd, sine_pd, positions_t, slots_t, blocks,
    qkv_stride, num_layers, layer, epsilon,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, PIECE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PIECE of the H + 2 G heads of one token; a norm that is None is skipped."""
    begin(CHAINED)
    dtype = qkv.dtype.element_ty
    num_pieces: tl.constexpr = (H + 2 * G + PIECE - 1) // PIECE
    token = (tl.program_id(0) // num_pieces).to(tl.int64)
    head_h = (tl.program_id(0) % num_pieces) * PIECE + tl.arange(0, PIECE)
    pair_d = tl.arange(0, PADDED)
    is_pair_d = pair_d < HALF
    is_here_hd = (head_h < H + 2 * G)[:, None] & is_pair_d[None, :]

    # Loads that do not depend on the position are issued before those that do.
    position = tl.load(positions_t + token).to(tl.int64)
    slot = tl.load(slots_t + token).to(tl.int64)
    at_hd = qkv + token * qkv_stride + head_h[:, None] * (2 * HALF) + pair_d[None, :]
    a_hd = tl.load(at_hd, mask=is_here_hd, other=0.0).to(tl.float32)
    b_hd = tl.load(at_hd + HALF, mask=is_here_hd, other=0.0).to(tl.float32)
    cosine_d = tl.load(cosine_pd + position * HALF + pair_d, mask=is_pair_d, other=0.0)
    sine_d = tl.load(sine_pd + position * HALF + pair_d, mask=is_pair_d, other=0.0)

    scale_h = tl.rsqrt(tl.sum(a_hd * a_hd + b_hd * b_hd, axis=1) / (2 * HALF) + epsilon)
    if q_norm is not None:
        a_hd = _normed(a_hd, scale_h, head_h < H, q_norm, HALF, dtype)
        b_hd = _normed(b_hd, scale_h, head_h < H, q_norm + HALF, HALF, dtype)
    if k_norm is not None:
        is_key_h = (head_h >= H) & (head_h < H + G)
        a_hd = _normed(a_hd, scale_h, is_key_h, k_norm, HALF, dtype)
        b_hd = _normed(b_hd, scale_h, is_key_h, k_norm + HALF, HALF, dtype)

    is_turned_hd = is_here_hd & (head_h < H + G)[:, None]
    turned_a_hd = a_hd * cosine_d[None, :] - b_hd * sine_d[None, :]
    turned_b_hd = b_hd * cosine_d[None, :] + a_hd * sine_d[None, :]
    a_hd = tl.where(is_turned_hd, turned_a_hd, a_hd).to(dtype)
    b_hd = tl.where(is_turned_hd, turned_b_hd, b_hd).to(dtype)
    tl.store(at_hd, a_hd, mask=is_turned_hd)
    tl.store(at_hd + HALF, b_hd, mask=is_turned_hd)

    if slot >= 0:
        # In a block, as in a row, values follow keys, so one offset from the first key serves both.
        row_h = (slot // P * num_layers + layer) * (2 * G) + (head_h - H)
        home_hd = blocks + ((row_h * P + slot % P) * (2 * HALF))[:, None] + pair_d[None, :]
        is_stored_hd = is_here_hd & (head_h >= H)[:, None]
        tl.store(home_hd, a_hd.to(blocks.dtype.element_ty), mask=is_stored_hd)
        tl.store(home_hd + HALF, b_hd.to(blocks.dtype.element_ty), mask=is_stored_hd)


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
    """Normalize (if given) and rotate q and k in place; store k and v in their slots."""
    if len(qkv) == 0:
        return
    _, num_layers, _, _, block_size, head_size = blocks.shape
    assert qkv.stride(1) == 1, "a token's heads must be contiguous"
    assert blocks.is_contiguous(), "blocks must be contiguous"
    assert cosine_pd.is_contiguous() and sine_pd.is_contiguous(), "tables must be contiguous"
    padded = power_of_2(head_size // 2)
    num_pieces = ceil_div(num_heads + 2 * num_kv_heads, PIECE)
    _rotate_and_store[(len(qkv) * num_pieces,)](
        qkv, q_norm, k_norm, cosine_pd, sine_pd, positions_t, slots_t, blocks,
        qkv.stride(0), num_layers, layer, epsilon,
        H=num_heads, G=num_kv_heads, P=block_size, HALF=head_size // 2,
        PADDED=padded, PIECE=PIECE, **launch_options(_num_warps(padded), 1),
    )  # fmt: skip


def _num_warps(padded: int) -> int:
    """A thread holds 8 pairs: one wide load of each half."""
    return max(PIECE * padded // 256, 1)
