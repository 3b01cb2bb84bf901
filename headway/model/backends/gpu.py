"""The decoder's arithmetic on a GPU: our Triton kernels, and cuBLAS for products of many rows.

A batch of few rows that are all decodes takes five to seven launches per layer, and with experts
six to nine, or four more with an expert that all tokens use. With more than 128 rows, cuBLAS
computes the products of a large layer; for that of gate and up see products/gated.py, and for
experts products/grouped.py.
Norm weights are multiplied into the matrices that follow them when the model is loaded, so that a
norm is one factor per row. Gate and up rows are interleaved, so that a tile of outputs contains
both.

Shapes as in base.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.errors import ConfigError
from headway.model.backends.attention_kernels import AttentionKernels, TritonAttention
from headway.model.backends.base import (
    ExpertWeights,
    ForwardPass,
    LayerWeights,
    NoWeight,
    PassArguments,
    Weight,
)
from headway.model.backends.plain import PlainBackend, PlainWeight
from headway.model.backends.split import add_parts
from headway.model.backends.streams import run_beside
from headway.model.config import ModelConfig
from headway.model.kernels.attention.decode import HeadTransform, decode_attention
from headway.model.kernels.attention.rotary import rotate_and_store
from headway.model.kernels.attention.scoring import Scoring
from headway.model.kernels.attention.splits import split_for
from headway.model.kernels.norm import add_normed, norm_in_place, rms_norm
from headway.model.kernels.products.experts import MAX_FEW, ExpertRows
from headway.model.kernels.products.gated import gated_product
from headway.model.kernels.products.grouped import Stack
from headway.model.kernels.products.linear import linear, num_squares, row_squares
from headway.model.kernels.products.tiles import Tile
from headway.model.sharding import Shard

FEW_ROWS = 256  # up to here, reading the matrix limits the speed of a product
# cuBLAS is faster than our kernels with more rows and a large gate and up matrix, even with a norm
# and an activation of their own launches. Measured on an H200 with the four matrices of a 7B model.
MAX_FUSED_ROWS, LARGE_MATRIX = 128, 2**25
Norm = dict[str, Any]  # of the inputs of a product: options of products.linear
ROUTER_TILE = Tile(64, 32, 64, slices=1, warps=4, stages=3)  # of prompts


class GpuBackend(PlainBackend):
    """torch weights with the norms multiplied in; the KV cache may have a narrower type."""

    uses_rope_table = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: str = "cuda",
        kv_dtype: torch.dtype | None = None,
        attention: AttentionKernels | None = None,
    ) -> None:
        super().__init__(dtype, device)
        self.kv_dtype = kv_dtype or dtype
        self.attention = attention or TritonAttention()
        self.supports_padding = self.attention.supports_padding
        self.name = f"gpu {dtype}".replace("torch.", "")

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        """The norms of inputs, of layers that have them, are in the matrices then."""
        norms = layer.input_norm, layer.post_norm
        ones = [None if norm is None else torch.ones_like(norm) for norm in norms]
        return replace(
            layer,
            input_norm=ones[0],
            post_norm=ones[1],
            qkv=_scaled(layer.qkv, layer.input_norm),
            gate_up=_gate_up(layer.gate_up, layer.post_norm),
            experts=layer.experts and _stacked_experts(layer.experts, layer.post_norm),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(x, weight, epsilon)

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        if num_blocks and block_size % self.attention.block_multiple:
            raise ConfigError(
                f"block_size is {block_size}; this attention needs a multiple of "
                f"{self.attention.block_multiple}: use --block-size {self.attention.block_multiple} or "
                "--attention triton"
            )
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        # Zeros, not empty: padding rows may read a block that was never written.
        return torch.zeros((num_blocks, *shape), dtype=self.kv_dtype, device=self.device)

    def num_partials(
        self, shape: tuple[int, int, int], head_dim: int, num_splits: int, max_positions: int
    ) -> int:
        """The partial results of a launch of decode attention.

        `shape` has the rows, query heads and key-value heads; `num_splits` is that of the batch.
        """
        num_rows, num_heads, num_kv_heads = shape
        row_bytes = head_dim * self.kv_dtype.itemsize
        split = split_for(num_rows * num_kv_heads, num_splits, max_positions, row_bytes)
        return num_rows * num_heads * split.num_splits if split.num_splits > 1 else 0

    def begin(self, given: PassArguments) -> ForwardPass:
        num_rows = len(given.batch.tokens_t)
        is_small = given.batch.num_decodes == num_rows <= FEW_ROWS
        if not is_small or not self.attention.fuses_decode:
            return UnfusedPass(given, self.attention, self.shard)
        if prefers_cublas(num_rows, given.config):
            return CublasDecodePass(given, self.attention, self.shard)
        return FusedDecodePass(given, self.shard)


def prefers_cublas(num_rows: int, config: ModelConfig) -> bool:
    """Whether cuBLAS computes the products of a batch of few decodes."""
    num_gate_up = 2 * config.intermediate_size * config.hidden_size
    return num_rows > MAX_FUSED_ROWS and num_gate_up >= LARGE_MATRIX


def _scaled(weight: Weight, norm: Tensor | None) -> PlainWeight:
    """(norm(x) * n) W equals norm(x) W' where W' has its columns multiplied by n."""
    assert isinstance(weight, PlainWeight)
    if norm is None:
        return weight
    for rows in torch.split(weight.matrix, 4096):  # in parts: float32 copies are large
        rows.copy_(rows.float() * norm.float())
    return weight


def _gate_up(weight: Weight, norm: Tensor | None) -> Weight:
    return weight if isinstance(weight, NoWeight) else interleaved(_scaled(weight, norm))


def _stacked_experts(experts: ExpertWeights, norm: Tensor | None) -> ExpertWeights:
    """The experts with one weight [E, N, K] in place of those of all experts."""
    return ExpertWeights(
        router=_scaled(experts.router, norm),
        gate_up=[_stacked([_gate_up(weight, norm) for weight in experts.gate_up])],
        down=[_stacked(experts.down)],
    )


def _stacked(weights: list[Weight]) -> PlainWeight:
    stacks = [_stack_of(weight) for weight in weights]
    biases = [bias for _, bias in stacks if bias is not None]
    return PlainWeight(
        torch.stack([matrix for matrix, _ in stacks]), torch.stack(biases) if biases else None
    )


def _stack_of(weight: Weight) -> Stack:
    assert isinstance(weight, PlainWeight)
    return Stack(weight.matrix, weight.bias)


def interleaved(weight: Weight) -> PlainWeight:
    assert isinstance(weight, PlainWeight)
    matrix, bias, scale = (
        None if stacked is None else torch.stack(stacked.chunk(2), dim=1).flatten(0, 1)
        for stacked in (weight.matrix, weight.bias, weight.scale)
    )
    assert matrix is not None
    return PlainWeight(matrix, bias, scale)


class GpuPass(ForwardPass):
    """One batch; `attention` is that of decodes."""

    max_few_experts = MAX_FEW  # rows whose experts are not listed

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
        routed = ExpertRows(
            rows, logits, _stack_of(gate_up), _stack_of(down), num_chosen=about.num_chosen,
            normalizes=about.normalizes, activation=self._config.activation,
            max_few=self.max_few_experts, **norm,
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
    matrix, bias = _stack_of(weight)
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
