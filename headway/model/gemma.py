"""What a Gemma 3 model adds to the config of a decoder, from config.json or GGUF metadata.

Some layers see only a window of the latest tokens and have a rope of their own. Embeddings are
scaled, the outputs of attention and MLP are normalized, and the MLP's activation is a GELU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.model.fields import Fields
from headway.model.rope import Rope, rope_from_hf

FULL, SLIDING = "full_attention", "sliding_attention"
PERIOD = 6  # by default, every sixth layer sees all tokens
THETA, WINDOW_THETA = 1_000_000.0, 10_000.0
LARGEST_NUM_LAYERS = 62  # of the 27B model, whose query scale is not that of its head size
UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between decoders besides sizes, biases and norms of heads."""

    rope: Rope
    activation: str = "silu"  # of the MLP; or "gelu", in its tanh form
    has_output_norms: bool = False  # the outputs of attention and MLP are normalized
    norm_offset: float = 0.0  # norm weights in safetensors files are lower by this
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    # Layers that see only the latest `sliding_window` tokens, the current one included.
    sliding_window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    window_rope: Rope | None = None  # of the windowed layers


def gemma_from_hf(fields: Fields, num_layers: int, hidden_size: int) -> Variant:
    """Read a config.json of Gemma 3."""
    values = fields.values
    activation = values.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise fields.error(
            f"hidden_activation {activation!r} is not supported; only gelu_pytorch_tanh is"
        )
    _refuse(fields)
    kinds = values.get("layer_types")
    if kinds is None:
        windowed = _every(fields.count("sliding_window_pattern", PERIOD), num_layers)
    elif (
        isinstance(kinds, list)
        and len(kinds) == num_layers
        and all(kind in (FULL, SLIDING) for kind in kinds)
    ):
        windowed = frozenset(n for n, kind in enumerate(kinds) if kind == SLIDING)
    else:
        raise fields.error(
            f"layer_types is {kinds!r}; it must be a list of {num_layers} entries, each {FULL} or "
            f"{SLIDING}"
        )
    _check_windowed(fields, windowed, num_layers)
    rope, window_rope = _ropes_from_hf(fields)
    return Variant(
        rope=rope,
        window_rope=window_rope,
        activation="gelu",
        has_output_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(hidden_size),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        sliding_window=fields.count("sliding_window", 4096),
        windowed_layers=windowed,
    )


def gemma_from_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    """The same from GGUF metadata, whose norm weights include the 1 that others leave out."""
    _refuse(fields)
    num_layers, hidden = fields.count("block_count"), fields.count("embedding_length")
    window = fields.count("attention.sliding_window", 0, minimum=0)
    pattern = fields.values.get("attention.sliding_window_pattern", PERIOD)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.error(
                f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers"
            )
        windowed = frozenset(number for number, is_windowed in enumerate(pattern) if is_windowed)
    else:
        windowed = _every(fields.count("attention.sliding_window_pattern", PERIOD), num_layers)
    is_largest = num_layers == LARGEST_NUM_LAYERS
    size = hidden / fields.count("attention.head_count") if is_largest else head_dim
    windowed = windowed if window else frozenset()
    _check_windowed(fields, windowed, num_layers)
    return Variant(
        rope=rope,
        window_rope=Rope(theta=fields.number("rope.freq_base_swa", WINDOW_THETA, minimum=1.0)),
        activation="gelu",
        has_output_norms=True,
        embedding_scale=math.sqrt(hidden),
        attention_scale=size**-0.5,
        sliding_window=window or None,
        windowed_layers=windowed,
    )


def _check_windowed(fields: Fields, windowed: frozenset[int], num_layers: int) -> None:
    if len(windowed) == num_layers:
        raise fields.error(
            f"all {num_layers} layers have a sliding window; at least one must see all tokens"
        )


def _every(period: int, num_layers: int) -> frozenset[int]:
    """The layers with a window if every `period`-th one sees all tokens."""
    return frozenset(number for number in range(num_layers) if (number + 1) % period)


def _refuse(fields: Fields) -> None:
    for key in UNSUPPORTED:
        if fields.values.get(key):
            raise fields.error(f"{key} {fields.values[key]!r} is not supported")


def _ropes_from_hf(fields: Fields) -> tuple[Rope, Rope]:
    """Those of full and windowed layers: an object for each kind of layer (transformers 5), or separate fields."""
    values = fields.values
    found = values.get("rope_parameters")
    by_kind = found if isinstance(found, dict) else {FULL: values.get("rope_scaling")}

    def rope(kind: str, theta: float) -> Rope:
        own = {"rope_scaling": None, "rope_parameters": by_kind.get(kind), "rope_theta": theta}
        return rope_from_hf(Fields({**values, **own}, fields.where))

    theta = fields.number("rope_theta", THETA, minimum=1.0)
    local = fields.number("rope_local_base_freq", WINDOW_THETA, minimum=1.0)
    return rope(FULL, theta), rope(SLIDING, local)
