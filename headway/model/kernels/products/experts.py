"""The rows of a pass through their experts: two products, and the weighted sum of each row's experts.

Rows are listed by expert (routing.py), and multiplied by grouped.py. A few rows of a decode are not:
in a pass, kernels wait for each other, and these are two instead of four. The program of a pair finds
its expert itself, and the second product adds up a row's experts; both read the matrices without
matrix units, as `_vector` in linear.py.

Shapes: M rows, N outputs, K inputs, E experts, P pairs, J parts of a sum of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.activation import GATES, paired
from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.grouped import Stack, grouped
from headway.model.kernels.products.linear import VECTOR
from headway.model.kernels.routing import Lists, expert_at, list_pairs


class VectorTile(NamedTuple):
    """The outputs of a program, and the inputs that it has at a time; at most all of them."""

    outputs: int
    inputs: int
    warps: int


# Measured on an H200. With one row and the shape of Qwen3-30B-A3B (3.1 million numbers), a layer takes
# 31 microseconds without lists and 36 with; with two rows 62 and 50. With one row and the shape of
# gpt-oss-20b (16.6 million), a model decodes 368 and 431 tokens per second.
MAX_FEW = 1  # rows of a decode that are not listed
FEW_NUMBERS = 1 << 22  # numbers of an expert's first matrix, at most
GATED_TILE, DOWN_TILE = VectorTile(16, 1024, warps=8), VectorTile(8, 1024, warps=8)
PIECE = 512  # outputs of a program that adds up a row: 8 of a thread of 2 warps, 16 bytes


def max_few(gate_up: Stack) -> int:
    """The most rows of a decode that are computed faster without lists."""
    return MAX_FEW if gate_up.weight_enk[0].numel() <= FEW_NUMBERS else 0


@triton.jit
def _inputs(weight_n, k, start, K: tl.constexpr):
    """Some inputs of each output, from `start` on."""
    is_input = k[None, :] < K - start
    return tl.load(weight_n[:, None] + start + k[None, :], mask=is_input, other=0.0)


@triton.jit
def _multiplied(weight_nk, x_k):
    """Products, of which the inputs of a thread are added."""
    OUTPUTS: tl.constexpr = weight_nk.shape[0]
    INPUTS: tl.constexpr = weight_nk.shape[1]
    products = weight_nk.to(tl.float32) * x_k[None, :]
    return tl.sum(tl.reshape(products, (OUTPUTS, INPUTS // VECTOR, VECTOR)), 2)


@launched
@triton.jit
def _gated(
    x_mk, weight_enk, bias_en, logits_me, experts_p, shares_p, out_pn, num_outputs, epsilon,
    x_stride, logits_stride,
    K: tl.constexpr, EXPERTS: tl.constexpr, ROOM: tl.constexpr, CHOSEN: tl.constexpr,
    HAS_NORM: tl.constexpr, GATE: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some outputs of one pair; the first program of a pair also stores the choice."""
    pair, k = tl.program_id(1), tl.max_contiguous(tl.arange(0, INPUTS), VECTOR)
    row, n = pair // CHOSEN, tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    begin(CHAINED)
    expert, share = expert_at(logits_me + row * logits_stride, pair % CHOSEN, EXPERTS, ROOM)
    near_n = expert.to(tl.int64) * num_outputs + tl.where(n < num_outputs, n, 0)
    b = _inputs(weight_enk + near_n * K, k, 0, K)
    if tl.program_id(0) == 0:
        tl.store(experts_p + pair, expert)
        tl.store(shares_p + pair, share)
    totals = tl.zeros((OUTPUTS, INPUTS // VECTOR), tl.float32)
    squares = tl.zeros((INPUTS,), tl.float32)
    for start in tl.static_range(0, K, INPUTS):
        a = tl.load(x_mk + row * x_stride + start + k, mask=k < K - start, other=0.0).to(tl.float32)
        now = b
        if start + INPUTS < K:
            b = _inputs(weight_enk + near_n * K, k, start + INPUTS, K)
        squares += a * a
        totals += _multiplied(now, a)
    total = tl.sum(totals, 1)
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    if bias_en is not None:
        total += tl.load(bias_en + near_n).to(tl.float32)
    out = tl.reshape(paired(total[None, :], 1, OUTPUTS, GATE), (OUTPUTS // 2,))
    place_n = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
    home = out_pn + pair * (num_outputs // 2) + place_n
    tl.store(home, out.to(out_pn.dtype.element_ty), mask=place_n < num_outputs // 2)


@launched
@triton.jit
def _down(
    x_pk, weight_enk, bias_en, experts_p, shares_p, residual_mn, out_mn, num_outputs, out_stride,
    CHOSEN: tl.constexpr, CHOSEN_ROOM: tl.constexpr, NORMALIZES: tl.constexpr, K: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row."""
    row, k = tl.program_id(0), tl.max_contiguous(tl.arange(0, INPUTS), VECTOR)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, place_n = n < num_outputs, row * out_stride + n
    near_n = tl.where(is_output, n, 0).to(tl.int64)
    STEPS: tl.constexpr = (K + INPUTS - 1) // INPUTS  # for one expert
    begin(CHAINED)
    pair, place_k = row * CHOSEN, tl.arange(0, CHOSEN_ROOM)
    own_n = tl.load(experts_p + pair).to(tl.int64) * num_outputs + near_n
    b = _inputs(weight_enk + own_n * K, k, 0, K)
    totals = tl.zeros((OUTPUTS, INPUTS // VECTOR), tl.float32)
    total = tl.zeros((OUTPUTS,), tl.float32)
    for step in tl.static_range(0, CHOSEN * STEPS):
        place, start = pair + step // STEPS, step % STEPS * INPUTS
        share = tl.load(shares_p + place)
        a = tl.load(x_pk + place * K + start + k, mask=k < K - start, other=0.0).to(tl.float32)
        if bias_en is not None and start == 0:
            total += tl.load(bias_en + own_n).to(tl.float32) * share
        now = b
        if step + 1 < CHOSEN * STEPS:
            next_expert = tl.load(experts_p + pair + (step + 1) // STEPS).to(tl.int64)
            own_n = next_expert * num_outputs + near_n
            b = _inputs(weight_enk + own_n * K, k, (step + 1) % STEPS * INPUTS, K)
        totals += _multiplied(now, a * share)
    total += tl.sum(totals, 1)
    if NORMALIZES:
        total /= tl.sum(tl.load(shares_p + pair + place_k, mask=place_k < CHOSEN, other=0.0), 0)
    if residual_mn is not None:
        total += tl.load(residual_mn + place_n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_mn + place_n, total.to(out_mn.dtype.element_ty), mask=is_output)


@launched
@triton.jit
def _sum(
    y_pn, shares_p, residual_mn, out_mn, squares_mj, num_outputs, out_stride,
    CHOSEN: tl.constexpr, CHOSEN_ROOM: tl.constexpr, NORMALIZES: tl.constexpr,
    OUTPUTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row, from those of its pairs: a thread loads all pairs of its outputs."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, CHOSEN_ROOM)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair_k, is_place = row * CHOSEN + k, k < CHOSEN
    place, is_output = row * out_stride + n, n < num_outputs
    begin(CHAINED)
    y_kn = y_pn + pair_k[:, None] * num_outputs + n[None, :]
    y = tl.load(y_kn, mask=is_place[:, None] & is_output[None, :], other=0.0)
    share_k = tl.load(shares_p + pair_k, mask=is_place, other=0.0)
    if residual_mn is not None:
        residual = tl.load(residual_mn + place, mask=is_output, other=0.0)
    if NORMALIZES:
        share_k /= tl.sum(share_k, 0)
    total = tl.sum(y.to(tl.float32) * share_k[:, None], 0)
    if residual_mn is not None:
        total += residual.to(tl.float32)
    rounded = total.to(out_mn.dtype.element_ty)
    tl.store(out_mn + place, rounded, mask=is_output)
    if squares_mj is not None:
        stored = tl.where(is_output, rounded.to(tl.float32), 0.0)
        home = squares_mj + row * tl.num_programs(1) + tl.program_id(1)
        tl.store(home, tl.sum(stored * stored, 0))


class ExpertRows:
    """The rows between the two products of the experts, and the choice of each row."""

    _lists: Lists | None = None

    def __init__(
        self,
        x_mk: Tensor,
        logits_me: Tensor,
        gate_up: Stack,
        down: Stack,
        *,
        num_chosen: int,
        normalizes: bool,
        activation: str = "silu",
        max_few: int = 0,
        epsilon: float | None = None,
        squares_mj: Tensor | None = None,
    ) -> None:
        """Choose, and compute the first product and the gate; norm and gate as in linear.linear.

        Columns of `logits_me` after those of the experts are not read. `normalizes`: the shares of a
        row are divided by their sum. More rows than `max_few` are listed.
        """
        self._down, self._normalizes, self._num_chosen = down, normalizes, num_chosen
        gate, (num_experts, num_outputs, num_inputs) = GATES[activation], gate_up.weight_enk.shape
        if len(x_mk) > max_few:
            self._shares_tk, self._lists = list_pairs(logits_me, num_experts, num_chosen)
            self.inner_pn = grouped(
                x_mk, gate_up, self._lists, num_chosen, gate=gate, epsilon=epsilon,
                squares_mj=squares_mj,
            )  # fmt: skip
            return
        assert x_mk.stride(1) == 1 and gate_up.weight_enk.is_contiguous(), "rows must be contiguous"
        tile, num_pairs = GATED_TILE, len(x_mk) * num_chosen
        self._shares_tk = logits_me.new_empty((len(x_mk), num_chosen), dtype=torch.float32)
        self._experts_tk = torch.empty_like(self._shares_tk, dtype=torch.int32)
        self.inner_pn = x_mk.new_empty((num_pairs, num_outputs // 2))
        _gated[(ceil_div(num_outputs, tile.outputs), num_pairs)](
            x_mk, *gate_up, logits_me, self._experts_tk, self._shares_tk, self.inner_pn,
            num_outputs, epsilon or 0.0, x_mk.stride(0), logits_me.stride(0), num_inputs,
            num_experts, power_of_2(num_experts), num_chosen, epsilon is not None, gate,
            tile.outputs, min(tile.inputs, power_of_2(num_inputs)), **launch_options(tile.warps, 1),
        )  # fmt: skip

    @property
    def num_parts(self) -> int:
        """Parts of the squares that `summed` computes; 0: it does not compute them."""
        return ceil_div(self._down.weight_enk.shape[1], PIECE) if self._lists else 0

    def summed(
        self,
        inner_pk: Tensor,
        *,
        residual_mn: Tensor | None = None,
        out_mn: Tensor | None = None,
        squares_out_mj: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each row's experts, plus the residual; the options of linear.linear."""
        num_rows, (_, num_outputs, num_inputs) = len(self._shares_tk), self._down.weight_enk.shape
        if out_mn is None:
            out_mn = inner_pk.new_empty((num_rows, num_outputs))
        assert residual_mn is None or residual_mn.stride() == out_mn.stride(), (
            "strides must be equal"
        )
        sizes = (num_outputs, out_mn.stride(0), self._num_chosen, power_of_2(self._num_chosen))
        if self._lists is None:
            assert inner_pk.is_contiguous() and self._down.weight_enk.is_contiguous(), (
                "rows must be contiguous"
            )
            tile = DOWN_TILE
            _down[(num_rows, ceil_div(num_outputs, tile.outputs))](
                inner_pk, *self._down, self._experts_tk, self._shares_tk, residual_mn, out_mn,
                *sizes, self._normalizes, num_inputs, tile.outputs,
                min(tile.inputs, power_of_2(num_inputs)), **launch_options(tile.warps, 1),
            )  # fmt: skip
            return out_mn
        y_pn = grouped(inner_pk, self._down, self._lists, self._num_chosen)
        _sum[(num_rows, self.num_parts)](
            y_pn, self._shares_tk, residual_mn, out_mn, squares_out_mj, *sizes, self._normalizes,
            PIECE, **launch_options(2, 1, fuses=False),
        )  # fmt: skip
        return out_mn
