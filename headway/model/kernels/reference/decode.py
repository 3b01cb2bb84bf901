"""Attention of one new token for each sequence, one sequence at a time: what the kernel must equal.

Shapes: S sequences, H query heads, G key-value heads, D head size, P positions in a block; blocks
are [B, L, 2, G, P, D], tables [R, W].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.model.kernels.reference.prefill import attended, cached
from headway.model.kernels.reference.rotary import rotate_and_store

if TYPE_CHECKING:  # the kernels' own file needs Triton
    from headway.model.kernels.decode import Turn


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    blocks: Tensor,
    layer: int,
    tables: Tensor,
    seats_s: Tensor,
    positions_s: Tensor,
    slots_s: Tensor | None = None,
    turn: Turn | None = None,
    sharing: int = 1,
    cut: object = None,
) -> None:
    """Write [S, H * D] to `out`: each sequence's token at `positions_s` over all up to itself.

    With `turn` the token is new: it is turned and stored first; `slots_s` says where, negative:
    nowhere, but it always sees itself. Without, queries and cache are ready.
    """
    head_dim = blocks.shape[-1]
    new: Tensor | None = None
    if turn is not None and slots_s is not None:
        qkv, new = _turned(qkv, num_heads, blocks, positions_s, turn)
        _store(new, slots_s, blocks, layer)
    for s, (seat, position) in enumerate(zip(seats_s.tolist(), positions_s.tolist(), strict=True)):
        num_cached = position if new is not None else position + 1
        keys_ngd, values_ngd = cached(blocks, layer, tables[seat], num_cached)
        if new is not None:
            keys_ngd, values_ngd = (
                torch.cat((held, own[None]))
                for held, own in zip((keys_ngd, values_ngd), new[s], strict=True)
            )
        q_1hd = qkv[s, : num_heads * head_dim].view(1, num_heads, head_dim)
        out[s] = attended(q_1hd, keys_ngd, values_ngd).flatten().to(out.dtype)


def _turned(
    qkv: Tensor, num_heads: int, blocks: Tensor, positions_s: Tensor, turn: Turn
) -> tuple[Tensor, Tensor]:
    """Rows with queries turned, and [S, 2, G, D]: keys and values as the cache will have them."""
    _, _, _, num_kv_heads, _, head_dim = blocks.shape
    rows = qkv.clone()
    own = blocks.new_empty((len(qkv), 1, 2, num_kv_heads, 1, head_dim))  # a block for each
    rotate_and_store(
        rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=turn.q_norm,
        k_norm=turn.k_norm,
        epsilon=turn.epsilon,
        cosine_pd=turn.cosine_pd,
        sine_pd=turn.sine_pd,
        positions_t=positions_s,
        slots_t=torch.arange(len(qkv), device=qkv.device),
        blocks=own,
        layer=0,
    )
    return rows, own[:, 0, :, :, 0]


def _store(new: Tensor, slots_s: Tensor, blocks: Tensor, layer: int) -> None:
    """Keys and values to their slots, but for negative ones."""
    rows = (slots_s >= 0).nonzero().squeeze(1)
    block, offset = slots_s[rows] // blocks.shape[4], slots_s[rows] % blocks.shape[4]
    blocks[block, layer, :, :, offset] = new[rows]
