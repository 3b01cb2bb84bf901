"""Reference of kernels/attention/prefill.py in plain torch, one sequence at a time.

Legend: T tokens, H query heads, G key-value heads, D head size, S sequences, P positions in a
block, N tokens of a sequence, M of them new.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.model.kernels.attention.scoring import DEFAULT, Scoring


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
    scoring: Scoring = DEFAULT,
) -> None:
    """Write to out_thd the attention of each query over the tokens up to its own."""
    starts, ends, row_ids = starts_s.tolist(), ends_s.tolist(), row_ids_s.tolist()
    for s, (end, row_id) in enumerate(zip(ends, row_ids, strict=True)):
        rows = slice(starts[s], starts[s + 1])
        assert rows.stop - rows.start <= longest, "a sequence is longer than `longest`"
        keys_ngd, values_ngd = cached(blocks, layer, tables[row_id], end)
        out_thd[rows] = attended(q_thd[rows], keys_ngd, values_ngd, scoring).to(out_thd.dtype)


def cached(blocks: Tensor, layer: int, table: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, D] of a sequence's first `end` tokens, read through its table."""
    size = blocks.shape[4]
    held = blocks[table[: -(-end // size)].long(), layer]  # [blocks, 2, G, P, D]
    keys_ngd, values_ngd = held.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :end]
    return keys_ngd, values_ngd


def attended(
    q_mhd: Tensor, keys_ngd: Tensor, values_ngd: Tensor, scoring: Scoring = DEFAULT
) -> Tensor:
    """Causal attention of the last M of N tokens, in float32 or wider."""
    if scoring.window is not None:  # the first query sees nothing before this
        begin = max(0, len(keys_ngd) - len(q_mhd) - scoring.window + 1)
        keys_ngd, values_ngd = keys_ngd[begin:], values_ngd[begin:]
    wide = torch.promote_types(q_mhd.dtype, torch.float32)
    group = q_mhd.shape[1] // keys_ngd.shape[1]
    keys_nhd = keys_ngd.to(wide).repeat_interleave(group, 1)
    values_nhd = values_ngd.to(wide).repeat_interleave(group, 1)
    scale = q_mhd.shape[2] ** -0.5 if scoring.scale is None else scoring.scale
    scores_hmn = torch.einsum("mhd,nhd->hmn", q_mhd.to(wide), keys_nhd) * scale
    position = torch.arange(len(keys_nhd), device=q_mhd.device)
    asking = position[len(position) - len(q_mhd) :, None]
    unseen_mn = position[None] > asking
    if scoring.window is not None:
        unseen_mn |= position[None] <= asking - scoring.window
    scores_hmn = scores_hmn.masked_fill(unseen_mn, float("-inf"))
    if scoring.sinks is not None:
        sinks_hm1 = scoring.sinks.to(wide)[:, None, None].expand(-1, len(q_mhd), 1)
        scores_hmn = torch.cat([scores_hmn, sinks_hm1.to(scores_hmn.device)], dim=-1)
    weights_hmn = scores_hmn.softmax(-1)[:, :, : len(position)]
    return torch.einsum("hmn,nhd->mhd", weights_hmn, values_nhd)
