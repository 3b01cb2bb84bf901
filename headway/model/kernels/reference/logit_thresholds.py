"""The floors of rows in plain torch, by sorting them, in float64; and the columns that set them.

Legend: n rows, v tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.sampling_params import COLDEST


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """How seats choose: device tensors with one number for each seat."""

    temperature: Tensor  # float32; below COLDEST: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off
    seed: Tensor  # int64
    num_generated: Tensor  # int32: the index of the token to be drawn


def find_logit_thresholds(
    logits_nv: Tensor, seats_n: Tensor, columns: Columns, floors_n: Tensor
) -> None:
    """The least logit that each row keeps; all if it is greedy. NaN counts as -inf."""
    for row, seat in enumerate(seats_n.tolist()):
        logits_v = logits_nv[row].double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
        is_greedy = bool(columns.temperature[seat] < COLDEST)
        floors_n[row] = -torch.inf if is_greedy else _floor(logits_v, columns, seat)


def _floor(logits_v: Tensor, columns: Columns, seat: int) -> Tensor:
    """The least of what min_p and top_k keep, and top_p of that, with all that equal it."""
    falling_v = logits_v.sort(descending=True).values
    weights_v = ((falling_v - falling_v[0]) / columns.temperature[seat].double()).exp()
    num_kept = max(1, int((weights_v >= columns.min_p[seat].double()).sum()))
    if 0 < (top_k := int(columns.top_k[seat])) < len(falling_v):
        num_kept = min(num_kept, int((falling_v >= falling_v[top_k - 1]).sum()))
    if (top_p := columns.top_p[seat].item()) < 1:
        reach_v = weights_v[:num_kept].cumsum(0)
        num_kept = int((reach_v < top_p * reach_v[-1]).sum()) + 1
    return falling_v[num_kept - 1]
