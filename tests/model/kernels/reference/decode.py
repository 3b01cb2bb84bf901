"""Reference of kernels/attention/decode.py in plain torch, one sequence at a time.

Shapes: S sequences, H query heads, G key-value heads, D head size, P positions in a block; blocks
are [B, L, 2, G, P, D], tables [R, W].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.model.kernels.attention.scoring import DEFAULT, Scoring
from tests.model.kernels.reference.prefill import attended, cached
from tests.model.kernels.reference.rotary import rotate_and_store

if TYPE_CHECKING:
    from headway.model.kernels.attention.decode import HeadTransform


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
    split: object = None,
    scoring: Scoring = DEFAULT,
) -> None:
    """Write [S, H * D] to `out`: each sequence's token at `positions_s` over all up to itself.

    With `transform` the token is new: it is rotated, and stored in `slots_s` (negative: not stored,
    but the token always sees itself). Without, queries and cache are ready.
    """
    head_dim = blocks.shape[-1]
    new: Tensor | None = None
    if transform is not None and slots_s is not None:
        qkv, new = _rotated(qkv, num_heads, blocks, positions_s, transform)
        _store(new, slots_s, blocks, layer)
    for s, (row_id, position) in enumerate(
        zip(row_ids_s.tolist(), positions_s.tolist(), strict=True)
    ):
        num_cached = position if new is not None else position + 1
        keys_ngd, values_ngd = cached(blocks, layer, tables[row_id], num_cached)
        if new is not None:
            keys_ngd, values_ngd = (
                torch.cat((held, own[None]))
                for held, own in zip((keys_ngd, values_ngd), new[s], strict=True)
            )
        q_1hd = qkv[s, : num_heads * head_dim].view(1, num_heads, head_dim)
        out[s] = attended(q_1hd, keys_ngd, values_ngd, scoring).flatten().to(out.dtype)


def _rotated(
    qkv: Tensor, num_heads: int, blocks: Tensor, positions_s: Tensor, transform: HeadTransform
) -> tuple[Tensor, Tensor]:
    """Rows with rotated queries, and [S, 2, G, D]: keys and values as the cache stores them."""
    _, _, _, num_kv_heads, _, head_dim = blocks.shape
    rows = qkv.clone()
    own = blocks.new_empty((len(qkv), 1, 2, num_kv_heads, 1, head_dim))  # one block per token
    rotate_and_store(
        rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=transform.q_norm,
        k_norm=transform.k_norm,
        epsilon=transform.epsilon,
        cosine_pd=transform.cosine_pd,
        sine_pd=transform.sine_pd,
        positions_t=positions_s,
        slots_t=torch.arange(len(qkv), device=qkv.device),
        blocks=own,
        layer=0,
    )
    if transform.query_scale_p is not None:
        rows[:, : num_heads * head_dim] *= transform.query_scale_p[positions_s, None]
    return rows, own[:, 0, :, :, 0]


def _store(new: Tensor, slots_s: Tensor, blocks: Tensor, layer: int) -> None:
    """Store keys and values in their slots, except where the slot is negative."""
    rows = (slots_s >= 0).nonzero().squeeze(1)
    block, offset = slots_s[rows] // blocks.shape[4], slots_s[rows] % blocks.shape[4]
    blocks[block, layer, :, :, offset] = new[rows]
