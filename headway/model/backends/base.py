"""The interface between the decoder and a backend: plain.py (torch), native/ (C) or gpu.py.

A backend stores weights in its own layout and multiplies by them. A `ForwardPass` takes one batch
through the layers: it is created once per forward pass and called once per layer.

Shapes: T tokens, K inputs, N outputs, H query heads, G key-value heads, D head size, B blocks,
L layers, P positions in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.experts import Experts
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint


class Weight(Protocol):
    """A matrix [N, K] with its bias, in a backend's own layout."""

    @property
    def num_bytes(self) -> int: ...
    def rows(self, ids: Tensor) -> Tensor:
        """Rows as float tensors: the embeddings of tokens."""
        ...


class NoWeight:
    """In place of a matrix that a layer does not have."""

    num_bytes = 0

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("the layer does not have this matrix")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The router, with a row for each expert and for their common expert's gate, and the experts.

    A prepared layer may have one weight in place of those of all experts.
    """

    router: Weight
    gate_up: list[Weight]
    down: list[Weight]

    @property
    def expert_bytes(self) -> int:
        return sum(weight.num_bytes for weight in (*self.gate_up, *self.down))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    input_norm: Tensor | None  # None: the input is not normalized
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Weight
    post_norm: Tensor | None  # of the MLP's input
    gate_up: Weight  # with experts: of the one that all tokens use, or NoWeight
    down: Weight
    attention_norm: Tensor | None = None  # of the attention's output
    mlp_norm: Tensor | None = None  # of the MLP's output
    experts: ExpertWeights | None = None
    is_rotated: bool = True  # q and k have a rope
    sinks: Tensor | None = None  # [H]: the logit of each query head that belongs to no token

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        own = (self.qkv, self.output, self.gate_up, self.down)
        experts = self.experts
        routed = experts.router.num_bytes + experts.expert_bytes if experts else 0
        return sum(weight.num_bytes for weight in own) + routed


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelWeights:
    embedding: Weight
    layers: list[LayerWeights]
    norm: Tensor
    head: Weight


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The results of a pass; N sampled rows, V tokens of the vocabulary.

    Hidden states and logits may be in buffers of the backend, which its next pass uses again.
    """

    hidden: Tensor  # [T, hidden], before the final norm
    logits: Tensor | None  # [N, V]; None if no row is sampled
    best: np.ndarray | None = None  # [N] intc: the first token with the highest logit, if computed

    def at(self, sampled: np.ndarray) -> PassOutput:
        """The output of some sampled rows."""
        logits, best = self.logits, self.best
        if logits is not None:
            logits = logits[torch.from_numpy(sampled).to(logits.device)]
        return PassOutput(self.hidden, logits, None if best is None else best[sampled])


class PassArguments(NamedTuple):
    """What a backend reads in one forward pass."""

    config: ModelConfig
    batch: ForwardBatch
    blocks: Tensor  # [B, L, 2, G, P, D]
    cosine: Tensor  # of each token, or of each position: see Backend.uses_rope_table
    sine: Tensor
    query_scale: Tensor | None = None  # of each token or position like cosine; None: 1
    beside: ForwardPass | None = None  # of sliding-window layers: the pass through the others


class ForwardPass(Protocol):
    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        """Return the hidden states [T, hidden] after a layer; may change x in place.

        `number` is the layer's place in the KV blocks.
        """
        ...

    def layers(self, layers: Sequence[LayerWeights], x: Tensor) -> Tensor:
        """Run all layers; may change x in place."""
        for number, layer in enumerate(layers):
            x = self.layer(number, layer, x)
        return x

    def run(self, model: ModelWeights, windowed: ForwardPass | None = None) -> PassOutput | None:
        """Take the batch through the whole model in one call; None if that is not supported.

        `windowed` is the pass through the sliding-window layers, if the model has such layers.
        """
        return None


class Backend(Protocol):
    name: str
    uses_rope_table: bool  # takes cosine and sine of all positions, not of the batch's tokens
    keeps_passes: bool  # a pass can run again when the values in its batch's tensors have changed
    supports_padding: bool  # accepts padding rows, so that a pass can be captured
    shard: Shard | None  # set before weights are read, if the model is divided among ranks

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        """Convert a complete layer to the backend's form; layers are numbered from 0."""
        ...

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> Weight:
        """Read matrices, stacked along the outputs; names are without `.weight`."""
        ...

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...
    def gated(self, x: Tensor, activation: str) -> Tensor:
        """The activation of the first half of every row, times the second half."""
        ...

    def route(self, logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        """The experts of each token [T, k], from the router's outputs, and their factors [T, k + 1].

        The last factor is that of the expert that all tokens use.
        """
        ...

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        """[B, L, 2, G, P, D] for the layers of the config, not initialized, contiguous.

        The last dimension is larger than D if rows have a scale.
        """
        ...

    def begin(self, given: PassArguments) -> ForwardPass: ...


def kv_itemsize(backend: Backend, config: ModelConfig) -> Fraction:
    """Bytes of a number in the backend's KV cache, with its part of the row's scale."""
    none = backend.kv_blocks(config, 0, 1)
    return Fraction(none.shape[-1] * none.element_size(), config.head_dim)
