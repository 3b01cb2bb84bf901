"""How the variant of each model family is read from a config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from headway.model.families.fields import Fields
from headway.model.families.rope import Rope, rope_from_hf
from headway.model.families.variant import SWIGLU_ALPHA, SWIGLU_LIMIT, Variant
from headway.model.families.windows import (
    FULL,
    SLIDING,
    WindowRule,
    Windows,
    windows_from_gguf,
    windows_from_hf,
)


def from_llama_file(fields: Fields, rule: WindowRule) -> Variant:
    """The variant of a config.json with one rope."""
    return Variant(**with_one_rope(fields, rule))


def with_one_rope(fields: Fields, rule: WindowRule) -> dict[str, Any]:
    return {"rope": rope_from_hf(fields), **windows_from_hf(fields, rule)._asdict()}


def from_llama_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    """The variant of GGUF metadata; ModelError for a window, which only some families have."""
    length = fields.count("context_length")
    window = fields.count("attention.sliding_window", length, minimum=0) or length
    if window < length:
        raise fields.error(
            f"attention.sliding_window {window} is below context_length {length}: "
            "sliding-window attention is not supported for this architecture"
        )
    return Variant(rope=rope)


GEMMA_PERIOD = 6  # by default, every sixth layer sees all tokens
GEMMA_THETA, GEMMA_WINDOW_THETA = 1_000_000.0, 10_000.0
GEMMA_LARGEST = 62  # layers of the 27B model, whose query scale is not that of its head size


def gemma_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    fields.read.add("hidden_act")  # of older files; hidden_activation is used
    theta = fields.number("rope_theta", GEMMA_THETA, minimum=1.0)
    local = fields.number("rope_local_base_freq", GEMMA_WINDOW_THETA, minimum=1.0)
    return Variant(
        activation="gelu",
        has_output_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(fields.count("hidden_size")),
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        **with_two_ropes(fields, windows_from_hf(fields, rule), theta, local),
    )


def gemma_from_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    """The same from GGUF metadata, whose norm weights include the 1 that others leave out."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key):
            raise fields.error(f"{key} {fields.values[key]!r} is not supported")
    hidden = fields.count("embedding_length")
    is_largest = fields.count("block_count") == GEMMA_LARGEST
    size = hidden / fields.count("attention.head_count") if is_largest else head_dim
    theta = fields.number("rope.freq_base_swa", GEMMA_WINDOW_THETA, minimum=1.0)
    return Variant(
        rope=rope,
        window_rope=Rope(theta=theta),
        activation="gelu",
        has_output_norms=True,
        embedding_scale=math.sqrt(hidden),
        attention_scale=size**-0.5,
        **windows_from_gguf(fields, GEMMA_PERIOD)._asdict(),
    )


def with_two_ropes(
    fields: Fields, windows: Windows, theta: float, window_theta: float
) -> dict[str, Any]:
    """The windows and ropes of a config.json whose windowed layers have a rope of their own.

    Ropes are an object for each kind of layers (transformers 5), or separate fields; rope_scaling
    is that of the other layers.
    """
    found, scaling = fields.get("rope_parameters", {}), fields.get("rope_scaling")
    if not isinstance(found, dict) or not found.keys() <= {FULL, SLIDING}:
        raise fields.error(f"rope_parameters is {found!r}; it must have only {FULL} and {SLIDING}")
    ropes = []
    for kind, own_theta, own_scaling in ((FULL, theta, scaling), (SLIDING, window_theta, None)):
        own = {"rope_parameters": found.get(kind), "rope_theta": own_theta}
        inner = Fields({**fields.values, **own, "rope_scaling": own_scaling}, fields.where)
        ropes.append(rope_from_hf(inner))
        fields.read |= inner.read
    rope = ropes[0] if windows.attention_window is None else ropes[1]
    return {"rope": rope, "window_rope": ropes[1], **windows._asdict()}


def smollm3_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    num_layers, listed = fields.count("num_hidden_layers"), fields.get("no_rope_layers")
    period = fields.count("no_rope_layer_interval", 4)
    fields.read.add("max_window_layers")  # windows are those of layer_types
    unrotated = _last_of_every(period, num_layers)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < num_layers:
            raise fields.error(f"no_rope_layers is {listed!r}; it must have {num_layers} entries")
        unrotated = frozenset(n for n in range(num_layers) if not listed[n])
    return Variant(unrotated_layers=unrotated, **with_one_rope(fields, rule))


def smollm3_from_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    """llama.cpp has no key for the layers without rope."""
    return Variant(rope=rope, unrotated_layers=_last_of_every(4, fields.count("block_count")))


def _last_of_every(period: int, num_layers: int) -> frozenset[int]:
    return frozenset(range(period - 1, num_layers, period))


def phi3_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    return Variant(
        rope=rope_from_hf(fields, allows_partial=True),
        has_fused_projections=True,
        **windows_from_hf(fields, rule)._asdict(),
    )


OLMO: Mapping[str, Any] = MappingProxyType(
    {"has_input_norms": False, "has_output_norms": True, "has_whole_qk_norm": True}
)


def olmo2_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    return Variant(**OLMO, **with_one_rope(fields, rule))


def olmo2_from_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    return replace(from_llama_gguf(fields, head_dim, rope), **OLMO)


def olmo3_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    theta = fields.number("rope_theta", 500_000.0, minimum=1.0)
    return Variant(**OLMO, **with_two_ropes(fields, windows_from_hf(fields, rule), theta, theta))


def granite_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    head_dim = fields.count("hidden_size") // fields.count("num_attention_heads")
    return Variant(
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        query_factor=fields.number("attention_multiplier", 1.0) * head_dim**0.5,
        residual_factor=fields.number("residual_multiplier", 1.0),
        logit_factor=1 / fields.number("logits_scaling", 1.0),
        **with_one_rope(fields, rule),
    )


def granite_from_gguf(fields: Fields, head_dim: int, rope: Rope) -> Variant:
    scale = fields.number("attention.scale", head_dim**-0.5)
    return replace(
        from_llama_gguf(fields, head_dim, rope),
        embedding_scale=fields.number("embedding_scale", 1.0),
        query_factor=scale * head_dim**0.5,
        residual_factor=fields.number("residual_scale", 1.0),
        logit_factor=1 / fields.number("logit_scale", 1.0),
    )


def gpt_oss_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    fields.read.add("initial_context_length")  # the original length of yarn a second time
    for key, only in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if (stated := fields.number(key, only)) != only:
            raise fields.error(f"{key} {stated:g} is not supported; only {only:g} is")
    return Variant(activation="clamped_swiglu", has_sinks=True, **with_one_rope(fields, rule))


def ministral3_from_hf(fields: Fields, rule: WindowRule) -> Variant:
    keys = ("llama_4_scaling_beta", "max_position_embeddings")
    rope = rope_from_hf(fields, more_keys=keys)
    found = fields.get("rope_scaling") or fields.get("rope_parameters")
    beta = Fields(found, fields.where).number(keys[0], minimum=-1.0) if keys[0] in found else 0.0
    length = rope.original_max_length or fields.count("max_position_embeddings")
    growth = (beta, length) if beta else None
    windows = windows_from_hf(fields, rule)
    return Variant(rope=rope, query_growth=growth, **windows._asdict())
