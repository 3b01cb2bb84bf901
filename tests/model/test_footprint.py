"""The memory of a model before it is loaded: that of the loaded model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from headway.errors import ConfigError
from headway.model.backends.base import Backend, kv_itemsize
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.footprint import Footprint, footprint
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, why_not_native
from headway.model.weights.checkpoint import Checkpoint, DummyCheckpoint
from headway.model.weights.fp8 import float_layers
from tests.model.test_checkpoint import VALUES, encoded, weights_of, write_gguf
from tests.support import quantized

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = {**VALUES, "vocab_size": 128, "intermediate_size": 192}
EXPERTS = {
    "model_type": "qwen2_moe", "moe_intermediate_size": 32, "num_experts": 31,  # and a gate: 32 rows
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 20,
    "sliding_window_pattern": 3, "head_dim": 32,
}  # fmt: skip
MODELS = {"llama": {}, "biases": {"attention_bias": True}, "experts": EXPERTS, "windows": GEMMA}


def config_of(**changes: Any) -> ModelConfig:
    return from_hf({**SIZES, **changes}, "config.json")


def check(checkpoint: Checkpoint, backend: Backend, found: Footprint) -> None:
    """Compare with the loaded model; vectors are in the type of the model's floats."""
    model, config = Decoder(checkpoint, backend), checkpoint.config
    itemsize = model.norm.itemsize
    vectors = sum(shape[0] for shape in config.shapes().values() if len(shape) == 1)
    assert found.weights == model.num_bytes + itemsize * vectors
    experts = [layer.experts for layer in model.layers if layer.experts]
    assert found.experts == sum(each.expert_bytes for each in experts)
    looked_up = 0 if config.tie_embeddings else model.embedding.num_bytes
    assert found.read == found.weights - found.experts - looked_up
    each = kv_itemsize(backend, config)
    for windowed, kv in ((False, found.kv), (True, found.window_kv)):
        assert kv == config.layers_of_kind(windowed=windowed).kv_bytes(each)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_loaded_model(name: str, dtype: str) -> None:
    checkpoint = DummyCheckpoint(config_of(**MODELS[name]))  # type: ignore[arg-type]
    backend = choose_backend(checkpoint.config, dtype)
    check(checkpoint, backend, footprint(checkpoint, CPU, dtype))


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
@pytest.mark.parametrize(
    "source", ["floats", "experts", Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, "awq", "partly awq"]
)
def test_sizes_of_quantized_models_are_those_of_the_loaded_ones(
    source: Any, tmp_path: Path
) -> None:
    config = config_of(**EXPERTS if source == "experts" else {})
    checkpoint: Checkpoint = DummyCheckpoint(config)
    if isinstance(source, Kind):
        written = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encoded(source))
        checkpoint = open_checkpoint(written)
    elif source in ("awq", "partly awq"):
        kept = ("up_proj",) if source == "partly awq" else ()
        config_json = quantized.AWQ | {"group_size": 64, "modules_to_not_convert": [*kept]}
        quantized.write(
            tmp_path, quantized.SCHEMES["awq"], kept=kept, quantization_config=config_json
        )
        checkpoint = open_checkpoint(tmp_path)
    backend = choose_backend(checkpoint.config, "int8", kv_dtype=torch.int8)
    check(checkpoint, backend, footprint(checkpoint, CPU, "auto", "int8", "int8"))


def test_sizes_on_a_gpu_need_no_gpu() -> None:
    config = config_of(hidden_size=2048, num_hidden_layers=1)
    floats = footprint(DummyCheckpoint(config), GPU)
    assert (floats.precision, floats.weights) == ("bfloat16", 2 * config.num_params)
    assert floats.kv == 2 * footprint(DummyCheckpoint(config), GPU, kv_cache_dtype="fp8").kv
    found = footprint(DummyCheckpoint(config), GPU, quantization="fp8")
    matrices = [s for n, s in config.shapes().items() if ".layers." in n and len(s) == 2]
    saved = sum(rows * columns - 4 * rows for rows, columns in matrices)
    assert floats.weights - found.weights == saved and not float_layers(config)
    stored = quantized.VALUES | {"quantization_config": quantized.SCHEMES["compressed fp8"].config}
    assert footprint(DummyCheckpoint(from_hf(stored, "config.json")), GPU).precision == "fp8"
    for device, quantization in ((CPU, "fp8"), (GPU, "int8")):
        with pytest.raises(ConfigError, match=f"quantization {quantization}"):
            footprint(DummyCheckpoint(config), device, quantization=quantization)
    with pytest.raises(ConfigError, match="multiples of 16"):
        footprint(DummyCheckpoint(config_of(intermediate_size=100)), GPU, quantization="fp8")


@pytest.mark.parametrize(
    ("scheme", "precision"), [("awq", "int4"), ("compressed fp8", "fp8"), ("awq", "int8")]
)
def test_one_part_in_floats_keeps_a_merged_matrix_in_floats(scheme: str, precision: str) -> None:
    """Of gate and up, and of q, k and v, which a loaded model has in one matrix."""
    device, quantization = (CPU, "int8") if precision == "int8" else (GPU, None)

    def found(*kept: str) -> Footprint:
        given = from_hf(
            quantized.VALUES | {"quantization_config": quantized.SCHEMES[scheme].config}, "here"
        )
        assert given.quantization is not None
        own = replace(given, quantization=replace(given.quantization, kept=kept))
        return footprint(DummyCheckpoint(own), device, quantization=quantization)

    assert found().precision == precision
    assert found("up_proj") == replace(
        found("up_proj", "gate_proj"), config=found("up_proj").config
    )
    assert found("k_proj").weights == found("q_proj", "k_proj", "v_proj").weights
    assert found("o_proj").weights >= found().weights


def test_the_longest_request_is_the_longest_that_fits() -> None:
    whole = footprint(DummyCheckpoint(config_of(**GEMMA)), CPU)
    for found in (whole, replace(whole, window_kv=0, window=0)):
        for room in range(0, 40 * (found.kv + found.window_kv), 1111):
            longest = found.longest(room, limit=30)
            assert found.request(longest) <= room and 0 <= longest <= 30
            assert longest == 30 or found.request(longest + 1) > room
