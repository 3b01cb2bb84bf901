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

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2

# Numbers of a token up to which one program computes it. Measured on an H200: with two or more
# programs for each, tokens with fewer numbers wait for programs to start, not for their bytes.
SMALL_TOKEN = 2048


@triton.jit
def _load(at, is_here, HALF: tl.constexpr):
    """Both halves of heads or of a norm's weight."""
    return tl.load(at, mask=is_here, other=0.0), tl.load(at + HALF, mask=is_here, other=0.0)


@triton.jit
def _store(at_hd, a_hd, b_hd, is_here_hd, HALF: tl.constexpr):
    """Both halves of each head, cast to the type of the place."""
    tl.store(at_hd, a_hd.to(at_hd.dtype.element_ty), mask=is_here_hd)
    tl.store(at_hd + HALF, b_hd.to(at_hd.dtype.element_ty), mask=is_here_hd)


@triton.jit
def _normed(x_hd, scale_h, weight_d, dtype: tl.constexpr):
    """Half of each head, scaled and weighted."""
    scaled_hd = (x_hd * scale_h[:, None]).to(dtype).to(tl.float32)
    return (scaled_hd * weight_d[None, :].to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotated(a_hd, b_hd, norm_a_d, norm_b_d, cosine, sine, epsilon, HALF: tl.constexpr):
    """Both halves of each head, normalized unless the norm is None, and rotated unless that is."""
    dtype: tl.constexpr = a_hd.dtype
    pair_d = tl.arange(0, a_hd.shape[1])
    if cosine is not None:
        cosine_d = tl.load(cosine + pair_d, mask=pair_d < HALF, other=0.0)
        sine_d = tl.load(sine + pair_d, mask=pair_d < HALF, other=0.0)
    a_hd, b_hd = a_hd.to(tl.float32), b_hd.to(tl.float32)
    if norm_a_d is not None:
        scale_h = tl.rsqrt(tl.sum(a_hd * a_hd + b_hd * b_hd, axis=1) / (2 * HALF) + epsilon)
        a_hd = _normed(a_hd, scale_h, norm_a_d, dtype)
        b_hd = _normed(b_hd, scale_h, norm_b_d, dtype)
    if cosine is not None:
        turned_a_hd = a_hd * cosine_d[None, :] - b_hd * sine_d[None, :]
        b_hd = b_hd * cosine_d[None, :] + a_hd * sine_d[None, :]
        a_hd = turned_a_hd
    return a_hd.to(dtype), b_hd.to(dtype)


@triton.jit
def _queries(
    row, part, norm, cosine, sine, factor, epsilon,
    H: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """QUERIES query heads of the token at `row`, in place; cosine, sine and factor are its own."""
    pair_d = tl.arange(0, PADDED)
    head_h = part * QUERIES + tl.arange(0, QUERIES)
    is_here_hd = (head_h < H)[:, None] & (pair_d < HALF)[None, :]
    at_hd = row + head_h[:, None] * (2 * HALF) + pair_d[None, :]
    norm_a_d = None
    norm_b_d = None
    if norm is not None:
        norm_a_d, norm_b_d = _load(norm + pair_d, pair_d < HALF, HALF)
    begin(CHAINED)
    a_hd, b_hd = _load(at_hd, is_here_hd, HALF)
    a_hd, b_hd = _rotated(a_hd, b_hd, norm_a_d, norm_b_d, cosine, sine, epsilon, HALF)
    if factor is not None:
        scale = tl.load(factor).to(a_hd.dtype).to(tl.float32)
        a_hd, b_hd = a_hd.to(tl.float32) * scale, b_hd.to(tl.float32) * scale
    _store(at_hd, a_hd, b_hd, is_here_hd, HALF)


@triton.jit
def _keys_and_values(
    row, part, norm, cosine, sine, epsilon, slots, blocks, num_layers, layer,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    KEYS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """KEYS key heads and their values, to the slot at `slots`."""
    pair_d = tl.arange(0, PADDED)
    head_h = part * KEYS + tl.arange(0, KEYS)
    is_here_hd = (head_h < G)[:, None] & (pair_d < HALF)[None, :]
    at_hd = row + (H + head_h)[:, None] * (2 * HALF) + pair_d[None, :]
    norm_a_d = None
    norm_b_d = None
    if norm is not None:
        norm_a_d, norm_b_d = _load(norm + pair_d, pair_d < HALF, HALF)
    begin(CHAINED)
    slot = tl.load(slots).to(tl.int64)
    key_a_hd, key_b_hd = _load(at_hd, is_here_hd, HALF)
    value_a_hd, value_b_hd = _load(at_hd + G * 2 * HALF, is_here_hd, HALF)
    key_a_hd, key_b_hd = _rotated(
        key_a_hd, key_b_hd, norm_a_d, norm_b_d, cosine, sine, epsilon, HALF
    )
    # A mask, not a branch: the compiler would move the loads of the values into the branch.
    num_kept = tl.where(slot >= 0, G, 0)
    is_kept_hd = (head_h < num_kept)[:, None] & (pair_d < HALF)[None, :]
    place_h = ((slot // P * num_layers + layer) * (2 * G) + head_h) * P + slot % P
    home_hd = blocks + place_h[:, None] * (2 * HALF) + pair_d[None, :]
    _store(home_hd, key_a_hd, key_b_hd, is_kept_hd, HALF)
    _store(home_hd + G * P * 2 * HALF, value_a_hd, value_b_hd, is_kept_hd, HALF)


@launched
@triton.jit(do_not_specialize=["layer"])  # one build for all layers
def _rotate_and_store(
    qkv, q_norm, k_norm, cosine_pd, sine_pd, query_scale_p, positions_t, slots_t, blocks,
    qkv_stride, num_layers, layer, epsilon,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One of the PARTS of a token, or a whole token: QUERIES query heads, KEYS key-value heads.

    Positions, like the norms, were final before the embedding, which is not chained: every kernel
    before it has ended.
    """
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    num_q_parts: tl.constexpr = (H + QUERIES - 1) // QUERIES
    row = qkv + token * qkv_stride
    slots = slots_t + token
    cosine = None
    sine = None
    factor = None
    if cosine_pd is not None:
        turn = tl.load(positions_t + token).to(tl.int64) * HALF
        cosine, sine = cosine_pd + turn, sine_pd + turn
    if query_scale_p is not None:
        factor = query_scale_p + tl.load(positions_t + token)
    if PARTS == 1:
        _queries(row, 0, q_norm, cosine, sine, factor, epsilon, H, HALF, PADDED, QUERIES, CHAINED)
        _keys_and_values(
            row, 0, k_norm, cosine, sine, epsilon, slots, blocks, num_layers, layer,
            H, G, P, HALF, PADDED, KEYS, False,
        )  # fmt: skip
    elif part < num_q_parts:
        _queries(
            row, part, q_norm, cosine, sine, factor, epsilon, H, HALF, PADDED, QUERIES, CHAINED
        )
    else:
        _keys_and_values(
            row, part - num_q_parts, k_norm, cosine, sine, epsilon, slots, blocks, num_layers, layer,
            H, G, P, HALF, PADDED, KEYS, CHAINED,
        )  # fmt: skip


def rotate_and_store(
    qkv: Tensor,  # [T, (H + 2 G) * D]: query heads, key heads, value heads
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    epsilon: float,
    cosine_pd: Tensor | None,  # [positions, D / 2] float32; None: heads are not rotated
    sine_pd: Tensor | None,
    positions_t: Tensor,
    slots_t: Tensor,  # block * P + offset to store at; negative: nowhere
    blocks: Tensor,  # [B, L, 2, G, P, D]
    layer: int,
    query_scale_p: Tensor | None = None,  # [positions] float32: the factor of queries
) -> None:
    """Normalize (if given) and rotate q in place; store k, transformed alike, and v in their slots."""
    if len(qkv) == 0:
        return
    _, num_layers, _, _, block_size, head_size = blocks.shape
    assert qkv.stride(1) == 1, "a token's heads must be contiguous"
    assert blocks.is_contiguous(), "blocks must be contiguous"
    tables = cosine_pd, sine_pd, query_scale_p
    assert all(each is None or each.is_contiguous() for each in tables), "must be contiguous"
    padded = power_of_2(head_size // 2)
    queries, keys, num_parts = _parts(num_heads, num_kv_heads, head_size)
    num_warps = max(max(queries, 16) * padded // 256, 1)
    _rotate_and_store[(len(qkv) * num_parts,)](
        qkv, q_norm, k_norm, *tables, positions_t, slots_t, blocks,
        qkv.stride(0), num_layers, layer, epsilon,
        H=num_heads, G=num_kv_heads, P=block_size, HALF=head_size // 2, PADDED=padded,
        QUERIES=queries, KEYS=keys, PARTS=num_parts,
        **launch_options(num_warps, 1),
    )  # fmt: skip


def _parts(num_heads: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """Query heads and key heads of a program, and programs of a token."""
    queries, keys = power_of_2(num_heads), power_of_2(num_kv_heads)
    if (num_heads + 2 * num_kv_heads) * head_size <= SMALL_TOKEN:
        return queries, keys, 1
    most = max(16, 1024 // power_of_2(head_size // 2))  # a thread has a wide load of each half
    queries, keys = min(queries, most), min(keys, most // 2)
    return queries, keys, ceil_div(num_heads, queries) + ceil_div(num_kv_heads, keys)
