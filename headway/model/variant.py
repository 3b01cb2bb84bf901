"""What differs between decoders besides sizes, biases and norms of heads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.model.experts import Experts
from headway.model.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The defaults are those of Llama."""

    rope: Rope
    activation: str = "silu"  # of the MLP; or "gelu", in its tanh form
    has_output_norms: bool = False  # the outputs of attention and MLP are normalized
    norm_offset: float = 0.0  # norm weights in safetensors files are lower by this
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # Layers that see only the latest `sliding_window` tokens, the current one included.
    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    window_rope: Rope | None = None  # of the windowed layers; None: that of the others
    experts: Experts | None = None
    # Every layer sees only this many latest tokens. Earlier ones stay in the KV blocks.
    attention_window: int | None = None
