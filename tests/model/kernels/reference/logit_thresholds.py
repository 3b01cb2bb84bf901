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
    for row, row_id in enumerate(row_ids_n.tolist()):
        logits_v = logits_nv[row].double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        is_greedy = bool(settings.temperature[row_id] < COLDEST)
        thresholds_n[row] = -torch.inf if is_greedy else _threshold(logits_v, settings, row_id)


def _threshold(logits_v: Tensor, settings: SamplingTensors, row_id: int) -> Tensor:
    """The smallest logit that min_p and top_k keep, and then top_p; ties are kept."""
    falling_v = logits_v.sort(descending=True).values
    weights_v = ((falling_v - falling_v[0]) / settings.temperature[row_id].double()).exp()
    num_kept = max(1, int((weights_v >= settings.min_p[row_id].double()).sum()))
    if 0 < (top_k := int(settings.top_k[row_id])) < len(falling_v):
        num_kept = min(num_kept, int((falling_v >= falling_v[top_k - 1]).sum()))
    if (top_p := settings.top_p[row_id].item()) < 1:
        reach_v = weights_v[:num_kept].cumsum(0)
        num_kept = int((reach_v < top_p * reach_v[-1]).sum()) + 1
    return falling_v[num_kept - 1]
