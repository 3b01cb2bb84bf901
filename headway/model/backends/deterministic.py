"""The decoder's arithmetic on a GPU such that a token's result is the same bits in any batch.

Decodes and chunks of prompts run the same kernels: one order of summation per matrix, whatever the
number of rows, and attention in fixed splits. See kernels/attention/invariant_attention.py and
kernels/products/tiles.py for what this assumes about the device.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from headway.model.backends.attention_kernels import TritonAttention
from headway.model.backends.base import ForwardPass, LayerWeights, PassArguments, Weight
from headway.model.backends.gpu import GpuBackend
from headway.model.backends.gpu_passes import Norm, UnfusedPass
from headway.model.backends.plain import PlainWeight
from headway.model.batch import ForwardBatch
from headway.model.kernels.attention.invariant_attention import (
    invariant_decode_attention,
    invariant_prefill_attention,
    num_partials,
)
from headway.model.kernels.attention.scoring import DEFAULT, Scoring
from headway.model.kernels.norm import add_normed
from headway.model.kernels.products.linear import linear, row_squares
from headway.model.kernels.products.tiles import invariant_tile


class InvariantAttention(TritonAttention):
    """Attention in fixed splits."""

    is_concurrent = False  # partial results may be large, and would be in two pools of memory

    def decode(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        count = batch.num_decodes
        assert batch.row_ids_s is not None
        invariant_decode_attention(
            q[:count], out[:count], blocks=blocks, layer=layer, tables=batch.tables_sw,
            row_ids_s=batch.row_ids_s[:count], positions_s=batch.positions_t[:count],
            num_splits=batch.num_splits, scoring=scoring,
        )  # fmt: skip

    def prefill(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        assert batch.row_ids_s is not None
        invariant_prefill_attention(
            q, out, blocks=blocks, layer=layer, tables=batch.tables_sw,
            row_ids_s=batch.row_ids_s[batch.num_decodes :], starts_s=batch.starts_s,
            ends_s=batch.ends_s, scoring=scoring,
        )  # fmt: skip


class DeterministicBackend(GpuBackend):
    """Like GpuBackend, with one order of summation for any batch."""

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return multiply(x, weight)

    def num_partials(
        self, shape: tuple[int, int, int], head_dim: int, num_splits: int, max_positions: int
    ) -> int:
        row_bytes = head_dim * self.kv_dtype.itemsize
        return num_partials(shape, head_dim, row_bytes, num_splits, max_positions)

    def begin(self, given: PassArguments) -> ForwardPass:
        return DeterministicPass(given, InvariantAttention())


class DeterministicPass(UnfusedPass):
    """Any batch: decodes first, then prompt chunks."""

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        qkv = multiply(x, layer.qkv, **self._norm_of(x, layer.input_norm))
        attended = self.attention(number, layer, qkv)
        self._add(x, attended, layer.output, [], layer.attention_norm)
        norm = self._norm_of(x, layer.post_norm)
        if layer.experts is not None:
            self._add_experts(x, x, layer, layer.experts, partial(multiply, **norm), **norm)
            return x
        gate = {"is_gated": True, "activation": self._config.activation}
        inner = multiply(x, layer.gate_up, **gate, **norm)
        self._add(x, inner, layer.down, [], layer.mlp_norm)
        return x

    def _norm_of(self, x: Tensor, norm: Tensor | None) -> Norm:
        is_given = norm is not None
        return {"epsilon": self._config.norm_eps, "squares_mj": row_squares(x)} if is_given else {}

    def _add(
        self, x: Tensor, inner: Tensor, weight: Weight, columns: list[range],
        norm: Tensor | None = None,
    ) -> None:  # fmt: skip
        if norm is not None:
            add_normed(x, multiply(inner, weight), norm, self._config.norm_eps)
            return
        multiply(inner, weight, residual_mn=x, out_mn=x)


def multiply(x: Tensor, weight: Weight, **options: object) -> Tensor:
    """x w, with the options of products.linear; the tile depends on the number of rows only in
    ways that do not change a row's bits."""
    assert isinstance(weight, PlainWeight)
    tile = invariant_tile(len(x), *weight.matrix.shape, x.dtype)
    return linear(x, weight.matrix, bias_n=weight.bias, tile=tile, **options)  # type: ignore[arg-type]
