"""Layers step by step, and the output projections of one rank of a tensor-parallel group.

`StepwisePass` is for backends on a CPU. A GPU's passes use `add_parts`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from torch import Tensor

from headway.model.backends.base import (
    Backend,
    ExpertWeights,
    ForwardPass,
    LayerWeights,
    Weight,
)
from headway.model.backends.routed import Routing
from headway.model.config import ModelConfig
from headway.model.sharding import Shard


class StepwisePass(ForwardPass):
    """One batch; every rank has whole hidden states before and after a layer."""

    def __init__(self, backend: Backend, config: ModelConfig) -> None:
        self._backend, self._config = backend, config

    @abstractmethod
    def rotate_and_store(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *,
        is_rotated: bool = True,
    ) -> None:
        """Normalize (if given) and rotate q and k in place; store k and v in their slots."""

    @abstractmethod
    def attention(self, layer: int, qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, H * D]: every token attends to the tokens of its sequence up to itself.

        With a window, only to the latest of them. A head's sink (if given) is one more logit.
        """

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        ops, shard = self._backend, self._backend.shard
        attended = shard.attended if shard else []
        qkv = ops.linear(self._normed(x, layer.input_norm), layer.qkv)
        self.rotate_and_store(number, qkv, layer.q_norm, layer.k_norm, is_rotated=layer.is_rotated)
        out = self._project(self.attention(number, qkv, layer.sinks), layer.output, attended)
        x = x + self._normed(out, layer.attention_norm)
        normed = self._normed(x, layer.post_norm)
        if layer.experts is None:
            out = self._mlp(normed, layer, shard.inner if shard else [])
        else:
            out = self._experts(normed, layer, layer.experts)
        return x + self._normed(out, layer.mlp_norm)

    def _mlp(self, x: Tensor, layer: LayerWeights, inner: list[range]) -> Tensor:
        gate_up = self._backend.linear(x, layer.gate_up)
        gated = self._backend.gated(gate_up, self._config.activation)
        return self._project(gated, layer.down, inner)

    def _experts(self, x: Tensor, layer: LayerWeights, experts: ExpertWeights) -> Tensor:
        about, shard = self._config.experts, self._backend.shard
        assert about is not None, "a layer has experts, but the config does not"
        routing = Routing(self._backend, x, experts, about)
        out = routing.outputs(
            experts, self._config.activation,
            lambda x, multiply: shard.project(x, shard.of_experts, multiply) if shard else multiply(x),
        )  # fmt: skip
        if about.shared_width:
            shared = self._mlp(x, layer, shard.of_shared_expert if shard else [])
            out += shared * routing.factors[:, -1:]
        return out

    def _project(self, x: Tensor, weight: Weight, inputs: list[range]) -> Tensor:
        """An output projection; x has this rank's range of the `inputs`."""
        multiply, shard = partial(self._backend.linear, weight=weight), self._backend.shard
        return multiply(x) if shard is None else shard.project(x, inputs, multiply)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self._backend.rms_norm(x, norm, self._config.norm_eps)


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
