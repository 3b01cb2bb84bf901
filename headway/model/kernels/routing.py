"""Which experts a router chooses, and the rows of each expert; nothing waits for the device.

A row chooses the experts with the highest outputs of the router, the first ones of equal outputs. A
pair is a row with one of its chosen experts: pair t * k + place. The pairs of an expert are listed
in the order of their rows, with room for all rows, so that no list depends on the others.

Legend: T rows, E experts, k chosen experts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, launch_options, launched, power_of_2

RANKED_ROWS = 256  # with more, a row's experts are chosen once and not by every expert
COMPARED = tl.constexpr(32)  # experts, with every other one
NUMBERS = 8192  # of a program: rows times experts, or rows times chosen experts


class Choice(NamedTuple):
    """The experts of each row, the one with the highest output first."""

    experts_tk: Tensor  # int32
    shares_tk: Tensor  # float32: softmax of the outputs, over all experts

    @staticmethod
    def empty(logits_te: Tensor, num_chosen: int) -> Choice:
        shape, device = (len(logits_te), num_chosen), logits_te.device
        experts_tk = torch.empty(shape, dtype=torch.int32, device=device)
        return Choice(experts_tk, torch.empty(shape, dtype=torch.float32, device=device))


class Lists(NamedTuple):
    """The pairs of each expert."""

    counts_e: Tensor  # int32
    pairs_et: Tensor  # int32: the first `counts_e` of an expert are valid


@triton.jit
def choose(logits_e, EXPERTS: tl.constexpr, ROOM: tl.constexpr):
    """The place of each expert in the order of a row's choice, and its share."""
    e = tl.arange(0, ROOM)
    own_e = tl.load(logits_e + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    place_e = tl.zeros((ROOM,), tl.int32)
    for start in range(0, EXPERTS, COMPARED):  # all at once need too many registers
        n = start + tl.arange(0, COMPARED)[:, None]
        other = tl.load(logits_e + n, mask=n < EXPERTS, other=float("-inf")).to(tl.float32)
        is_before = (other > own_e[None, :]) | ((other == own_e[None, :]) & (n < e[None, :]))
        place_e += tl.sum(is_before.to(tl.int32), 0)
    share_e = tl.exp(own_e - tl.max(own_e, 0))
    return place_e, share_e / tl.sum(share_e, 0)


@launched
@triton.jit
def _choose(
    logits_te, experts_tk, shares_tk, logits_stride,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, CHOSEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    begin(CHAINED)
    place_e, share_e = choose(logits_te + row * logits_stride, EXPERTS, ROOM)
    pair_e, is_chosen = row * CHOSEN + place_e, place_e < CHOSEN
    tl.store(experts_tk + pair_e, tl.arange(0, ROOM), mask=is_chosen)
    tl.store(shares_tk + pair_e, share_e, mask=is_chosen)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _list(
    logits_te, experts_tk, shares_tk, counts_e, pairs_et, num_rows, logits_stride,
    EXPERTS: tl.constexpr, ROOM: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_ROOM: tl.constexpr,
    IS_CHOSEN: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The pairs of one expert, which this also chooses unless that is done."""
    expert = tl.program_id(0)
    begin(CHAINED)
    count = 0
    for start in range(0, num_rows, ROWS):
        t = start + tl.arange(0, ROWS)
        is_row = t < num_rows
        if IS_CHOSEN:
            k = tl.arange(0, CHOSEN_ROOM)[None, :]
            is_here = is_row[:, None] & (k < CHOSEN)
            chosen = tl.load(experts_tk + t[:, None] * CHOSEN + k, mask=is_here, other=-1)
            place_t = tl.min(tl.where(chosen == expert, k, CHOSEN), 1)
        else:
            row_t = logits_te + tl.where(is_row, t, 0).to(tl.int64) * logits_stride
            e, own = tl.arange(0, ROOM)[None, :], tl.load(row_t + expert).to(tl.float32)[:, None]
            other = tl.load(row_t[:, None] + e, mask=e < EXPERTS, other=float("-inf"))
            other = other.to(tl.float32)
            is_before = (other > own) | ((other == own) & (e < expert))
            place_t = tl.sum(is_before.to(tl.int32), 1)
        pair_t, is_listed = t * CHOSEN + place_t, is_row & (place_t < CHOSEN)
        if not IS_CHOSEN:
            total_t = tl.sum(tl.exp(other - own), 1)
            tl.store(experts_tk + pair_t, expert, mask=is_listed)
            tl.store(shares_tk + pair_t, 1.0 / total_t, mask=is_listed)
        at_t = count + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(pairs_et + expert * num_rows + at_t, pair_t, mask=is_listed)
        count += tl.sum(is_listed.to(tl.int32), 0)
    tl.store(counts_e + expert, count)


def list_pairs(logits_te: Tensor, num_experts: int, num_chosen: int) -> tuple[Choice, Lists]:
    """Route all rows. Columns of `logits_te` after those of the experts are not read."""
    num_rows, choice = len(logits_te), Choice.empty(logits_te, num_chosen)
    shapes = ((num_experts,), (num_experts, num_rows))
    counts_e, pairs_et = (choice.experts_tk.new_empty(shape) for shape in shapes)
    room, chosen_room = power_of_2(num_experts), power_of_2(num_chosen)
    given = (logits_te, *choice)
    sizes = (logits_te.stride(0), num_experts, room, num_chosen)
    options, is_chosen = launch_options(4, 1, fuses=False), num_rows > RANKED_ROWS
    if is_chosen:
        _choose[(num_rows,)](*given, *sizes, **options)
    rows = max(1, NUMBERS // (chosen_room if is_chosen else room))
    _list[(num_experts,)](
        *given, counts_e, pairs_et, num_rows, *sizes, chosen_room, is_chosen,
        rows if is_chosen else min(rows, power_of_2(num_rows)), **options,
    )  # fmt: skip
    return choice, Lists(counts_e, pairs_et)
