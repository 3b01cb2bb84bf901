"""Reference of kernels/attention/prefill.py in plain torch, one sequence at a time.

Legend: T tokens, H query heads, G key-value heads, D head size, S sequences, P positions in a
block, N tokens of a sequence, M of them new.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> None:
    """Write to out_thd the attention of each query over the tokens up to its own."""
    starts, ends, row_ids = starts_s.tolist(), ends_s.tolist(), row_ids_s.tolist()
    for s, (end, row_id) in enumerate(zip(ends, row_ids, strict=True)):
        rows = slice(starts[s], starts[s + 1])
        assert rows.stop - rows.start <= longest, "a sequence is longer than `longest`"
        keys_ngd, values_ngd = cached(blocks, layer, tables[row_id], end)
        out_thd[rows] = attended(q_thd[rows], keys_ngd, values_ngd).to(out_thd.dtype)


def cached(blocks: Tensor, layer: int, table: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] of a sequence's first `end` tokens, read through its table."""
    size = blocks.shape[4]
    held = blocks[table[: -(-end // size)].long(), layer]  # [blocks, 2, G, P, D]
    keys_ngd, values_ngd = held.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :end]
    return keys_ngd, values_ngd


def attended(q_mhd: Tensor, keys_ngd: Tensor, values_ngd: Tensor) -> Tensor:
    """Causal attention of the last M of N tokens, in float32 or wider."""
    wide = torch.promote_types(q_mhd.dtype, torch.float32)
    group = q_mhd.shape[1] // keys_ngd.shape[1]
    keys_nhd = keys_ngd.to(wide).repeat_interleave(group, 1)
    values_nhd = values_ngd.to(wide).repeat_interleave(group, 1)
    scores_hmn = torch.einsum("mhd,nhd->hmn", q_mhd.to(wide), keys_nhd) * q_mhd.shape[2] ** -0.5
    position = torch.arange(len(keys_nhd), device=q_mhd.device)
    unseen_mn = position[None] > position[len(position) - len(q_mhd) :, None]
    weights_hmn = scores_hmn.masked_fill(unseen_mn, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights_hmn, values_nhd)
