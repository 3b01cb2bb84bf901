"""Draws tokens from logits: the most probable one, or a random one. Holds no state.

A row's token does not depend on the other rows. Its random number is a hash of (seed, index of the
token), not the output of a shared generator. Probabilities become integers, whose sum does not
depend on the order of addition, and every other operation uses one row only. A token therefore
depends on its logits, seed and index, and not on its row, its batch or the device.

Shapes: n rows of a batch, v tokens of the vocabulary, k most probable tokens, 1 number per row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.sampling_params import COLDEST

SamplingSettings = npt.NDArray[Any]  # of dtype SETTINGS_DTYPE
SETTINGS_DTYPE = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i8"),  # 0: off
        ("top_p", "f8"),
        ("min_p", "f4"),
        ("seed", "u8"),
        ("num_generated", "u8"),
        ("num_logprobs", "i8"),  # -1: none
        ("has_processor", "?"),
    ]
)
WEIGHT = 2.0**40  # integer weight of probability 1: exact in float32, and sums fit in an int64
CACHED = 400_000  # logits that fit in a CPU's cache; three times as fast as larger pieces
FIRST_TOP = 64  # number of most probable tokens that top_p looks at first
TOP_GROWTH = 8


def choose(logits_nv: Tensor, settings: SamplingSettings) -> Tensor:
    """Choose the most probable token of a greedy row, and draw one for any other row. [n] int64."""
    is_greedy = settings["temperature"] < COLDEST
    if is_greedy.all():
        return _argmax(logits_nv)
    if not is_greedy.any():
        return _draw(logits_nv, settings)
    chosen_n = torch.empty(len(settings), dtype=torch.int64, device=logits_nv.device)
    greedy, random = (index(np.flatnonzero(mask), chosen_n) for mask in (is_greedy, ~is_greedy))
    chosen_n[greedy] = _argmax(logits_nv[greedy])
    chosen_n[random] = _draw(logits_nv[random], settings[~is_greedy])
    return chosen_n


def uniforms(
    seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) for each seed and index: two rounds of splitmix64's mixing."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(_mix(seeds + golden) + (places + np.uint64(1)) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _argmax(logits_nv: Tensor) -> Tensor:
    """The first token with the highest logit of each row."""
    if logits_nv.device.type == "cpu":  # numpy is ten times as fast as torch here
        return torch.from_numpy(logits_nv.detach().numpy().argmax(-1))
    return logits_nv.argmax(-1)


def _draw(logits_nv: Tensor, settings: SamplingSettings) -> Tensor:
    chance = uniforms(settings["seed"], settings["num_generated"])
    chosen_n = torch.empty(len(settings), dtype=torch.int64, device=logits_nv.device)
    for part in parts(logits_nv):
        heat_n1 = _column(settings["temperature"][part], logits_nv)
        probs_nv = (logits_nv[part] / heat_n1).softmax(-1)
        chosen_n[part] = _draw_part(probs_nv, settings[part], _column(chance[part], logits_nv))
    return chosen_n


def _draw_part(probs_nv: Tensor, settings: SamplingSettings, chance_n1: Tensor) -> Tensor:
    is_cut = (settings["top_k"] > 0) | (settings["top_p"] < 1) | (settings["min_p"] > 0)
    if is_cut.all():
        return _draw_cut(probs_nv, settings, chance_n1)
    chosen_n = pick(_weights(probs_nv), chance_n1)[:, 0]
    if is_cut.any():
        at = index(np.flatnonzero(is_cut), probs_nv)
        chosen_n[at] = _draw_cut(probs_nv[at], settings[is_cut], chance_n1[at])
    return chosen_n


def _draw_cut(probs_nv: Tensor, settings: SamplingSettings, chance_n1: Tensor) -> Tensor:
    """Draw from rows that top_k, top_p or min_p restrict to their most probable tokens."""
    chosen_n = torch.empty(len(settings), dtype=torch.int64, device=probs_nv.device)
    num_top, left = max(FIRST_TOP, int(settings["top_k"].max()) + 1), np.arange(len(settings))
    while left.size:
        at = index(left, probs_nv)
        best_nk, tokens_nk = probs_nv[at].topk(min(num_top, probs_nv.shape[-1]), -1)
        weights_nk, is_whole_n = _kept(best_nk, settings[left])
        if num_top >= probs_nv.shape[-1]:
            is_whole_n.fill_(True)
        tokens_nk, order_nk = tokens_nk.sort(-1)  # topk's order of equal tokens is not defined
        places_n1 = pick(weights_nk.gather(1, order_nk), chance_n1[at])
        chosen_n[at[is_whole_n]] = tokens_nk.gather(1, places_n1)[is_whole_n, 0]
        left, num_top = left[~is_whole_n.cpu().numpy()], num_top * TOP_GROWTH
    return chosen_n


def _kept(best_nk: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Weights of the tokens that min_p, top_k and then top_p keep, and whether k covers them all.

    Tokens as probable as the least probable kept token are kept too.
    """
    top_k_n1, top_p_n1 = _column(settings["top_k"], best_nk), _column(settings["top_p"], best_nk)
    kth_n1 = best_nk.gather(1, (top_k_n1 - 1).clamp_(min=0)) * (top_k_n1 > 0)
    thresholds_n1 = torch.maximum(best_nk[:, :1] * _column(settings["min_p"], best_nk), kth_n1)
    weights_nk = _weights(best_nk).masked_fill_(best_nk < thresholds_n1, 0)
    reach_nk = weights_nk.cumsum(-1)
    # With top_p alone the total is known, so the tokens beyond the k best are not needed.
    has_threshold_n1 = _column((settings["top_k"] > 0) | (settings["min_p"] > 0), best_nk)
    is_whole_n1 = ~has_threshold_n1 | (weights_nk[:, -1:] == 0)
    totals_n1 = torch.where(has_threshold_n1, reach_nk[:, -1:], int(WEIGHT))
    ends_n1 = torch.searchsorted(reach_nk, (totals_n1 * top_p_n1).long())
    thresholds_n1 = best_nk.gather(1, ends_n1.clamp_(max=best_nk.shape[-1] - 1))
    weights_nk.masked_fill_(best_nk < thresholds_n1, 0)
    return weights_nk, (is_whole_n1 & (weights_nk[:, -1:] == 0))[:, 0]


def pick(weights: Tensor, chance_n1: Tensor) -> Tensor:
    """The first index in each row at which the cumulative weight exceeds its share. [n, 1]"""
    reach = weights.cumsum_(-1)
    # Below the total even after rounding: the total is far below 2**53, and chance <= 1 - 2**-53.
    targets_n1 = (chance_n1 * reach[:, -1:]).long()
    places_n1 = torch.searchsorted(reach, targets_n1, right=True)
    return places_n1.clamp_(max=weights.shape[-1] - 1)  # beyond the end only if logits were NaN


def _weights(probs: Tensor) -> Tensor:
    """Probabilities as integers, whose sum does not depend on the order of addition."""
    return (probs * WEIGHT).long()


def _column(numbers: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(numbers.copy()).to(like.device)[:, None]


def index(numbers: npt.NDArray[np.intp], like: Tensor) -> Tensor:
    """Row numbers as an index tensor on the device of `like`."""
    return torch.from_numpy(numbers).to(like.device)


def parts(logits_nv: Tensor) -> list[slice]:
    """Slices of rows that fit in a CPU's cache; on other devices, one slice."""
    num_rows, vocab_size = logits_nv.shape
    size = max(1, CACHED // vocab_size) if logits_nv.device.type == "cpu" else max(1, num_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
