"""Reference of kernels/attention/rotary.py in plain torch.

Legend: T tokens, H query heads, G key-value heads, D head size, p rows of the rotary tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.model.kernels.reference.norm import rms_norm


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
    slots_t: Tensor,  # block * P + offset to store at; negative: do not store
    blocks: Tensor,  # [B, L, 2, G, P, D]
    layer: int,
) -> None:
    """Normalize (if given) and rotate q and k in place; store k and v in their slots."""
    counts = [num_heads, num_kv_heads, num_kv_heads]
    heads = qkv.view(len(qkv), sum(counts), blocks.shape[-1])
    q_thd, k_tgd, v_tgd = torch.split(heads, counts, dim=1)
    cosine, sine = cosine_pd[positions_t, None], sine_pd[positions_t, None]
    for part, weight in ((q_thd, q_norm), (k_tgd, k_norm)):
        normed = part if weight is None else rms_norm(part, weight, epsilon)
        part.copy_(_rotated(normed, cosine, sine))
    rows = (slots_t >= 0).nonzero().squeeze(1)
    slots = slots_t[rows]
    block, offset = slots // blocks.shape[4], slots % blocks.shape[4]
    blocks[block, layer, 0, :, offset] = _cast(k_tgd[rows], blocks.dtype)
    blocks[block, layer, 1, :, offset] = _cast(v_tgd[rows], blocks.dtype)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs (a, b), a from the first half and b from the second; float32, not rounded."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a type; a value too large for 8 bits saturates, as on a GPU."""
    if dtype == torch.float8_e4m3fn:  # older torch versions return NaN
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)
