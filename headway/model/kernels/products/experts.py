"""The rows of a pass through their experts: two products, and the weighted sum of each row's experts.

The rows are listed by expert (routing.py), also a single one; the products are those of grouped.py.

Shapes: M rows, N outputs, K inputs, E experts, P pairs, J parts of a sum of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.activation import GATES
from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.grouped import Stack, grouped
from headway.model.kernels.routing import list_pairs

PIECE = 512  # outputs of a program that adds up a row: 8 of a thread of 2 warps, 16 bytes


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
        epsilon: float | None = None,
        squares_mj: Tensor | None = None,
    ) -> None:
        """Choose, and compute the first product and the gate; norm and gate as in linear.linear.

        Columns of `logits_me` after those of the experts are not read. `normalizes`: the shares of a
        row are divided by their sum.
        """
        self._down, self._normalizes, self._num_chosen = down, normalizes, num_chosen
        num_experts = len(gate_up.weight_enk)
        self._shares_tk, self._lists = list_pairs(logits_me, num_experts, num_chosen)
        self.inner_pn = grouped(
            x_mk, gate_up, self._lists, num_chosen, gate=GATES[activation], epsilon=epsilon,
            squares_mj=squares_mj,
        )  # fmt: skip

    @property
    def num_parts(self) -> int:
        """Parts of the squares that `summed` computes."""
        return ceil_div(self._down.weight_enk.shape[1], PIECE)

    def summed(
        self,
        inner_pk: Tensor,
        *,
        residual_mn: Tensor | None = None,
        out_mn: Tensor | None = None,
        squares_out_mj: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each row's experts, plus the residual; the options of linear.linear."""
        num_rows, num_outputs = len(self._shares_tk), self._down.weight_enk.shape[1]
        if out_mn is None:
            out_mn = inner_pk.new_empty((num_rows, num_outputs))
        assert residual_mn is None or residual_mn.stride() == out_mn.stride(), (
            "strides must be equal"
        )
        y_pn = grouped(inner_pk, self._down, self._lists, self._num_chosen)
        _sum[(num_rows, self.num_parts)](
            y_pn, self._shares_tk, residual_mn, out_mn, squares_out_mj, num_outputs,
            out_mn.stride(0), self._num_chosen, power_of_2(self._num_chosen), self._normalizes,
            PIECE, **launch_options(2, 1, fuses=False),
        )  # fmt: skip
        return out_mn
