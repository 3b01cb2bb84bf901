"""What a decoder asks of the machine it runs on. Answers: plain.py (torch), native/ (C), gpu.py.

A backend keeps weights in the layout it likes and multiplies by them. A `Pass` takes one batch through
the layers: it is made once for a forward pass and asked once for every layer.

Shapes: T tokens, K inputs, N outputs, H query heads, G key-value heads, D head size, B blocks,
L layers, P positions in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway.model.batch import Batch
from headway.model.config import ModelConfig
from headway.model.weights.checkpoint import Checkpoint


class Weight(Protocol):
    """A matrix [N, K] with its bias, as some backend stores it."""

    @property
    def num_bytes(self) -> int: ...
    def rows(self, ids: Tensor) -> Tensor:
        """Rows as float tensors: the embedding of tokens."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight


class Pass(Protocol):
    """One batch on its way through the layers."""

    def layer(self, number: int, layer: Layer, x: Tensor) -> Tensor:
        """Hidden states [T, hidden] after a layer; may be done in place."""
        ...


class Attention(Protocol):
    """What of a layer depends on the batch, for backends that go through it step by step."""

    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Normalize (if asked) and rotate q and k in place, store k and v in their slots."""
        ...

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        """[T, H * D]: every token over all tokens of its sequence up to itself."""
        ...


class Backend(Protocol):
    """Weights, the products with them, and what lies between the products."""

    name: str
    looks_up_turns: bool  # wants cosine and sine [positions, D / 2], not [T, D / 2] of a batch
    fills_up: bool  # takes rows of nobody in a pass, which may then be captured

    def prepared(self, layer: Layer) -> Layer:
        """A layer as the backend likes it, once it is whole."""
        ...

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> Weight:
        """Matrices of the checkpoint, one below the other; names are without `.weight`."""
        ...

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def add_linear(self, residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
        """residual + x w; may be done in place."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...
    def silu_multiply(self, x: Tensor) -> Tensor:
        """silu of the first half of every row, times the second half."""
        ...

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        """[B, L, 2, G, P, D], not initialized: a block is one piece of memory, all layers of it."""
        ...

    def begin(
        self, config: ModelConfig, batch: Batch, blocks: Tensor, cosine: Tensor, sine: Tensor
    ) -> Pass: ...


def step_through(
    ops: Backend, attention: Attention, number: int, layer: Layer, x: Tensor, epsilon: float
) -> Tensor:
    """A layer, one operation after the other."""
    qkv = ops.linear(ops.rms_norm(x, layer.input_norm, epsilon), layer.qkv)
    attention.rotate_and_store(number, qkv, layer.q_norm, layer.k_norm)
    x = ops.add_linear(x, attention.attention(number, qkv), layer.output)
    inner = ops.linear(ops.rms_norm(x, layer.post_norm, epsilon), layer.gate_up)
    return ops.add_linear(x, ops.silu_multiply(inner), layer.down)
