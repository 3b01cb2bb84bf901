"""The output projections of one rank of a tensor-parallel group, with their communication.

`SplitPass` runs the steps of a layer one by one, for backends on a CPU. A GPU's passes use
`add_parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from headway.model.backends.base import ForwardPass, LayerWeights, Weight
from headway.model.sharding import Shard


class LayerSteps(Protocol):
    """The parts of a layer that a rank computes by itself."""

    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None: ...
    def attention(self, layer: int, qkv: Tensor) -> Tensor: ...


class LayerOperations(Protocol):
    """The operations of a backend between them."""

    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...
    def silu_multiply(self, x: Tensor) -> Tensor: ...


class SplitPass(ForwardPass):
    """One batch; every rank has whole hidden states before and after a layer."""

    def __init__(
        self, steps: LayerSteps, operations: LayerOperations, shard: Shard, epsilon: float
    ) -> None:
        self._steps, self._operations = steps, operations
        self._shard, self._epsilon = shard, epsilon

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        steps, ops, shard = self._steps, self._operations, self._shard
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, self._epsilon), layer.qkv)
        steps.rotate_and_store(number, qkv, layer.q_norm, layer.k_norm)
        attended = steps.attention(number, qkv)
        x = x + shard.project(attended, shard.attended, partial(ops.linear, weight=layer.output))
        inner = ops.linear(ops.rms_norm(x, layer.post_norm, self._epsilon), layer.gate_up)
        active = ops.silu_multiply(inner)
        return x + shard.project(active, shard.inner, partial(ops.linear, weight=layer.down))


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
