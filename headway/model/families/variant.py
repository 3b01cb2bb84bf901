"""What differs between decoders besides sizes, biases and norms of heads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.model.experts import Experts
from headway.model.families.rope import Rope

# clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), gate and up within the limit.
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The defaults are those of Llama."""

    rope: Rope
    activation: str = "silu"  # of the MLP; or "gelu" (in its tanh form), or "clamped_swiglu"
    has_input_norms: bool = True  # the inputs of attention and MLP are normalized
    has_output_norms: bool = False  # their outputs are
    norm_offset: float = 0.0  # norm weights in safetensors files are lower by this
    has_whole_qk_norm: bool = False  # q and k are normalized over all heads, not each head
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # The softmax of a query head has one more logit, learned, of no token: attention to nothing.
    has_sinks: bool = False
    # Layers that see only the latest `sliding_window` tokens, the current one included.
    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    window_rope: Rope | None = None  # of the windowed layers; None: that of the others
    experts: Experts | None = None
    # Every layer sees only this many latest tokens. Earlier ones stay in the KV blocks.
    attention_window: int | None = None
    unrotated_layers: frozenset[int] = frozenset()  # have no rope
    # Queries are multiplied by 1 + beta * log(1 + position // length): (beta, length).
    query_growth: tuple[float, int] | None = None
    # The file has qkv_proj and gate_up_proj, each one matrix.
    has_fused_projections: bool = False
    # Factors that reading multiplies into weights: of q_proj, of o_proj and down_proj, and of the
    # final norm.
    query_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0

    @property
    def is_converted(self) -> bool:
        """Whether weights in the file differ from those that the decoder computes with."""
        factors = self.query_factor, self.residual_factor, self.logit_factor
        return self.has_fused_projections or self.rope.rotated != 1.0 or factors != (1.0, 1.0, 1.0)
