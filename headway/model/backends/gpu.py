"""The GPU backend: weights for our Triton kernels, and the pass that suits a batch.

Norm weights are multiplied into the matrices that follow them when the model is loaded, so that a
norm is one factor per row. Gate and up rows are interleaved, so that a tile of outputs contains
both.

Shapes as in base.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
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
from headway.model.backends.gpu_passes import (
    CublasDecodePass,
    FusedDecodePass,
    UnfusedPass,
    stack_of,
)
from headway.model.backends.plain import PlainBackend, PlainWeight
from headway.model.config import ModelConfig
from headway.model.kernels.attention.splits import split_for
from headway.model.kernels.norm import rms_norm

FEW_ROWS = 256  # up to here, reading the matrix limits the speed of a product
# cuBLAS is faster than our kernels with more rows and a large gate and up matrix, even with a norm
# and an activation of their own launches. Measured on an H200 with the four matrices of a 7B model.
MAX_FUSED_ROWS, LARGE_MATRIX = 128, 2**25


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
    stacks = [stack_of(weight) for weight in weights]
    biases = [bias for _, bias in stacks if bias is not None]
    return PlainWeight(
        torch.stack([matrix for matrix, _ in stacks]), torch.stack(biases) if biases else None
    )


def interleaved(weight: Weight) -> PlainWeight:
    assert isinstance(weight, PlainWeight)
    matrix, bias, scale = (
        None if stacked is None else torch.stack(stacked.chunk(2), dim=1).flatten(0, 1)
        for stacked in (weight.matrix, weight.bias, weight.scale)
    )
    assert matrix is not None
    return PlainWeight(matrix, bias, scale)
