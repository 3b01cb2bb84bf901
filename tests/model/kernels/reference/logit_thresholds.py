"""Reference of kernels/logit_thresholds.py in plain torch: sorts each row, in float64.

Legend: n rows, v tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.sampling_params import COLDEST


def find_logit_thresholds(
    logits_nv: Tensor, row_ids_n: Tensor, settings: SamplingTensors, thresholds_n: Tensor
) -> None:
    """Write the smallest logit that each row keeps; -inf if it is greedy. NaN counts as -inf."""
    if not len(row_ids_n):
        return
    logits_nv = logits_nv.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    found_n = _thresholds(logits_nv, settings, row_ids_n.long())
    is_greedy_n = settings.temperature[row_ids_n.long()] < COLDEST
    thresholds_n.copy_(found_n.masked_fill(is_greedy_n, -torch.inf))


def _thresholds(logits_nv: Tensor, settings: SamplingTensors, ids_n: Tensor) -> Tensor:
    """The smallest logits that min_p and top_k keep, and then top_p; ties are kept."""
    vocab_size = logits_nv.shape[1]
    falling_nv = logits_nv.sort(descending=True).values
    heat_n1, min_p_n1 = (
        each[ids_n, None].double() for each in (settings.temperature, settings.min_p)
    )
    weights_nv = ((falling_nv - falling_nv[:, :1]) / heat_n1).exp()
    num_kept_n = (weights_nv >= min_p_n1).sum(1).clamp(min=1)
    top_k_n = settings.top_k[ids_n].long()
    last_n = torch.where(top_k_n > 0, top_k_n, vocab_size).clamp(max=vocab_size) - 1
    num_equal_n = (falling_nv >= falling_nv.gather(1, last_n[:, None])).sum(1)
    num_kept_n = torch.where(last_n + 1 < vocab_size, num_kept_n.minimum(num_equal_n), num_kept_n)
    top_p_n, reach_nv = settings.top_p[ids_n].double(), weights_nv.cumsum(1)
    whole_n1 = reach_nv.gather(1, num_kept_n[:, None] - 1)
    is_kept_nv = torch.arange(vocab_size, device=ids_n.device) < num_kept_n[:, None]
    num_reached_n = (is_kept_nv & (reach_nv < top_p_n[:, None] * whole_n1)).sum(1) + 1
    num_kept_n = torch.where(top_p_n < 1, num_reached_n, num_kept_n)
    return falling_nv.gather(1, num_kept_n[:, None] - 1)[:, 0]
