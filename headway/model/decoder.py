"""One decoder for all families (families/table.py), which differ only in their config.

The batch is an argument, and no pass depends on an earlier one. Knows no requests and no scheduler.
The backend does all arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from headway.model.angles import Angles
from headway.model.backends.base import (
    Backend,
    ExpertWeights,
    ForwardPass,
    LayerWeights,
    ModelWeights,
    NoWeight,
    PassArguments,
    PassOutput,
)
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
        self.shard = shard = backend.shard
        # Key-value heads of this decoder, or of the rank that has most.
        self.max_kv_heads = shard.max_kv_heads if shard else self.config.num_kv_heads
        self.embedding = backend.weight(checkpoint, ["model.embed_tokens"])
        self.layers: list[LayerWeights] = []
        for number in range(self.config.num_layers):
            layer = self._layer(checkpoint, number)
            self.layers.append(backend.prepared(number, layer))
            if progress:
                progress(number + 1, self.config.num_layers)
        self.norm = backend.vector(checkpoint, "model.norm.weight")
        tied = self.config.tie_embeddings
        self.head = self.embedding if tied else backend.weight(checkpoint, ["lm_head"])
        self.use_length(self.config.max_model_len)
        windowed = self.config.windowed_layers
        kinds = [number in windowed for number in range(self.config.num_layers)]
        # The place of each layer in the KV blocks of its kind.
        self._places = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
        self._weights = ModelWeights(
            embedding=self.embedding, layers=self.layers, norm=self.norm, head=self.head
        )

    def use_length(self, max_model_len: int) -> None:
        """Use the rope for contexts of at most this length; before the first pass."""
        config = self.config = self.config.for_length(max_model_len)
        angles = partial(
            Angles, head_dim=config.head_dim, device=self.norm.device, growth=config.query_growth
        )
        self._angles = angles(config.rope)
        self._window_angles = angles(config.window_rope or config.rope)

    def _layer(self, checkpoint: Checkpoint, number: int) -> LayerWeights:
        weight, config, prefix = self.backend.weight, self.config, f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", config.mlp_names(number)

        def vector(name: str, exists: bool) -> Tensor | None:
            return self.backend.vector(checkpoint, f"{prefix}.{name}") if exists else None

        def norm(name: str, exists: bool) -> Tensor | None:
            return vector(f"{name}.weight", exists)

        has_input, has_output = config.has_input_norms, config.has_output_norms
        before_mlp = "pre_feedforward" if has_output else "post_attention"
        return LayerWeights(
            input_norm=norm("input_layernorm", has_input),
            qkv=weight(checkpoint, [f"{attention}.{name}_proj" for name in "qkv"]),
            q_norm=norm("self_attn.q_norm", config.qk_norm),
            k_norm=norm("self_attn.k_norm", config.qk_norm),
            output=weight(checkpoint, [f"{attention}.o_proj"]),
            post_norm=norm(f"{before_mlp}_layernorm", has_input),
            gate_up=weight(checkpoint, mlp[:2]) if mlp else NoWeight(),
            down=weight(checkpoint, mlp[2:]) if mlp else NoWeight(),
            experts=self._experts(checkpoint, number),
            attention_norm=norm("post_attention_layernorm", has_output),
            mlp_norm=norm("post_feedforward_layernorm", has_output),
            is_rotated=number not in config.unrotated_layers,
            sinks=vector("self_attn.sinks", config.has_sinks),
        )

    def _experts(self, checkpoint: Checkpoint, number: int) -> ExpertWeights | None:
        experts, weight = self.config.experts, self.backend.weight
        if experts is None or number not in experts.layers:
            return None
        prefix = f"model.layers.{number}"
        names = [
            [f"{prefix}.{name}" for name in experts.names(each)]
            for each in range(experts.num_experts)
        ]
        return ExpertWeights(
            router=weight(checkpoint, [f"{prefix}.{name}" for name in experts.router]),
            gate_up=[weight(checkpoint, each[:2]) for each in names],
            down=[weight(checkpoint, each[2:]) for each in names],
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in the backend's format."""
        head = 0 if self.config.tie_embeddings else self.head.num_bytes
        return self.embedding.num_bytes + head + sum(layer.num_bytes for layer in self.layers)

    def forward(
        self,
        batch: ForwardBatch,
        blocks: Tensor,
        watch: Callable[[int, Tensor], None] | None = None,
        *,
        window_blocks: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] before the final norm; `watch` is called after every layer.

        `window_blocks` are the KV blocks of the sliding-window layers, if the model has such layers.
        """
        return self._hidden(batch, *self._begin(batch, blocks, window_blocks), watch)

    def _begin(
        self, batch: ForwardBatch, blocks: Tensor, window_blocks: Tensor | None
    ) -> tuple[ForwardPass, ForwardPass | None]:
        """Passes through the layers that see all tokens, and through the sliding-window layers."""
        if self.config.attention_window is not None:
            batch.window = self.config.attention_window
        angles = self._rope(self._angles, batch, blocks.shape[4])
        forward_pass = self.backend.begin(PassArguments(self.config, batch, blocks, *angles))
        if window_blocks is None:
            return forward_pass, None
        assert batch.windowed is not None, "the batch has no tables for sliding-window layers"
        angles = self._rope(self._window_angles, batch, blocks.shape[4])
        windowed = PassArguments(self.config, batch.windowed, window_blocks, *angles)
        return forward_pass, self.backend.begin(windowed._replace(beside=forward_pass))

    def _hidden(
        self,
        batch: ForwardBatch,
        forward_pass: ForwardPass,
        window_pass: ForwardPass | None,
        watch: Callable[[int, Tensor], None] | None,
    ) -> Tensor:
        x = self._embedded(batch.tokens_t)
        if watch is None and window_pass is None:
            return forward_pass.layers(self.layers, x)
        for number, layer in enumerate(self.layers):
            own_pass = forward_pass
            if window_pass is not None and number in self.config.windowed_layers:
                own_pass = window_pass
            x = own_pass.layer(self._places[number], layer, x)
            if watch:
                watch(number, x)
        return x

    def run(
        self, batch: ForwardBatch, blocks: Tensor, *, window_blocks: Tensor | None = None
    ) -> PassOutput:
        """A pass with the logits of its sampled rows, in one call of the backend if it has one."""
        return self._run(batch, *self._begin(batch, blocks, window_blocks))

    def prepared(
        self, batch: ForwardBatch, blocks: Tensor, *, window_blocks: Tensor | None = None
    ) -> Callable[[], PassOutput]:
        """`run` as a call that can be repeated when the values in the batch's tensors change."""
        if not self.backend.keeps_passes:
            return partial(self.run, batch, blocks, window_blocks=window_blocks)
        return partial(self._run, batch, *self._begin(batch, blocks, window_blocks))

    def _run(
        self, batch: ForwardBatch, forward_pass: ForwardPass, window_pass: ForwardPass | None
    ) -> PassOutput:
        output = forward_pass.run(self._weights, window_pass)
        if output is not None:
            return output
        hidden = self._hidden(batch, forward_pass, window_pass, None)
        sampled = hidden[batch.sampled_n] if len(batch.sampled_n) else None
        return PassOutput(hidden, None if sampled is None else self.logits(sampled))

    @contextmanager
    def shortened(self, num_layers: int) -> Iterator[None]:
        """Use only the first layers meanwhile, to compile kernels faster.

        They are `num_layers`, or as many as have one of every kind.
        """
        windowed = self.config.windowed_layers
        kinds = [
            (number in windowed, layer.is_rotated, layer.experts is None)
            for number, layer in enumerate(self.layers)
        ]
        num_layers = max(num_layers, *(kinds.index(kind) + 1 for kind in set(kinds)))
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

    def _embedded(self, tokens_t: Tensor) -> Tensor:
        rows, scale = self.embedding.rows, self.config.embedding_scale
        found = rows(tokens_t) if self.shard is None else self.shard.embed(rows, tokens_t)
        return found if scale == 1.0 else found * torch.tensor(scale, dtype=found.dtype)

    def _rope(
        self, angles: Angles, batch: ForwardBatch, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Cosines and sines, of every token or, if the backend looks them up, of every position."""
        if not self.backend.uses_rope_table:
            return angles.of(batch.positions_t)
        length = self.config.max_model_len
        if not self.backend.supports_padding:  # a captured pass keeps the table's address
            num_positions = batch.tables_sw.shape[1] * block_size  # limits those of the batch
            length = min(length, 1 << max(10, num_positions.bit_length()))
        return angles.table(length)
