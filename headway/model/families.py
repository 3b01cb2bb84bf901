"""The model families: what each one has in its files and layers that differs from Llama's.

A family is an entry of FAMILIES. The keys of a config.json that its description does not read must
be without effect (config_keys.py), so a description that misses a key refuses the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headway.model.experts import Experts, mixtral_experts, qwen_experts
from headway.model.fields import Fields
from headway.model.rope import Rope, rope_from_hf
from headway.model.variant import Variant
from headway.model.windows import (
    FULL,
    SLIDING,
    WindowRule,
    Windows,
    after_max_window_layers,
    all_but_every,
    every_layer,
    no_layer,
    windows_from_gguf,
    windows_from_hf,
)


def from_llama_file(fields: Fields, rule: WindowRule) -> Variant:
    """The variant of a config.json with one rope."""
    return Variant(rope=rope_from_hf(fields), **windows_from_hf(fields, rule)._asdict())


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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A description; the defaults are those of Llama."""

    name: str
    architectures: tuple[str, ...]  # in config.json
    model_type: str
    gguf: str | None = None  # general.architecture in GGUF files; None: not read
    has_interleaved_rows: bool = False  # in GGUF files, of q_proj and k_proj
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a file may leave out
    bias_keys: tuple[str, ...] = ()  # that config.json may have: attention_bias, mlp_bias, qkv_bias
    has_qkv_bias: bool = False  # without a key
    has_qk_norm: bool = False
    experts: Callable[[Fields], Experts | None] | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")  # the key, and its only value
    windows: WindowRule = no_layer
    read: Callable[[Fields, WindowRule], Variant] = from_llama_file
    read_gguf: Callable[[Fields, int, Rope], Variant] = from_llama_gguf


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


QWEN: Mapping[str, Any] = MappingProxyType(
    {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False}
)
NO_WINDOW = MappingProxyType({"sliding_window": 4096, "use_sliding_window": False})
FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        model_type="llama",
        gguf="llama",  # and Mistral
        has_interleaved_rows=True,
        bias_keys=("attention_bias", "mlp_bias"),
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        model_type="mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows=every_layer,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        model_type="qwen2",
        gguf="qwen2",
        defaults=QWEN,
        has_qkv_bias=True,
        windows=after_max_window_layers,
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        model_type="qwen3",
        gguf="qwen3",
        defaults={**QWEN, "head_dim": 128},
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        windows=after_max_window_layers,
    ),
    Family(
        name="gemma3",
        architectures=("Gemma3ForCausalLM",),
        model_type="gemma3_text",  # gemma3 alone is the type of models with images
        gguf="gemma3",
        defaults={
            "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256.0,
            "sliding_window": 4096, "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=all_but_every(GEMMA_PERIOD),
        read=gemma_from_hf,
        read_gguf=gemma_from_gguf,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        model_type="mixtral",
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        experts=mixtral_experts,
        windows=every_layer,
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16, "qkv_bias": True, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, **NO_WINDOW,
        },
        bias_keys=("qkv_bias",),
        experts=qwen_experts(default_count=60, has_shared=True),
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
            **NO_WINDOW,
        },
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        experts=qwen_experts(default_count=128),
    ),
)  # fmt: skip


INTERLEAVED = frozenset(family.name for family in FAMILIES if family.has_interleaved_rows)


def family_of_hf(fields: Fields) -> Family:
    """The family that a config.json names; ModelError if it is not supported."""
    listed, kind = fields.get("architectures"), fields.get("model_type")
    named = [str(name) for name in listed] if isinstance(listed, list) else []
    for family in FAMILIES:
        if any(name in family.architectures for name in named):
            return family
        if not named and kind == family.model_type:
            return family
    what = ", ".join(named) or f"model_type {kind!r}"
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise fields.error(f"{what} is not supported; supported: {supported}")


def family_of_gguf(fields: Fields) -> Family:
    """The family that a GGUF file names; ModelError if it is not supported."""
    kind = fields.get("general.architecture")
    for family in FAMILIES:
        if family.gguf is not None and kind == family.gguf:
            return family
    supported = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    raise fields.error(f"architecture {kind!r} is not supported; supported: {supported}")
