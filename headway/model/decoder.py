"""One decoder for Llama, Mistral, Qwen2 and Qwen3, which differ only in their config.

The batch is an argument; nothing about it is kept between passes. Knows no requests and no
scheduler. The backend does all arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headway.model.backends.base import Backend, LayerWeights
from headway.model.batch import ForwardBatch
from headway.model.weights.checkpoint import Checkpoint


class Decoder:
    """The embedding, the layers and the output head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = checkpoint.config
        self.backend = backend
        self.shard = backend.shard
        self.embedding = backend.weight(checkpoint, ["model.embed_tokens"])
        self.layers: list[LayerWeights] = []
        for number in range(self.config.num_layers):
            layer = self._layer(checkpoint, f"model.layers.{number}")
            self.layers.append(backend.prepared(number, layer))
            if progress:
                progress(number + 1, self.config.num_layers)
        self.norm = backend.vector(checkpoint, "model.norm.weight")
        tied = self.config.tie_embeddings
        self.head = self.embedding if tied else backend.weight(checkpoint, ["lm_head"])
        frequencies = self.config.rope.inverse_frequencies(self.config.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self.norm.device)
        self._rope_table: tuple[Tensor, Tensor] | None = None

    def _layer(self, checkpoint: Checkpoint, prefix: str) -> LayerWeights:
        weight, vector = self.backend.weight, self.backend.vector
        attention, mlp, has_norms = f"{prefix}.self_attn", f"{prefix}.mlp", self.config.qk_norm
        return LayerWeights(
            input_norm=vector(checkpoint, f"{prefix}.input_layernorm.weight"),
            qkv=weight(checkpoint, [f"{attention}.{name}_proj" for name in "qkv"]),
            q_norm=vector(checkpoint, f"{attention}.q_norm.weight") if has_norms else None,
            k_norm=vector(checkpoint, f"{attention}.k_norm.weight") if has_norms else None,
            output=weight(checkpoint, [f"{attention}.o_proj"]),
            post_norm=vector(checkpoint, f"{prefix}.post_attention_layernorm.weight"),
            gate_up=weight(checkpoint, [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            down=weight(checkpoint, [f"{mlp}.down_proj"]),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the backend's format."""
        weights = [self.embedding, *([] if self.config.tie_embeddings else [self.head])]
        weights += [
            w for each in self.layers for w in (each.qkv, each.output, each.gate_up, each.down)
        ]
        return sum(weight.num_bytes for weight in weights)

    def forward(
        self,
        batch: ForwardBatch,
        blocks: Tensor,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] before the final norm; `watch` is called after every layer."""
        x = self._embedded(batch.tokens_t)
        forward_pass = self.backend.begin(self.config, batch, blocks, *self._rope(batch))
        for number, layer in enumerate(self.layers):
            x = forward_pass.layer(number, layer, x)
            if watch:
                watch(number, x)
        return x

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Use only the first `num_layers` layers meanwhile, to compile kernels faster."""
        layers, self.layers = self.layers, self.layers[:num_layers]
        try:
            yield
        finally:
            self.layers = layers

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Normalize hidden states [N, hidden] for the output head."""
        return self.backend.rms_norm(hidden, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary] of hidden states [N, hidden]."""
        own = self.backend.linear(self.final_norm(hidden), self.head)
        return own if self.shard is None else self.shard.gather(own, self.shard.vocabulary)

    @property
    def max_kv_heads(self) -> int:
        """Key-value heads of this decoder, or of the rank that has most."""
        return self.config.num_kv_heads if self.shard is None else self.shard.max_kv_heads

    def _embedded(self, tokens_t: Tensor) -> Tensor:
        rows = self.embedding.rows
        return rows(tokens_t) if self.shard is None else self.shard.embed(rows, tokens_t)

    def _rope(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Cosines and sines, of every token or, if the backend looks them up, of every position."""
        if not self.backend.uses_rope_table:
            return self._cos_sin(batch.positions_t)
        if self._rope_table is None:
            positions = torch.arange(self.config.max_model_len, device=self._frequencies.device)
            self._rope_table = self._cos_sin(positions)
        return self._rope_table

    def _cos_sin(self, positions_t: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions_t[:, None].float() * self._frequencies
        scale = self.config.rope.scale
        return angles.cos() * scale, angles.sin() * scale
