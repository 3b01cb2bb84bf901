"""Reference of kernels/sampling.py in plain torch and in float64.

Legend: n rows of a batch, v tokens of the vocabulary.
"""

from __future__ import annotations

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
    scores_nv = logits_nv.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    is_drawn_n = settings.temperature[row_ids_n.long()] >= COLDEST
    ids_m, drawn_mv = row_ids_n.long()[is_drawn_n], scores_nv[is_drawn_n]
    is_cut_mv = drawn_mv < thresholds_n[is_drawn_n, None]
    drawn_mv /= settings.temperature[ids_m, None].double()
    drawn_mv += gumbel(settings.seed[ids_m], settings.num_generated[ids_m], drawn_mv.shape[1])
    scores_nv[is_drawn_n] = drawn_mv.masked_fill(is_cut_mv, -torch.inf)
    if len(row_ids_n):  # the first of the largest
        out_n.copy_((scores_nv == scores_nv.amax(1, keepdim=True)).byte().argmax(1))


def gumbel(seeds_n: Tensor, indices_n: Tensor, vocab_size: int) -> Tensor:
    """The noise of every token at an index of each request's output. [n, v] float64."""
    tokens_v = torch.arange(vocab_size, device=seeds_n.device)
    num_counters = -(-vocab_size // (4 * WIDTH)) * WIDTH
    counters_c = torch.arange(num_counters, device=seeds_n.device)
    words_4nc = torch.stack(philox(seeds_n[:, None], counters_c, indices_n[:, None].long()))
    counters_v = tokens_v // (4 * WIDTH) * WIDTH + tokens_v % WIDTH
    bits_nv = words_4nc[tokens_v % (4 * WIDTH) // WIDTH, :, counters_v].T
    # As float32, which is precise near 0 and coarse near 1: values near 0 become large noise.
    chance_nv = ((bits_nv.float() + 0.5) * 2.0**-32).clamp(max=LAST).double()
    return -(-torch.log1p(-chance_nv)).log()


def philox(
    seeds: Tensor, counters: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each counter, as int64. The arguments are broadcast."""
    mask = 0xFFFFFFFF
    key0, key1 = seeds & mask, seeds >> 32 & mask
    c0, c1 = torch.broadcast_tensors(counters & mask, indices & mask, seeds)[:2]
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(ROUNDS):
        # A product may exceed 2**63 and wrap around, which keeps its low 64 bits.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product2 >> 32 & mask) ^ c1 ^ key0, product2 & mask
        c2, c3 = (product0 >> 32 & mask) ^ c3 ^ key1, product0 & mask
        key0, key1 = key0 + 0x9E3779B9 & mask, key1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3
