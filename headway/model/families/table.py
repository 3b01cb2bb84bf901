"""The model families: what each one has in its files and layers that differs from Llama's.

A family is an entry of FAMILIES. The keys of a config.json that its description does not read must
be without effect (config_keys.py), so a description that misses a key refuses the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headway.model.experts import Experts, gpt_oss_experts, mixtral_experts, qwen_experts
from headway.model.families import variants
from headway.model.families.fields import Fields
from headway.model.families.rope import Rope
from headway.model.families.variant import Variant
from headway.model.families.windows import (
    WindowRule,
    after_max_window_layers,
    all_but_every,
    every_layer,
    no_layer,
)


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
    read: Callable[[Fields, WindowRule], Variant] = variants.from_llama_file
    read_gguf: Callable[[Fields, int, Rope], Variant] = variants.from_llama_gguf


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
        windows=all_but_every(variants.GEMMA_PERIOD),
        read=variants.gemma_from_hf,
        read_gguf=variants.gemma_from_gguf,
    ),
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        model_type="smollm3",
        gguf="smollm3",
        has_interleaved_rows=True,
        defaults={
            "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        bias_keys=("attention_bias", "mlp_bias"),
        read=variants.smollm3_from_hf,
        read_gguf=variants.smollm3_from_gguf,
    ),
    Family(
        name="phi3",  # and Phi-4
        architectures=("Phi3ForCausalLM",),
        model_type="phi3",
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        windows=every_layer,
        read=variants.phi3_from_hf,
    ),
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        model_type="olmo2",
        gguf="olmo2",
        defaults={"rms_norm_eps": 1e-5},
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        read=variants.olmo2_from_hf,
        read_gguf=variants.olmo2_from_gguf,
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        model_type="olmo3",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        windows=all_but_every(4),
        read=variants.olmo3_from_hf,
    ),
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        model_type="granite",
        gguf="granite",
        has_interleaved_rows=True,
        bias_keys=("attention_bias", "mlp_bias"),
        read=variants.granite_from_hf,
        read_gguf=variants.granite_from_gguf,
    ),
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        model_type="ministral3",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                "original_max_position_embeddings": 16384, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        windows=every_layer,
        read=variants.ministral3_from_hf,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        model_type="mixtral",
        gguf="llama",
        has_interleaved_rows=True,
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
        gguf="qwen2moe",
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
        gguf="qwen3moe",
        defaults={
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
            **NO_WINDOW,
        },
        bias_keys=("attention_bias",),
        has_qk_norm=True,
        experts=qwen_experts(default_count=128),
    ),
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        model_type="gpt_oss",
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128,
            "attention_bias": True, "rope_theta": 150000.0, "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        bias_keys=("attention_bias",),
        experts=gpt_oss_experts,
        windows=all_but_every(2),
        read=variants.gpt_oss_from_hf,
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
    has_experts = bool(fields.get(f"{kind}.expert_count"))
    families = [family for family in FAMILIES if family.gguf]
    for family in families:
        if kind == family.gguf and has_experts == (family.experts is not None):
            return family
    supported = ", ".join(dict.fromkeys(str(family.gguf) for family in families))
    what = f"architecture {kind!r}"
    if kind in supported.split(", "):
        what += " with experts (expert_count)" if has_experts else " without experts"
    raise fields.error(f"{what} is not supported; supported: {supported}")
