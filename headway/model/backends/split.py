"""Layers step by step, and the output projections of one rank of a tensor-parallel group.

`StepwisePass` is for backends on a CPU. A GPU's passes use `add_parts`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from headway.model.backends.base import ForwardPass, LayerWeights, Weight
from headway.model.config import ModelConfig
from headway.model.sharding import Shard


class LayerOperations(Protocol):
    """The operations of a backend that a layer consists of, besides attention."""

    shard: Shard | None

    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...
    def gated(self, x: Tensor, activation: str) -> Tensor:
        """The activation of the first half of every row, times the second half."""
        ...


class StepwisePass(ForwardPass):
    """One batch; every rank has whole hidden states before and after a layer."""

    def __init__(self, operations: LayerOperations, config: ModelConfig) -> None:
        self._operations, self._config = operations, config

    @abstractmethod
    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Normalize (if given) and rotate q and k in place; store k and v in their slots."""

    @abstractmethod
    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        """[T, H * D]: every token attends to the tokens of its sequence up to itself.

        With a window, only to the latest of them.
        """

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        ops, epsilon, shard = self._operations, self._config.norm_eps, self._operations.shard
        attended, inner = (shard.attended, shard.inner) if shard else ([], [])
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, epsilon), layer.qkv)
        self.rotate_and_store(number, qkv, layer.q_norm, layer.k_norm)
        out = self._project(self.attention(number, qkv), layer.output, attended)
        x = x + self._normed(out, layer.attention_norm)
        gate_up = ops.linear(ops.rms_norm(x, layer.post_norm, epsilon), layer.gate_up)
        out = self._project(ops.gated(gate_up, self._config.activation), layer.down, inner)
        return x + self._normed(out, layer.mlp_norm)

    def _project(self, x: Tensor, weight: Weight, inputs: list[range]) -> Tensor:
        """An output projection; x has this rank's range of the `inputs`."""
        multiply, shard = partial(self._operations.linear, weight=weight), self._operations.shard
        return multiply(x) if shard is None else shard.project(x, inputs, multiply)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self._operations.rms_norm(x, norm, self._config.norm_eps)


def add_parts(
    x: Tensor, inner: Tensor, shard: Shard, columns: list[range], multiply: Callable[..., Tensor]
) -> None:
    """x += inner w, in place, where each rank has a part of the sum or of the outputs.

    `columns` of the whole `inner` are those of each rank. `multiply` takes the options
    `residual_mn` and `out_mn` of products.linear.
    """
    if shard.is_exact:
        x += shard.project(inner, columns, multiply)
        return
    # One rank adds x to its part, so that the sum over all ranks is the new x.
    multiply(inner, residual_mn=x if shard.rank == 0 else None, out_mn=x)
    shard.collectives.sum(x)
