"""Reference of kernels/sampling.py in plain torch, one row at a time and in float64.

Legend: n rows of a batch, v tokens of the vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.model.kernels.sampling import LAST, ROUNDS, WIDTH
from headway.sampling_params import COLDEST
from tests.model.kernels.reference.logit_thresholds import find_logit_thresholds


def sample(
    logits_nv: Tensor,
    row_ids_n: Tensor,
    settings: SamplingTensors,
    out_n: Tensor,
    space: object = None,
) -> None:
    """Choose a token for each row by its settings. NaN counts as -inf. Ignores `space`."""
    thresholds_n = torch.empty(len(logits_nv), dtype=torch.float32, device=logits_nv.device)
    find_logit_thresholds(logits_nv, row_ids_n, settings, thresholds_n)
    for row, row_id in enumerate(row_ids_n.tolist()):
        scores_v = logits_nv[row].double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        if settings.temperature[row_id] >= COLDEST:
            seed, index = int(settings.seed[row_id]), int(settings.num_generated[row_id])
            is_cut_v = scores_v < thresholds_n[row]
            scores_v = scores_v / settings.temperature[row_id].double()
            scores_v += gumbel(seed, index, len(scores_v)).to(scores_v.device)
            scores_v[is_cut_v] = -torch.inf
        out_n[row] = (scores_v == scores_v.max()).nonzero()[0, 0]  # the first of the largest


@lru_cache(maxsize=1024)  # tests draw with the same seeds from several distributions
def gumbel(seed: int, index: int, vocab_size: int) -> Tensor:
    """The noise of every token at one index of a request's output. [v] float64."""
    tokens_v = torch.arange(vocab_size)
    counters_v = tokens_v // (4 * WIDTH) * WIDTH + tokens_v % WIDTH
    words_4v = torch.stack(philox(seed, counters_v, index))
    bits_v = words_4v.gather(0, tokens_v[None] % (4 * WIDTH) // WIDTH)[0]
    # As float32, which is precise near 0 and coarse near 1: values near 0 become large noise.
    chance_v = ((bits_v.float() + 0.5) * 2.0**-32).clamp(max=LAST).double()
    return -(-torch.log1p(-chance_v)).log()


def philox(seed: int, counters: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each counter, as int64."""
    mask = 0xFFFFFFFF
    key0, key1 = seed & mask, seed >> 32 & mask
    c0, c1 = counters & mask, torch.full_like(counters, index & mask)
    c2, c3 = torch.zeros_like(counters), torch.zeros_like(counters)
    for _ in range(ROUNDS):
        # A product may exceed 2**63 and wrap around, which keeps its low 64 bits.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product2 >> 32 & mask) ^ c1 ^ key0, product2 & mask
        c2, c3 = (product0 >> 32 & mask) ^ c3 ^ key1, product0 & mask
        key0, key1 = key0 + 0x9E3779B9 & mask, key1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3
