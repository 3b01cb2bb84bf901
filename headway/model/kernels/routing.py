"""Which experts a router chooses, and the rows of each expert; nothing waits for the device.

A row chooses the experts with the highest outputs of the router, the first ones of equal outputs. A
pair is a row with one of its chosen experts: pair t * k + place. The pairs of an expert are listed
in the order of their rows, with room for all rows, so that no list depends on the others.

Each row chooses as many experts also if outputs are NaN, which are above or below all numbers. The
shares of a row are the same bits however many rows there are.

Legend: T rows, E experts, k chosen experts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2

LINE = tl.constexpr(16)  # rows of a program; those that choose write 16 bytes for an expert
RANKED_ROWS = 32  # with more, a row's experts are chosen once and not by every expert
COMPARED = tl.constexpr(32)  # experts of a row, with every other one: all need too many registers
LISTED = 4096  # rows of an expert that are listed at a time
NONE = tl.constexpr(-(2**31))  # below the order of all outputs


class Lists(NamedTuple):
    """The pairs of each expert."""

    counts_e: Tensor  # int32
    pairs_et: Tensor  # int32: the first `counts_e` of an expert are valid


@triton.jit
def _order(outputs):
    """Integers in the order of these float32 outputs."""
    bits = tl.where(outputs == 0.0, 0.0, outputs).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), NONE + 1)


@triton.jit
def _output(order):
    """The output at this place of the order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits_e, e, EXPERTS: tl.constexpr):
    """The outputs of these experts, and their order."""
    outputs = tl.load(logits_e + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    return outputs, tl.where(e < EXPERTS, _order(outputs), NONE)


@triton.jit
def expert_at(logits_e, place, EXPERTS: tl.constexpr, ROOM: tl.constexpr):
    """The expert at this place of a row's choice, and its share."""
    e, place_e = tl.arange(0, ROOM), tl.zeros((ROOM,), tl.int32)
    own_e, order_e = _load(logits_e, e, EXPERTS)
    for start in range(0, EXPERTS, COMPARED):
        n = start + tl.arange(0, COMPARED)[:, None]
        order = _load(logits_e, n, EXPERTS)[1]
        is_before = (order > order_e[None, :]) | ((order == order_e[None, :]) & (n < e[None, :]))
        place_e += tl.sum(is_before.to(tl.int32), 0)
    is_own, share_e = place_e == place, tl.exp(own_e - _output(tl.max(order_e, 0)))
    share = tl.sum(tl.where(is_own, share_e, 0.0), 0) / tl.sum(share_e, 0)
    return tl.sum(tl.where(is_own, e, 0), 0), share


@triton.jit
def _append(list_t, pair_t):
    """Append those of these pairs that exist to a list; return their number."""
    exists_t = (pair_t >= 0).to(tl.int32)
    tl.store(list_t + tl.cumsum(exists_t, 0) - 1, pair_t, mask=pair_t >= 0)
    return tl.sum(exists_t, 0)


@triton.jit
def _total(outputs, best):
    """The divisor of a softmax; every caller has the same tile, and so the same order of sums."""
    return tl.sum(tl.exp(outputs - best[:, None]), 1)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _rank(
    logits_te, shares_tk, counts_e, pairs_et, num_rows, logits_stride,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, CHOSEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert, which finds its place in the order of each row's outputs."""
    expert, e = tl.program_id(0), tl.arange(0, ROOM)[None, :]
    begin(CHAINED)
    count = 0
    for start in range(0, num_rows, LINE):
        t = start + tl.arange(0, LINE)
        row_t = logits_te + tl.where(t < num_rows, t, 0) * logits_stride
        own_t = tl.load(row_t + expert).to(tl.float32)
        other, order = _load(row_t[:, None], e, EXPERTS)
        own = _order(own_t)[:, None]
        is_before = (order > own) | ((order == own) & (e < expert))
        place_t = tl.sum(is_before.to(tl.int32), 1)
        best_t = _output(tl.max(order, 1))
        share_t = tl.exp(own_t - best_t) / _total(other, best_t)
        pair_t = tl.where((t < num_rows) & (place_t < CHOSEN), t * CHOSEN + place_t, -1)
        tl.store(shares_tk + pair_t, share_t, mask=pair_t >= 0)
        count += _append(pairs_et + expert * num_rows + count, pair_t)
    tl.store(counts_e + expert, count)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _choose(
    logits_te, shares_tk, places_et, num_rows, logits_stride,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_ROOM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The places of all experts in the choice of some rows; CHOSEN if they are not chosen."""
    t, e = tl.program_id(0) * LINE + tl.arange(0, LINE)[:, None], tl.arange(0, ROOM)[None, :]
    row, k = tl.minimum(t, num_rows - 1).to(tl.int64), tl.arange(0, CHOSEN_ROOM)[None, :]
    begin(CHAINED)
    own, left = _load(logits_te + row * logits_stride, e, EXPERTS)
    place = tl.full((LINE, ROOM), CHOSEN, tl.int32)
    tops = tl.full((LINE, CHOSEN_ROOM), NONE, tl.int32)
    for each in range(CHOSEN):
        top = tl.max(left, 1)[:, None]
        is_next = e == tl.min(tl.where(left == top, e, ROOM), 1)[:, None]
        place, left = tl.where(is_next, each, place), tl.where(is_next, NONE, left)
        tops = tl.where(k == each, top, tops)
    best = _output(tl.max(tops, 1))
    share = tl.exp(_output(tops) - best[:, None]) / _total(own, best)[:, None]
    tl.store(shares_tk + t * CHOSEN + k, share, mask=(t < num_rows) & (k < CHOSEN))
    place = tl.where(t < num_rows, place, CHOSEN)
    home = places_et + e * (tl.cdiv(num_rows, LINE) * LINE) + t
    tl.store(home, place.to(tl.uint8), mask=e < EXPERTS)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _list(
    places_et, counts_e, pairs_et, num_rows,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert."""
    expert, room = tl.program_id(0), tl.cdiv(num_rows, LINE) * LINE
    begin(CHAINED)
    count = 0
    for start in range(0, room, ROWS):
        t = start + tl.arange(0, ROWS)
        place_t = tl.load(places_et + expert * room + t, mask=t < room, other=CHOSEN).to(tl.int32)
        pair_t = tl.where(place_t < CHOSEN, t * CHOSEN + place_t, -1)
        count += _append(pairs_et + expert * num_rows + count, pair_t)
    tl.store(counts_e + expert, count)


def list_pairs(logits_te: Tensor, num_experts: int, num_chosen: int) -> tuple[Tensor, Lists]:
    """Route all rows: shares [T, k], the softmax over all experts; and the lists.

    Columns of `logits_te` after those of the experts are not read.
    """
    num_rows, stride, device = len(logits_te), logits_te.stride(0), logits_te.device
    shares_tk = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=device)
    counts_e = torch.empty(num_experts, dtype=torch.int32, device=device)
    lists = Lists(counts_e, counts_e.new_empty((num_experts, num_rows)))
    room = power_of_2(num_experts)
    sizes, options = (num_rows, stride, num_experts, room, num_chosen), _warps(LINE.value * room)
    if num_rows <= RANKED_ROWS:
        _rank[(num_experts,)](logits_te, shares_tk, *lists, *sizes, **options)
        return shares_tk, lists
    num_lines = ceil_div(num_rows, LINE.value)
    places_et = counts_e.new_empty((num_experts, num_lines * LINE.value), dtype=torch.uint8)
    chosen_room = power_of_2(num_chosen)
    _choose[(num_lines,)](logits_te, shares_tk, places_et, *sizes, chosen_room, **options)
    _list[(num_experts,)](places_et, *lists, num_rows, num_chosen, LISTED, **_warps(LISTED))
    return shares_tk, lists


def _warps(numbers: int) -> dict[str, int]:
    """16 numbers of each thread."""
    return launch_options(min(max(numbers // 512, 1), 16), 1, fuses=False)
