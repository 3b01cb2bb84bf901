"""Model configs: they equal those of transformers, or an error names the unsupported field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ModelError
from headway.model.config import ModelConfig, Rope, from_gguf, from_hf, load_hf
from headway.model.families.config_keys import OFF

torch.set_num_threads(1)
WINDOWED, FULL = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config_of(kind: str, **values: Any) -> Any:
    """A small config of transformers, which only this import loads: collecting needs none."""
    import transformers

    return getattr(transformers, f"{kind}Config")(**{**SMALL, **values})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": partial(config_of, "Llama"),
    "llama, tied": partial(config_of, "Llama", tie_word_embeddings=True),
    "llama, biases": partial(config_of, "Llama", attention_bias=True, mlp_bias=True),
    "llama, wide heads": partial(config_of, "Llama", head_dim=32),
    "mistral": partial(config_of, "Mistral", sliding_window=None),
    "qwen2": partial(config_of, "Qwen2", tie_word_embeddings=True),
    "qwen3": partial(config_of, "Qwen3", head_dim=24),
    "gemma3": partial(config_of, "Gemma3Text", head_dim=32, layer_types=[WINDOWED, WINDOWED, FULL]),
    "smollm3": partial(config_of, "SmolLM3", pad_token_id=0),
    "phi3": partial(config_of, "Phi3", pad_token_id=0),
    "olmo2": partial(config_of, "Olmo2", attention_bias=True),
    "olmo3": partial(config_of, "Olmo3"),
    "granite": partial(config_of, "Granite", mlp_bias=True),
    "ministral3": partial(config_of, "Ministral3", head_dim=16),
    "qwen3, biases": partial(config_of, "Qwen3", head_dim=16, attention_bias=True),
}
SLIDING: dict[str, Any] = {"sliding_window": 128, "use_sliding_window": True}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3, other": {
        "factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, betas": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16, "beta_slow": 2,
    },
    "yarn, ends unrounded": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False,
    },
    "yarn, own scale": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.7,
    },
    "yarn, two scales": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "mscale": 1.3,
        "mscale_all_dim": 0.8,
    },
}  # fmt: skip


@cache
def values_of(name: str) -> dict[str, Any]:
    """The values that config.json has."""
    values: dict[str, Any] = CONFIGS[name]().to_dict()
    return values


def read(**changes: Any) -> ModelConfig:
    """The config of a small Llama, with some values of its config.json changed."""
    return from_hf({**values_of("llama"), **changes}, "config.json")


def error_of(**changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        read(**changes)
    assert "config.json" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_equal_those_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = from_hf(CONFIGS[name]().to_dict(), name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert config.stored_shapes() == theirs
    assert config.num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_equal_those_of_transformers(name: str) -> None:
    theirs = CONFIGS[name]()
    config = from_hf(theirs.to_dict(), name)
    assert config.architecture == theirs.model_type.removesuffix("_text")
    assert config.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // 4)
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.max_model_len == theirs.max_position_embeddings
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.bos_id == theirs.bos_token_id
    assert config.eos_ids == ({theirs.eos_token_id} - {None})
    assert config.kv_bytes(2) == 2 * 3 * 2 * config.head_dim * 2


def test_architecture_is_read_from_architectures_before_model_type() -> None:
    config = from_hf(
        {**SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "?"}, "config.json"
    )
    assert config.architecture == "qwen3" and config.qk_norm and config.head_dim == 128


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("theta", [10_000.0, 100_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_that_of_transformers(name: str, theta: float, head_dim: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": theta, **ROPES[name]}
    long = {**SMALL, "max_position_embeddings": 131072, "head_dim": head_dim}
    theirs = config_of("Llama", **long, rope_parameters=parameters)
    rope = from_hf(theirs.to_dict(), name).rope
    if kind == "default":
        frequencies, scale = LlamaRotaryEmbedding(theirs).inv_freq, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    ours = rope.inverse_frequencies(head_dim)
    assert ours.dtype == np.float32 and ours.shape == (head_dim // 2,)
    # The last bits may differ: torch's float32 pow is not rounded the same way everywhere.
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=5e-7, atol=0)
    assert rope.scale == pytest.approx(scale, rel=1e-12)
    assert rope.theta == theta


@pytest.mark.parametrize("theta", [10.0, 1e4])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 4, "beta_slow": 4}])
@pytest.mark.parametrize("length", [16, 512, 32768])
def test_yarn_equals_that_of_transformers_at_its_limits(
    theta: float, betas: dict[str, Any], length: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0, "truncate": False}
    parameters |= {"original_max_position_embeddings": length, **betas}
    long = {**SMALL, "max_position_embeddings": 4 * length}
    theirs = config_of("Llama", **long, rope_parameters=parameters)
    rope = from_hf(theirs.to_dict(), "x").rope
    frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    np.testing.assert_allclose(rope.inverse_frequencies(16), frequencies.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_old_and_new_files_give_the_same_rope(name: str) -> None:
    kind = name.partition(",")[0]
    long = {"max_position_embeddings": 131072}
    new = read(**long, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **ROPES[name]})
    for key in ("type", "rope_type"):
        scaling = None if kind == "default" else {key: kind, **ROPES[name]}
        old = read(**long, rope_parameters=None, rope_scaling=scaling, rope_theta=5e5)
        assert old.rope == new.rope
    assert from_hf({**SMALL, "model_type": "llama"}, "x").rope == Rope(theta=10000.0)


FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0]}


@pytest.mark.parametrize("more", [{}, {"attention_factor": 0.8}, {"factor": 32.0}])
def test_longrope_of_both_lengths_equals_that_of_transformers(more: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "longrope", "partial_rotary_factor": 0.4, **FACTORS, **more}
    theirs = config_of(
        "Phi3", rope_parameters=parameters, original_max_position_embeddings=128,
        max_position_embeddings=4096,
    )  # fmt: skip
    rope = from_hf(theirs.to_dict(), "x").rope
    for length in (128, 129):
        frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](
            theirs, torch.device("cpu"), seq_len=length
        )
        found = rope.for_length(length)
        np.testing.assert_allclose(found.inverse_frequencies(16), frequencies.numpy(), rtol=5e-7)
        assert found.scale == pytest.approx(scale) and found.for_length(128) == rope
    older = {**parameters, "rope_type": None, "type": "su"}
    assert from_hf({**theirs.to_dict(), "rope_parameters": older}, "x").rope == rope
    with pytest.raises(ModelError, match="the rope has 2 factors; it needs one for each of 3"):
        short = {**parameters, "long_factor": [1.0, 2.0]}
        from_hf({**theirs.to_dict(), "rope_parameters": short}, "x")
    with pytest.raises(ModelError, match="gives 5 dimensions"):
        odd = {"rope_type": "default", "partial_rotary_factor": 0.35}
        from_hf({**theirs.to_dict(), "rope_parameters": odd}, "x")


def test_a_length_beside_the_rope_parameters_overrides_theirs() -> None:
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_parameters=parameters).rope.original_max_length == 128
    beside = read(rope_parameters=parameters, original_max_position_embeddings=256)
    assert beside.rope.original_max_length == 256
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_parameters=yarn).rope.original_max_length == 512
    missing = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert read(rope_parameters=missing).rope.factor == 512 / 128


def test_rope_divisors_divide_the_frequencies() -> None:
    plain = Rope(theta=10000.0).inverse_frequencies(8)
    divided = Rope(theta=10000.0, divisors=(1.0, 2.0, 4.0, 8.0)).inverse_frequencies(8)
    np.testing.assert_array_equal(divided, plain / np.float32([1, 2, 4, 8]))


@pytest.mark.parametrize(
    ("theirs", "of_every_layer", "of_some"),
    [
        (partial(config_of, "Mistral", sliding_window=128), 128, {}),
        (partial(config_of, "Mistral", sliding_window=512), None, {}),
        (partial(config_of, "Mistral", sliding_window=None), None, {}),
        (partial(config_of, "Qwen2", sliding_window=128), None, {}),
        (partial(config_of, "Qwen2", sliding_window=128, use_sliding_window=True), None, {}),
        (partial(config_of, "Qwen2", **SLIDING, max_window_layers=3), None, {}),
        (partial(config_of, "Qwen2", **SLIDING, max_window_layers=2), None, {2}),
        (partial(config_of, "Qwen3", **SLIDING, max_window_layers=0), 128, {}),
        (
            partial(config_of, "Qwen3", **{**SLIDING, "sliding_window": 512}, max_window_layers=0),
            None, {},
        ),
    ],
)  # fmt: skip
def test_only_an_effective_window_is_kept(
    theirs: Callable[[], Any], of_every_layer: int | None, of_some: set[int]
) -> None:
    described = theirs().to_dict()
    for values in (described, {**described, "layer_types": None}):
        config = from_hf(values, "config.json")
        assert config.attention_window == of_every_layer
        assert config.windowed_layers == set(of_some)
        assert config.sliding_window == (128 if of_some else None)
        assert config.cpu_only is None
        assert config.for_length(128).attention_window is None


def test_windows_of_families_without_them_and_of_files_that_do_not_say() -> None:
    assert "sliding_window 128 is below" in error_of(sliding_window=128)
    assert read(sliding_window=512) == read(sliding_window=128, use_sliding_window=False) == read()
    values = {**SMALL, "model_type": "mistral"}
    assert from_hf(values, "x").attention_window is None  # 4096 is above the model's length
    assert from_hf({**values, "max_position_embeddings": 8192}, "x").attention_window == 4096


def test_unsupported_values_are_named_with_the_supported_ones() -> None:
    text = error_of(architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in text and "Qwen3ForCausalLM" in text
    assert "'bert'" in error_of(architectures=None, model_type="bert")
    assert "'gelu'" in error_of(hidden_act="gelu") and "silu" in error_of(hidden_act="gelu")
    text = error_of(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4})
    assert "'dynamic'" in text and "llama3" in text
    assert "partial_rotary_factor" in error_of(partial_rotary_factor=0.5)
    assert "each type of layer" in error_of(rope_parameters={"full_attention": {"rope_theta": 1e4}})
    assert "GGUF" in error_of(quantization_config={"quant_method": "hqq"})


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -3}, "vocab_size is -3; it must be an integer from 1 to"),
        ({"num_hidden_layers": 1 << 30}, "it must be an integer from 1 to 10000"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_attention_heads": [4, 4]}, "num_attention_heads is [4, 4]"),
        ({"num_key_value_heads": 3}, "key-value heads, 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']"),
        (
            {"rope_parameters": {"rope_theta": 1.0}},
            "rope_theta is 1.0; it must be a number above 1",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        (
            {"rope_parameters": {**ROPES["llama3"], "rope_type": "llama3", "low_freq_factor": 4.0}},
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        ({"rope_scaling": "linear"}, "rope parameters are 'linear'"),
    ],
)
def test_an_invalid_value_is_named(changes: dict[str, Any], detail: str) -> None:
    assert detail in error_of(**changes)


def test_the_text_part_of_a_model_with_images_is_read() -> None:
    text = {**values_of("ministral3"), "architectures": None}
    fp8 = {
        "activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
        "modules_to_not_convert": ["model.vision_tower", "lm_head"], "weight_block_size": None,
    }  # fmt: skip
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "dtype": "bfloat16", "image_token_index": 10, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "quantization_config": fp8, "spatial_merge_size": 2,
        "text_config": text, "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1,
    }  # fmt: skip
    found = from_hf(whole, "config.json")
    assert found == from_hf({**text, "quantization_config": fp8}, "config.json")
    assert found.architecture == "ministral3" and found.quantization is not None
    for changes, detail in (
        ({"text_config": None}, "Mistral3ForConditionalGeneration is not supported"),
        ({"text_config": {**text, "model_type": "mamba"}}, "'mamba' is not supported"),
        ({"projector_depth": 2}, "projector_depth 2 is not supported"),
    ):
        with pytest.raises(ModelError, match=detail):
            from_hf({**whole, **changes}, "config.json")


# Config files of published models, without the numbers of token ids and sizes.
COMMON_KEYS: dict[str, Any] = {
    "hidden_act": "silu", "initializer_range": 0.02, "rope_scaling": None, "pad_token_id": 0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.51.0", "_name_or_path": "x", "bos_token_id": 1, "eos_token_id": [2],
}  # fmt: skip
QWEN_KEYS = {
    "attention_dropout": 0.0, "max_window_layers": 28, "rope_theta": 1e6, "sliding_window": 131072,
    "use_sliding_window": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"pretraining_tp": 1, "max_length": 4096}),
    "Llama 3.2": (
        "Llama",
        {
            "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "mlp_bias": False,
            "rope_scaling": {**ROPES["llama3"], "rope_type": "llama3"}, "rope_theta": 5e5,
        },
    ),
    "a copy of Llama 3 by Unsloth": ("Llama", {"unsloth_fixed": True, "unsloth_version": "2025.1"}),
    "SmolLM2": (
        "Llama",
        {
            "is_llama_config": True, "rope_interleaved": False, "rope_theta": 1e5,
            "transformers.js_config": {"dtype": "q4"}, "pretraining_tp": 1,
        },
    ),
    "Mistral 7B v0.1": ("Mistral", {"sliding_window": 4096}),
    "Mistral Nemo": ("Mistral", {"head_dim": 16, "sliding_window": None, "attention_dropout": 0.0}),
    "Qwen 2.5": ("Qwen2", QWEN_KEYS),
    "a Qwen 2.5 distilled from DeepSeek R1": ("Qwen2", {**QWEN_KEYS, "use_mrope": False}),
    "Qwen 3": ("Qwen3", {**QWEN_KEYS, "attention_bias": False, "head_dim": 16}),
    "SmolLM3": (
        "SmolLM3",
        {
            "attention_bias": False, "layer_types": [FULL] * 3, "max_window_layers": 28,
            "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0],
            "pretraining_tp": 2, "rope_theta": 5e6, "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 16,
            "initial_context_length": 4096, "layer_types": [WINDOWED, FULL, WINDOWED],
            "model_type": "gpt_oss", "num_experts_per_tok": 4, "num_local_experts": 32,
            "output_router_logits": False, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "truncate": False,
            },
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
                "quant_method": "mxfp4",
            },
            "sliding_window": 128, "swiglu_limit": 7.0,
        },
    ),
    "Phi 3 mini": ("Phi3", {"sliding_window": 2047, "auto_map": {}, "embd_pdrop": 0.0}),
    "Phi 4 mini": (
        "Phi3",
        {
            "attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
            "lm_head_bias": False, "mlp_bias": False, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.375, "resid_pdrop": 0.0, "sliding_window": 262144,
            "rope_scaling": {"type": "longrope", **FACTORS}, "rope_theta": 1e4,
        },
    ),
    "OLMo 2": ("Olmo2", {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 5e5}),
    "OLMo 3": (
        "Olmo3",
        {
            "attention_bias": False, "layer_types": [WINDOWED] * 2 + [FULL], "rope_theta": 5e5,
            "rope_scaling": {**ROPES["yarn, betas"], "rope_type": "yarn", "attention_factor": 1.2},
            "sliding_window": 4096,
        },
    ),
    "Granite 3.3": (
        "Granite",
        {
            "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
            "logits_scaling": 8.0, "mlp_bias": False, "residual_multiplier": 0.22,
            "rope_theta": 1e7,
        },
    ),
    "Gemma 3 270M": (
        "Gemma3",
        {
            "_sliding_window_pattern": 6, "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "cache_implementation": "hybrid", "hidden_act": None,
            "final_logit_softcapping": None, "head_dim": 16, "layer_types": [WINDOWED] * 2 + [FULL],
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window": 512,
            "use_bidirectional_attention": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_models_are_understood(name: str) -> None:
    kind, values = PUBLISHED[name]
    named = {"architectures": [f"{kind}ForCausalLM"], "max_position_embeddings": 131072}
    assert from_hf({**SMALL, **COMMON_KEYS, **named, **values}, "x").num_params > 0


def test_a_key_that_is_not_understood_is_refused_unless_it_is_off() -> None:
    assert "use_router 'fast' is not supported" in error_of(use_router="fast")
    assert "use_router False is not supported" in error_of(use_router=False)
    assert read(use_router=None) == read(num_labels=7, temperature=0.5, dtype="float16") == read()
    for key, off in OFF.items():
        if key not in values_of("llama"):
            assert read(**{key: off}) == read()
            assert key in error_of(**{key: 17.0})
    for key in ("attention_bias", "mlp_bias"):  # of other families
        with pytest.raises(ModelError, match=key):
            from_hf({**values_of("mistral"), key: True}, "x")
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert "rope parameters: mrope_section" in error_of(
        rope_parameters={**scaled, "mrope_section": [2, 3, 3]}
    )


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=3,
)


@settings(max_examples=300, deadline=None)
@given(base=st.sampled_from(sorted(CONFIGS)), junk=st.data())
def test_random_values_are_read_or_rejected(base: str, junk: st.DataObject) -> None:
    values = dict(values_of(base))
    names = [*values, "rope_scaling", "quantization_config", "original_max_position_embeddings"]
    values[junk.draw(st.sampled_from(sorted(names)))] = junk.draw(JUNK)
    rope = {"rope_type": junk.draw(st.sampled_from(("linear", "llama3", "yarn")))}
    rope |= junk.draw(st.dictionaries(st.sampled_from(sorted({*ROPES["llama3"], "mscale"})), JUNK))
    for changed in (values, {**values, "rope_parameters": rope}):
        try:
            assert from_hf(changed, "x").num_params > 0
        except ModelError as error:
            assert str(error).startswith("x: ")


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SMALL, "model_type": "llama", "eos_token_id": 7}))
    assert load_hf(tmp_path).eos_ids == {7} and load_hf(tmp_path) == load_hf(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_hf(tmp_path).eos_ids == {7, 9}
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_hf(tmp_path).eos_ids == {7}


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_a_broken_config_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ModelError, match=str(file)):
        load_hf(tmp_path)


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 3,
    "llama.feed_forward_length": 112,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
    "llama.rope.freq_base": 5e5,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.tokens": [str(n) for n in range(96)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}


def read_other_gguf(kind: str, **changes: Any) -> ModelConfig:
    """The same with the keys of another architecture."""
    own = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    values = {k.replace("llama.", f"{kind}."): v for k, v in {**GGUF, **own}.items()}
    return from_gguf({**values, "general.architecture": kind}, "m.gguf", tensors=["output.weight"])


def test_gguf_and_config_json_of_other_families_give_the_same_config() -> None:
    more: dict[str, Any] = {"eos_token_id": [2, 5], "bos_token_id": 1, "rope_theta": 5e5}
    more["tie_word_embeddings"] = False
    for kind, theirs, keys in (
        ("SmolLM3", {"num_hidden_layers": 9}, {"block_count": 9}),
        ("Olmo2", {}, {}),
        (
            "Granite",
            {
                "attention_multiplier": 0.5, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                "residual_multiplier": 0.22,
            },
            {"attention__scale": 0.5, "embedding_scale": 12.0, "logit_scale": 8.0,
             "residual_scale": 0.22},
        ),
    ):  # fmt: skip
        config = from_hf(config_of(kind, **more, **theirs).to_dict(), "x")
        assert read_other_gguf(kind.lower(), **keys) == config


def test_what_runs_on_a_gpu_is_known_from_the_config() -> None:
    reasons = {name: from_hf(values_of(name), "x").cpu_only for name in CONFIGS}
    assert not any(reasons.values())
    listed = {**values_of("smollm3"), "no_rope_layers": [1, 0, 1]}
    assert from_hf(listed, "x").cpu_only is None


def read_gguf(*tensors: str, **changes: Any) -> ModelConfig:
    """The config of a small GGUF file; `__` in a key stands for a dot."""
    values = {**GGUF, **{f"llama.{k.replace('__', '.')}": v for k, v in changes.items()}}
    return from_gguf(values, "m.gguf", tensors=tensors)


def test_gguf_and_config_json_give_the_same_config() -> None:
    theirs = config_of("Llama", eos_token_id=[2, 5], rope_theta=5e5).to_dict()
    assert read_gguf("output.weight") == from_hf(theirs, "x")


def test_gguf_tensors_decide_tied_embeddings_and_biases() -> None:
    plain = read_gguf()
    assert plain.tie_embeddings and not (plain.qkv_bias or plain.output_bias or plain.mlp_bias)
    full = read_gguf(
        "output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"
    )
    assert not full.tie_embeddings and full.qkv_bias and full.output_bias and full.mlp_bias


def test_gguf_rope_scaling() -> None:
    assert read_gguf(rope__scaling__type="none").rope == Rope(theta=5e5)
    linear = Rope(theta=5e5, kind="linear", factor=4.0)
    assert read_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope == linear
    assert read_gguf(rope__scale_linear=4.0).rope == linear
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    rope = read_gguf(**yarn, rope__scaling__original_context_length=128).rope
    theirs = Rope(theta=5e5, kind="yarn", factor=4.0, original_max_length=128)
    assert rope.scale == theirs.scale > 1
    np.testing.assert_array_equal(rope.inverse_frequencies(16), theirs.inverse_frequencies(16))
    stretched = read_gguf(**yarn, rope__scaling__attn_factor=2.0).rope
    assert stretched.scale == pytest.approx(2 * theirs.scale)


def test_gguf_rope_divisors_are_kept() -> None:
    divisors = tuple(float(n) for n in range(1, 9))
    config = from_gguf(GGUF, "m.gguf", tensors=(), divisors=divisors)
    assert config.rope == Rope(theta=5e5, divisors=divisors)
    with pytest.raises(ModelError, match="rope_freqs has 3 .*8"):
        from_gguf(GGUF, "m.gguf", tensors=(), divisors=(1.0, 2.0, 3.0))
    with pytest.raises(ModelError, match=r"rope_freqs.*rope\.scaling"):
        scaled = {**GGUF, "llama.rope.scaling.factor": 2.0}
        from_gguf(scaled, "m.gguf", tensors=(), divisors=divisors)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": 1 << 30}, "it must be an integer from 1 to 10000"),
        ({"attention__head_count": [4, 4, 4]}, "head_count is [4, 4, 4]"),
        ({"expert_count": 8}, "expert_used_count is missing"),
        ({"attention__sliding_window": 128}, "sliding_window 128"),
        ({"attention__value_length": 8}, "attention.key_length (16)"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is not supported"),
        ({"context_length": 0}, "context_length is 0"),
    ],
)
def test_an_unsupported_gguf_is_rejected_by_name(changes: dict[str, Any], detail: str) -> None:
    with pytest.raises(ModelError) as error:
        read_gguf(**changes)
    assert detail in str(error.value) and str(error.value).startswith("m.gguf: ")


def test_an_unknown_gguf_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'gemma2'.*llama, qwen2, qwen3, gemma3, smollm3"):
        from_gguf({**GGUF, "general.architecture": "gemma2"}, "m.gguf", tensors=())


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from(sorted(GGUF)), value=JUNK)
def test_random_gguf_values_are_read_or_rejected(key: str, value: Any) -> None:
    try:
        assert from_gguf({**GGUF, key: value}, "m.gguf", tensors=()).num_params >= 0
    except ModelError as error:
        assert str(error).startswith("m.gguf: ")


def gemma_values(**changes: Any) -> dict[str, Any]:
    """A config.json of the form that the published models have, which older versions wrote."""
    return {
        **SMALL, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "num_hidden_layers": 12, "sliding_window": 64, "head_dim": 32, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 32, **changes,
    }  # fmt: skip


def gemma_metadata(**changes: Any) -> dict[str, Any]:
    """The metadata of a GGUF file of the same model; `__` in a key stands for a dot."""
    own = {
        "block_count": 12, "context_length": 512, "embedding_length": 64,
        "feed_forward_length": 112, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 64, "vocab_size": 96,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    return {"general.architecture": "gemma3", **{f"gemma3.{k}": v for k, v in own.items()}}


def read_gemma(**changes: Any) -> ModelConfig:
    return from_gguf(gemma_metadata(**changes), "m.gguf", tensors=[])


def test_both_files_of_a_gemma_give_one_config() -> None:
    found = from_hf(gemma_values(), "config.json")
    assert found.windowed_layers == frozenset(range(12)) - {5, 11}
    assert (found.rope.theta, found.window_rope) == (1e6, Rope(theta=1e4))
    assert found.embedding_scale == 8.0 and found.attention_scale == 32**-0.5
    assert found.tie_embeddings and found.has_output_norms and found.norm_offset == 1.0
    stored = read_gemma()
    assert stored.norm_offset == 0.0  # llama.cpp's converter adds the 1
    assert replace(stored, norm_offset=1.0) == found


def test_parameters_of_a_gemma_are_found_in_every_form() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    nested = {FULL: {"rope_theta": 5e5, **linear}, WINDOWED: {"rope_theta": 2e4}}
    for changes, theta, local in (
        ({"rope_scaling": linear}, 1e6, 1e4),
        ({"rope_parameters": nested, "rope_theta": None}, 5e5, 2e4),
    ):
        found = from_hf(gemma_values(**changes), "config.json")
        assert found.rope == Rope(theta=theta, kind="linear", factor=8.0)
        assert found.window_rope == Rope(theta=local)
    assert read_gemma(rope__scaling__factor=8.0).rope.factor == 8.0
    kinds = [WINDOWED, FULL] * 6
    assert from_hf(gemma_values(layer_types=kinds), "c").windowed_layers == set(range(0, 12, 2))
    found = from_hf(gemma_values(layer_types=[WINDOWED] * 12), "c")
    assert found.attention_window == 64 and found.rope == Rope(theta=1e4)
    found = from_hf(gemma_values(sliding_window_pattern=3), "c")
    assert found.windowed_layers == {n for n in range(12) if n % 3 != 2}
    found = read_gemma(attention__sliding_window_pattern=[True, False] * 6)
    assert found.windowed_layers == {*range(0, 12, 2)}
    assert not read_gemma(attention__sliding_window=0).windowed_layers
    largest = read_gemma(block_count=62)
    assert largest.attention_scale == 16**-0.5  # hidden size over heads, not the head size
    found = from_hf(gemma_values(architectures=None), "config.json")
    assert found.architecture == "gemma3"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ({"architectures": None, "model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"layer_types": [WINDOWED]}, "layer_types is .* 12 entries"),
        ({"layer_types": ["linear_attention"] * 12}, "layer_types is"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters is .* only full_attention"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'"),
    ],
)
def test_an_unsupported_gemma_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"config.json: .*{named}"):
        from_hf(gemma_values(**changes), "config.json")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"attention__sliding_window_pattern": [True]}, "has 1 entries for 12 layers"),
        ({"attention__sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"block_count": 5}, "all 5 layers"),
    ],
)
def test_an_unsupported_gemma_file_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=rf"m.gguf: .*{named}"):
        read_gemma(**changes)
