"""Passes over a batch on a GPU: our Triton kernels, and cuBLAS for products of many rows.

A batch of few rows that are all decodes takes five to seven launches per layer, and with experts
six to eleven, or four more with an expert that all tokens use. With more than 128 rows, cuBLAS
computes the products of a large layer; for that of gate and up see products/gated.py, and for
experts products/grouped.py.

Shapes as in base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.backends.attention_kernels import AttentionKernels
from headway.model.backends.base import (
    ExpertWeights,
    ForwardPass,
    LayerWeights,
    PassArguments,
    Weight,
)
from headway.model.backends.plain import PlainWeight
from headway.model.backends.split import add_parts
from headway.model.backends.streams import run_beside
from headway.model.kernels.attention.decode import HeadTransform, decode_attention
from headway.model.kernels.attention.rotary import rotate_and_store
from headway.model.kernels.attention.scoring import Scoring
from headway.model.kernels.norm import add_normed, norm_in_place, rms_norm
from headway.model.kernels.products.experts import ExpertRows, max_few
from headway.model.kernels.products.gated import gated_product
from headway.model.kernels.products.grouped import Stack
from headway.model.kernels.products.linear import linear, num_squares, row_squares
from headway.model.kernels.products.tiles import Tile
from headway.model.sharding import Shard

Norm = dict[str, Any]  # of the inputs of a product: options of products.linear
ROUTER_TILE = Tile(64, 32, 64, slices=1, warps=4, stages=3)  # of prompts


class GpuPass(ForwardPass):
    """One batch; `attention` is that of decodes."""

    is_fused = False

    def __init__(self, given: PassArguments, shard: Shard | None = None) -> None:
        self._config, self._batch, self._blocks = given[:3]
        self._rope, self._query_scale = (given.cosine, given.sine), given.query_scale
        self._shard = shard
        self._columns = (shard.attended, shard.inner) if shard else ([], [])

    def _add_experts(
        self, x: Tensor, rows: Tensor, layer: LayerWeights, experts: ExpertWeights,
        product: Callable[..., Tensor], **norm: Any,
    ) -> None:  # fmt: skip
        """x += the experts' outputs, in place; `rows`, with this norm, are their inputs."""
        about, shard = self._config.experts, self._shard
        assert about is not None, "a layer has experts, but the config does not"
        width = about.num_experts + about.has_shared_gate
        logits = torch.empty((len(x), width), dtype=torch.float32, device=x.device)
        product(rows, experts.router, out_mn=logits)
        (gate_up,), (down,) = experts.gate_up, experts.down
        stack = stack_of(gate_up)
        routed = ExpertRows(
            rows, logits, stack, stack_of(down), num_chosen=about.num_chosen,
            normalizes=about.normalizes, activation=self._config.activation,
            max_few=max_few(stack) if self.is_fused else 0, **norm,
        )  # fmt: skip
        shared = product(rows, layer.gate_up, is_gated=True) if about.shared_width else None
        if shared is not None and about.has_shared_gate:
            shared *= logits[:, about.num_experts :].sigmoid()
        self._add_routed(x, routed)
        if shared is not None:
            self._add(x, shared, layer.down, shard.of_shared_expert if shard else [])

    def _add_routed(self, x: Tensor, routed: ExpertRows) -> None:
        """x += the sums of the experts' outputs, in place."""
        if self._shard is None:
            routed.summed(routed.inner_pn, residual_mn=x, out_mn=x)
        else:
            add_parts(x, routed.inner_pn, self._shard, self._shard.of_experts, routed.summed)

    def _add(
        self, x: Tensor, inner: Tensor, weight: Weight, columns: list[range],
        norm: Tensor | None = None,
    ) -> None:  # fmt: skip
        """x += norm(inner w), in place, or inner w without a norm.

        `columns` of the whole `inner` are those of each rank of a group; ranks have no norm.
        """
        raise NotImplementedError

    def attention(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """[T, H * D]: rotates and stores the new tokens too."""
        batch, config = self._batch, self._config
        assert batch.row_ids_s is not None
        out = qkv.new_empty((len(qkv), config.num_heads * config.head_dim))
        decode_attention(
            qkv, out, num_heads=config.num_heads, blocks=self._blocks, layer=number,
            tables=batch.tables_sw, row_ids_s=batch.row_ids_s, positions_s=batch.positions_t,
            slots_s=batch.slots_t, num_splits=batch.num_splits,
            transform=self._transform(layer, qkv), scoring=self._scoring(layer),
        )  # fmt: skip
        return out

    def _transform(self, layer: LayerWeights, qkv: Tensor) -> HeadTransform:
        """What attention does to new heads; norms over all heads are done here, in place."""
        config, q_norm, k_norm = self._config, layer.q_norm, layer.k_norm
        if config.has_whole_qk_norm and q_norm is not None and k_norm is not None:
            norm_in_place(qkv[:, : len(q_norm)], q_norm, config.norm_eps)
            keys = qkv[:, len(q_norm) : len(q_norm) + len(k_norm)]
            norm_in_place(keys, k_norm, config.norm_eps)
            q_norm = k_norm = None
        cosine, sine = self._rope if layer.is_rotated else (None, None)
        return HeadTransform(q_norm, k_norm, config.norm_eps, cosine, sine, self._query_scale)

    def _scoring(self, layer: LayerWeights) -> Scoring:
        return Scoring(self._config.attention_scale, self._batch.window, layer.sinks)


@dataclass(slots=True, eq=False)
class Squares:
    """The sums of squares of the rows of a pass, if they are known."""

    squares_mj: Tensor | None = None


class FusedDecodePass(GpuPass):
    """A batch of decodes only, with few rows: fused kernels."""

    is_fused = True

    def __init__(self, given: PassArguments, shard: Shard | None = None) -> None:
        super().__init__(given, shard)
        other = given.beside
        # Of x before the next layer, which may be one of another pass.
        self._latest = Squares()
        if isinstance(other, FusedDecodePass):
            self._latest = other._latest

    @property
    def _squares(self) -> Tensor | None:
        return self._latest.squares_mj

    @_squares.setter
    def _squares(self, squares_mj: Tensor | None) -> None:
        self._latest.squares_mj = squares_mj

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        if self._squares is None and len(x) > 1:
            self._squares = row_squares(x)
        qkv = self._normed_product(x, layer.input_norm, layer.qkv)
        attended = self.attention(number, layer, qkv)
        self._add(x, attended, layer.output, self._columns[0], layer.attention_norm)
        if layer.experts is not None:
            norm: Norm = {"epsilon": self._config.norm_eps, "squares_mj": self._squares}
            self._add_experts(x, x, layer, layer.experts, partial(multiply, **norm), **norm)
            return x
        inner = self._normed_product(x, layer.post_norm, layer.gate_up, is_gated=True)
        self._add(x, inner, layer.down, self._columns[1], layer.mlp_norm)
        return x

    def _normed_product(
        self, x: Tensor, norm: Tensor | None, weight: Weight, *, is_gated: bool = False
    ) -> Tensor:
        """norm(x) w; the norm's weight is in w, unless a subclass says otherwise."""
        gate = {"is_gated": is_gated, "activation": self._config.activation}
        if norm is None:
            return multiply(x, weight, **gate)
        return multiply(x, weight, epsilon=self._config.norm_eps, squares_mj=self._squares, **gate)

    def _add(
        self, x: Tensor, inner: Tensor, weight: Weight, columns: list[range],
        norm: Tensor | None = None,
    ) -> None:  # fmt: skip
        """As in GpuPass; also computes the squares for the next norm."""
        assert isinstance(weight, PlainWeight)
        if self._shard is not None:
            add_parts(x, inner, self._shard, columns, partial(multiply, weight=weight))
            self._squares = row_squares(x) if len(x) > 1 else None
            return
        if norm is not None:
            self._squares = add_normed(x, multiply(inner, weight), norm, self._config.norm_eps)
            return
        num_outputs, num_inputs = weight.matrix.shape
        self._make_squares(x, num_squares(len(x), num_outputs, num_inputs, x.dtype))
        multiply(inner, weight, residual_mn=x, out_mn=x, squares_out_mj=self._squares)

    def _add_routed(self, x: Tensor, routed: ExpertRows) -> None:
        if self._shard is None and routed.num_parts:
            self._make_squares(x, routed.num_parts)
            routed.summed(routed.inner_pn, residual_mn=x, out_mn=x, squares_out_mj=self._squares)
        else:
            super()._add_routed(x, routed)
            self._squares = row_squares(x) if len(x) > 1 else None

    def _make_squares(self, x: Tensor, num_parts: int) -> None:
        """Room for the squares of x; one row needs none."""
        if len(x) > 1:
            self._squares = torch.empty((len(x), num_parts), dtype=torch.float32, device=x.device)


def multiply(x: Tensor, weight: Weight, **options: object) -> Tensor:
    """x w by the kernel for few rows; `options` are those of products.linear."""
    assert isinstance(weight, PlainWeight)
    return linear(x, weight.matrix, bias_n=weight.bias, scale_n=weight.scale, **options)  # type: ignore[arg-type]


class UnfusedPass(GpuPass):
    """Any batch: decodes first, then prompt chunks."""

    def __init__(
        self, given: PassArguments, kernels: AttentionKernels, shard: Shard | None = None
    ) -> None:
        super().__init__(given, shard)
        self._kernels = kernels
        self._attended: Tensor | None = None  # [T, H, D], zero in padding rows

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        qkv = _linear(self._normed(x, layer.input_norm), layer.qkv)
        attended = self.attention(number, layer, qkv)
        self._add(x, attended, layer.output, self._columns[0], layer.attention_norm)
        normed = self._normed(x, layer.post_norm)
        if layer.experts is not None:
            self._add_experts(x, normed, layer, layer.experts, _product)
            return x
        inner = _gated(normed, layer.gate_up, self._config.activation)
        self._add(x, inner, layer.down, self._columns[1], layer.mlp_norm)
        return x

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else rms_norm(x, norm, self._config.norm_eps)

    def _add(
        self, x: Tensor, inner: Tensor, weight: Weight, columns: list[range],
        norm: Tensor | None = None,
    ) -> None:  # fmt: skip
        if norm is not None:
            add_normed(x, _linear(inner, weight), norm, self._config.norm_eps)
        elif self._shard is None:
            _add_linear(x, inner, weight)
        else:
            add_parts(x, inner, self._shard, columns, partial(multiply_into, weight=weight))

    def attention(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        config, transform = self._config, self._transform(layer, qkv)
        if self._attended is None:
            self._attended = qkv.new_zeros((len(qkv), config.num_heads, config.head_dim))
        rotate_and_store(
            qkv, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            q_norm=transform.q_norm, k_norm=transform.k_norm, epsilon=transform.epsilon,
            cosine_pd=transform.cosine_pd, sine_pd=transform.sine_pd,
            query_scale_p=transform.query_scale_p, positions_t=self._batch.positions_t,
            slots_t=self._batch.slots_t, blocks=self._blocks, layer=number,
        )  # fmt: skip
        self._attend(number, qkv, self._attended, self._scoring(layer))
        return self._attended.flatten(1)

    def _attend(self, number: int, qkv: Tensor, out: Tensor, scoring: Scoring) -> None:
        batch, config = self._batch, self._config
        heads = config.num_heads + 2 * config.num_kv_heads
        q = qkv.view(-1, heads, config.head_dim)[:, : config.num_heads]
        given = (number, q, out, batch, self._blocks, scoring)
        works = [partial(self._kernels.prefill, *given)] if batch.longest else []
        works += [partial(self._kernels.decode, *given)] if batch.num_decodes else []
        if len(works) > 1 and self._kernels.is_concurrent:
            run_beside(*works)
        else:
            for work in works:
                work()


class CublasDecodePass(UnfusedPass):
    """A batch of decodes only: fused attention, and products by cuBLAS."""

    attention = GpuPass.attention


def _linear(x: Tensor, weight: Weight) -> Tensor:
    assert isinstance(weight, PlainWeight)
    return F.linear(x, weight.matrix, weight.bias)


def _gated(x: Tensor, weight: Weight, activation: str = "silu") -> Tensor:
    assert isinstance(weight, PlainWeight)
    return gated_product(x, weight.matrix, weight.bias, activation)


def _product(
    x: Tensor, weight: Weight, *, is_gated: bool = False, out_mn: Tensor | None = None
) -> Tensor:
    """x w, of a router into `out_mn`: its tile does not depend on the rows; see compile_all."""
    if is_gated:
        return _gated(x, weight)
    matrix, bias = stack_of(weight)
    return linear(x, matrix, bias_n=bias, out_mn=out_mn, tile=ROUTER_TILE)


def multiply_into(
    x: Tensor, weight: Weight, residual_mn: Tensor | None = None, out_mn: Tensor | None = None
) -> Tensor:
    """x w, plus the residual if one is given; into `out_mn`, which may be the residual."""
    assert isinstance(weight, PlainWeight)
    if residual_mn is not None:
        _add_linear(residual_mn, x, weight)
        return residual_mn
    out = _linear(x, weight) if out_mn is None else torch.mm(x, weight.matrix.t(), out=out_mn)
    if out_mn is not None and weight.bias is not None:
        out += weight.bias
    return out


def _add_linear(x: Tensor, inner: Tensor, weight: Weight) -> None:
    """x += inner w, in place."""
    assert isinstance(weight, PlainWeight)
    x.addmm_(inner, weight.matrix.t())
    if weight.bias is not None:
        x += weight.bias


def stack_of(weight: Weight) -> Stack:
    assert isinstance(weight, PlainWeight)
    return Stack(weight.matrix, weight.bias)
