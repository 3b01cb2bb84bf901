"""Finds the smallest logit of a row that min_p, top_k and top_p keep, without sorting the row.

The threshold is found by bisection. The largest logits stay in registers: the four largest of each
column, if the row is divided into lines of COLUMNS logits. While the threshold is above the fourth
largest of every column, no other logit matters, and the row is read once, or twice for its mass;
otherwise once per bisection step. The order of sums depends only on the vocabulary size. Knows
nothing about drawing.

Legend: n rows of a batch, v tokens of the vocabulary; a row id indexes the settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import ceil_div, launched, power_of_2
from headway.sampling_params import COLDEST

COLD, LOG2E = tl.constexpr(COLDEST), tl.constexpr(1.4426950408889634)
INFINITY, TINY = tl.constexpr(float("inf")), tl.constexpr(2.0**-126)
STAGES = tl.constexpr(4)  # lines of a row that are loaded ahead
MAX_COLUMNS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingTensors:
    """The sampling settings of all rows: device tensors with one number per row id."""

    temperature: Tensor  # float32; below COLDEST: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off
    seed: Tensor  # int64
    num_generated: Tensor  # int32: the index of the token to draw


@triton.jit
def _load_logits(line, column, size):
    """Logits as float32, -inf beyond the size. Comparisons with NaN are false."""
    return tl.load(line + column, mask=column < size, other=-INFINITY).to(tl.float32)


@triton.jit
def _ordered_int(number):
    """Map a float to an integer with the same order."""
    bits = number.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(ordered):
    """The float of an ordered integer."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _top4(line, vocab_size, COLUMNS: tl.constexpr):
    """The four largest logits of each column, if the row is divided into lines of COLUMNS."""
    column = tl.arange(0, COLUMNS)
    first = tl.full([COLUMNS], -INFINITY, tl.float32)
    second, third, fourth = first, first, first
    for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
        x = tl.maximum(_load_logits(line, start + column, vocab_size), -INFINITY)  # NaN: -inf
        first, x = tl.maximum(first, x), tl.minimum(first, x)
        second, x = tl.maximum(second, x), tl.minimum(second, x)
        third, x = tl.maximum(third, x), tl.minimum(third, x)
        fourth = tl.maximum(fourth, x)
    return first, second, third, fourth


@triton.jit
def _tally(x, pivot, weights, above, below, best, scale, MASS: tl.constexpr):
    """Update the mass or count of x >= pivot, the smallest of these, and the largest below."""
    is_above = x >= pivot
    weights += tl.where(is_above, tl.exp2((x - best) * scale) if MASS else 1.0, 0.0)
    above = tl.minimum(above, tl.where(is_above, x, INFINITY))
    return weights, above, tl.maximum(below, tl.where(is_above, -INFINITY, x))


