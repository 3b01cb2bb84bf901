"""Samples tokens from logits in three launches: threshold, draw per slice, choose.

A row's token depends only on its own logits, seed, index and settings. A draw is the maximum of
logits over temperature plus Gumbel noise. The noise is a function of the seed, the index of the
token and the token id: word (id % 1024) // 256 of Philox 4x32 with the seed as its key, at the
counter (id // 1024 * 256 + id % 256, index, 0, 0). A maximum does not depend on the order, so
nothing depends on the batch or the grid. Allocation does not depend on the logits, so a CUDA graph
can replay it. Does not know requests, masks, penalties or log probabilities.

Legend: n rows of a batch, v tokens of the vocabulary; a row id indexes the settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import ceil_div, launched, power_of_2
from headway.model.kernels.logit_thresholds import (
    COLD,
    INFINITY,
    LOG2E,
    SamplingTensors,
    find_logit_thresholds,
)

ROUNDS = 7  # the fewest rounds of Philox 4x32 that pass the usual randomness tests
WIDTH = 256  # consecutive tokens that use the same word of their counters
LAST = 1 - 2.0**-24  # the largest float32 below 1
NUM_ROUNDS, RUN, LAST_CHANCE = tl.constexpr(ROUNDS), tl.constexpr(WIDTH), tl.constexpr(LAST)
NO_TOKEN = tl.constexpr(2**31 - 1)
NUM_PROCESSORS = 132  # multiprocessors that a draw should keep busy; affects only the speed


@triton.jit
def _log2(x, ROUGH: tl.constexpr):
    """log2(x); if ROUGH, to 22 bits and in one instruction instead of many."""
    return tl.extra.cuda.libdevice.fast_log2f(x) if ROUGH else tl.log2(x)


@triton.jit
def _noise(bits, ROUGH: tl.constexpr):
    """Gumbel noise in units of log 2, without a constant that all tokens share."""
    chance = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, LAST_CHANCE)
    # -log2(1 - chance). Near 0 by its series: log2 is inexact there, and small values win.
    series = tl.fma(chance, tl.fma(chance, tl.fma(chance, 1 / 4, 1 / 3), 1 / 2), 1.0)
    wait = tl.where(chance < 1 / 16, series * (chance * LOG2E), -_log2(1 - chance, ROUGH))
    return -_log2(wait, ROUGH)


@triton.jit
def _noises(seed, index, counter, ROUGH: tl.constexpr):
    """The noise of the four tokens that share a counter."""
    zero = counter * 0
    bits0, bits1, bits2, bits3 = tl.philox(seed, counter, zero + index, zero, zero, NUM_ROUNDS)
    return _noise(bits0, ROUGH), _noise(bits1, ROUGH), _noise(bits2, ROUGH), _noise(bits3, ROUGH)


@triton.jit
def _first(scores, tokens):
    """The lowest token with the best score, and that score."""
    best = tl.max(scores)
    return tl.min(tl.where(scores == best, tokens, NO_TOKEN)), best


@triton.jit
def _best(
    line, first, end, threshold, scale, seed, index,
    GREEDY: tl.constexpr, ROUGH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best score of a slice, and its token. A lane has four tokens of a tile."""
    lane = tl.arange(0, LANES)
    best, chosen = tl.full([LANES], -INFINITY, tl.float32), tl.zeros([LANES], tl.int32)
    for start in range(first, end, 4 * LANES):
        if not GREEDY:
            noises = _noises(seed, index, start // 4 + lane, ROUGH)
        for word in tl.static_range(4):
            token = start + lane // RUN * (4 * RUN) + lane % RUN + word * RUN
            score = tl.load(line + token, mask=token < end, other=-INFINITY).to(tl.float32)
            if not GREEDY:
                score = tl.where(score >= threshold, tl.fma(score, scale, noises[word]), -INFINITY)
            is_better = score > best  # strict, so the first of equal scores stays
            best = tl.where(is_better, score, best)
            chosen = tl.where(is_better, token, chosen)
    return _first(best, chosen)


@launched
@triton.jit
def _draw_kernel(
    scores, tokens, logits_nv, row_ids_n, thresholds_n, temperature, seed, num_generated,
    vocab_size, stride, slice_size, ROUGH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best score in a slice of one row, and its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_id, line = tl.load(row_ids_n + row), logits_nv + row * stride
    heat, threshold = tl.load(temperature + row_id), tl.load(thresholds_n + row)
    key, index = tl.load(seed + row_id), tl.load(num_generated + row_id)
    scale = LOG2E / tl.maximum(heat, COLD)
    first, end = part * slice_size, tl.minimum((part + 1) * slice_size, vocab_size)
    if heat < COLD:
        token, score = _best(line, first, end, threshold, scale, key, index, True, ROUGH, LANES)
    else:
        token, score = _best(line, first, end, threshold, scale, key, index, False, ROUGH, LANES)
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, score)
    tl.store(tokens + at, token)


@launched
@triton.jit(do_not_specialize=["num_slices"])
def _choose_kernel(out_n, scores, tokens, num_slices, SLICES: tl.constexpr):
    """The best of one row's slices."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, SLICES)
    at, is_there = row * num_slices + part, part < num_slices
    score = tl.load(scores + at, mask=is_there, other=-INFINITY)
    token, _ = _first(score, tl.load(tokens + at, mask=is_there, other=NO_TOKEN))
    tl.store(out_n + row, token)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workspace:
    """Device memory for `sample`; serves any batch up to its size."""

    thresholds: Tensor  # [n] float32
    scores: Tensor  # [n * slices] float32
    tokens: Tensor  # [n * slices] int32


def workspace(max_rows: int, vocab_size: int, device: torch.device | str) -> Workspace:
    """Allocate memory for batches of up to `max_rows` rows."""
    most_slices = max_rows * ceil_div(vocab_size, 4 * WIDTH)
    return Workspace(
        thresholds=torch.empty(max_rows, dtype=torch.float32, device=device),
        scores=torch.empty(most_slices, dtype=torch.float32, device=device),
        tokens=torch.empty(most_slices, dtype=torch.int32, device=device),
    )


def sample(
    logits_nv: Tensor, row_ids_n: Tensor, settings: SamplingTensors, out_n: Tensor,
    space: Workspace | None = None,
) -> None:  # fmt: skip
    """Choose a token for each row by its settings. NaN counts as -inf. None: allocate space."""
    num_rows, vocab_size = logits_nv.shape
    if num_rows == 0:
        return
    space = space or workspace(num_rows, vocab_size, logits_nv.device)
    assert len(space.thresholds) >= num_rows, "the workspace is too small for the batch"
    find_logit_thresholds(logits_nv, row_ids_n, settings, space.thresholds)
    num_lanes, slice_size = _slices(num_rows, vocab_size)
    num_slices = ceil_div(vocab_size, slice_size)
    _draw_kernel[(num_rows, num_slices)](
        space.scores, space.tokens, logits_nv, row_ids_n, space.thresholds, settings.temperature,
        settings.seed, settings.num_generated, vocab_size, logits_nv.stride(0), slice_size,
        ROUGH=logits_nv.is_cuda and not torch.version.hip, LANES=num_lanes, num_warps=4,
    )  # fmt: skip
    most_slices = power_of_2(ceil_div(vocab_size, 4 * WIDTH))
    _choose_kernel[(num_rows,)](
        out_n, space.scores, space.tokens, num_slices, SLICES=most_slices, num_warps=1
    )


def _slices(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Lanes per program and tokens per slice: short slices for few rows, long ones for many."""
    num_lanes = 4 * WIDTH if num_rows * vocab_size >= NUM_PROCESSORS * 16 * WIDTH else WIDTH
    num_tiles = ceil_div(vocab_size, 4 * num_lanes)
    num_slices = min(num_tiles, ceil_div(16 * NUM_PROCESSORS, num_rows))
    return num_lanes, ceil_div(num_tiles, num_slices) * 4 * num_lanes