@triton.jit
def _tally_row(view, pivot, NEAR: tl.constexpr, MASS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tally of a row, or, if NEAR, only of its largest logits in registers."""
    line, vocab_size, top4, best, _, scale = view
    weights = tl.zeros([COLUMNS], tl.float32)
    above = tl.full([COLUMNS], INFINITY, tl.float32)
    below = tl.full([COLUMNS], -INFINITY, tl.float32)
    if NEAR:
        for rank in tl.static_range(4):
            x = top4[rank]
            weights, above, below = _tally(x, pivot, weights, above, below, best, scale, MASS)
    else:
        for start in tl.range(0, vocab_size, COLUMNS, num_stages=STAGES):
            x = _load_logits(line, start + tl.arange(0, COLUMNS), vocab_size)
            weights, above, below = _tally(x, pivot, weights, above, below, best, scale, MASS)
    return tl.sum(weights), tl.min(above), tl.max(below)


@triton.jit
def _search(view, low, high, target, NEAR: tl.constexpr, MASS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest logit from which the sum reaches the target, or `low`. As ordered integers."""
    while low < high:
        pivot = high - (high - low) // 2
        weight, above, below = _tally_row(view, _float_of(pivot), NEAR, MASS, COLUMNS)
        # Move to the next existing logit, but always past the pivot, so that the loop ends.
        if weight >= target:
            low = tl.maximum(pivot, tl.minimum(_ordered_int(above), high))
        else:
            high = tl.minimum(pivot - 1, tl.maximum(_ordered_int(below), low))
    return low


@triton.jit
def _find(view, low, target, MASS: tl.constexpr, COLUMNS: tl.constexpr):
    """Like `_search`: first in the range that the registers cover, then in the whole row."""
    _, _, _, best, hidden, _ = view
    start = tl.maximum(low, hidden)
    found = _search(view, start, _ordered_int(best), target, True, MASS, COLUMNS)
    if (found == start) & (low < hidden):
        found = _search(view, low, hidden, target, False, MASS, COLUMNS)
    return found


@triton.jit
def _mass(view, low, COLUMNS: tl.constexpr):
    """The mass of a row's logits from an ordered integer up."""
    _, _, _, _, hidden, _ = view
    if low > hidden:
        total, _, _ = _tally_row(view, _float_of(low), True, True, COLUMNS)
    else:
        total, _, _ = _tally_row(view, _float_of(low), False, True, COLUMNS)
    return total


@triton.jit
def _threshold(line, vocab_size, temp, top_k, top_p, min_p, COLUMNS: tl.constexpr):
    """The smallest logit that min_p and top_k keep, and then top_p of what is left."""
    top4 = _top4(line, vocab_size, COLUMNS)
    best = tl.max(top4[0])
    hidden = _ordered_int(tl.max(top4[3]))  # above it, all logits of a column are in registers
    view = (line, vocab_size, top4, best, hidden, LOG2E / temp)
    low = _ordered_int(
        tl.where(min_p > 0, best + temp * tl.log(tl.maximum(min_p, TINY)), -INFINITY)
    )
    if top_k > 0:
        low = _find(view, low, top_k, False, COLUMNS)
    if top_p < 1:
        total = _mass(view, low, COLUMNS)
        # Even if all logits were this low, their mass would be too small to be kept.
        low = tl.maximum(low, _ordered_int(best + temp * tl.log((1 - top_p) / vocab_size)))
        low = _find(view, low, top_p * total, True, COLUMNS)
    return _float_of(low)


@launched
@triton.jit
def _threshold_kernel(
    thresholds_n, logits_nv, row_ids_n, temperature, top_k, top_p, min_p, vocab_size, stride,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The threshold of one row: smaller logits are not drawn; -inf if nothing is excluded."""
    row = tl.program_id(0).to(tl.int64)
    row_id = tl.load(row_ids_n + row)
    temp = tl.load(temperature + row_id)
    num_best, share, ratio = (
        tl.load(top_k + row_id),
        tl.load(top_p + row_id),
        tl.load(min_p + row_id),
    )
    num_best = tl.where(num_best < vocab_size, num_best, 0)
    threshold = tl.full((), -INFINITY, tl.float32)
    if (temp >= COLD) & ((num_best > 0) | (share < 1) | (ratio > 0)):
        line = logits_nv + row * stride
        threshold = _threshold(line, vocab_size, temp, num_best, share, ratio, COLUMNS)
    tl.store(thresholds_n + row, threshold)


def find_logit_thresholds(
    logits_nv: Tensor, row_ids_n: Tensor, settings: SamplingTensors, thresholds_n: Tensor
) -> None:
    """Write the float32 threshold of each row; -inf if it is greedy or has no restriction."""
    num_rows, vocab_size = logits_nv.shape
    if num_rows == 0:
        return
    assert logits_nv.stride(1) == 1 or vocab_size == 1, "a row must be contiguous"
    num_columns = min(MAX_COLUMNS, power_of_2(ceil_div(vocab_size, 16)))
    _threshold_kernel[(num_rows,)](
        thresholds_n, logits_nv, row_ids_n, settings.temperature, settings.top_k, settings.top_p,
        settings.min_p, vocab_size, logits_nv.stride(0),
        COLUMNS=num_columns, num_warps=max(1, num_columns // 256),
    )  # fmt: skip
