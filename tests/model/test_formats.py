"""Quantized safetensors formats: each gives the numbers of its reference, whole and in parts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.errors import ModelError
from headway.model.backends.native import weights as packing
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.native.forms import Form
from headway.model.backends.plain import PlainBackend
from headway.model.config import from_hf
from headway.model.decoder import Decoder
from headway.model.families.fields import Fields
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, why_not_native
from headway.model.quantization import stored_quantization
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix
from headway.model.weights.mxfp4 import dequantize
from headway.model.weights.quantized_tensors import QuantizedTensors
from headway.model.weights.safetensors_files import TensorFiles
from tests.support import quantized, real, write_compressed
from tests.support.quantized import AWQ, GPTQ, MAKER, SCHEMES, Tensors, compressed

Q_PROJ, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
Opened = Callable[[str], tuple[Checkpoint, Tensors]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Open the model of a scheme; and its weights in float32. Made on demand."""
    made: dict[str, tuple[Checkpoint, Tensors]] = {}

    def find(name: str) -> tuple[Checkpoint, Tensors]:
        if name not in made:
            folder = tmp_path_factory.mktemp("format")
            floats = quantized.write(folder, SCHEMES[name])
            made[name] = open_checkpoint(folder), floats
        return made[name]

    return find


def matrices(floats: Tensors) -> list[str]:
    return [name for name in floats if "_proj" in name]


def expand(groups: QuantizedMatrix) -> Tensor:
    q = groups.q.reshape(*groups.scale.shape, 32).float()
    return (groups.scale[..., None] * q + groups.minimum[..., None]).reshape(groups.q.shape)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_tensor_has_the_numbers_that_were_encoded(opened: Opened, name: str) -> None:
    checkpoint, floats = opened(name)
    for each, expected in floats.items():
        found = checkpoint.read(each)
        assert found.dtype == torch.float32 and torch.equal(found, expected), each
        assert checkpoint.has(each)


@pytest.mark.parametrize("name", SCHEMES)
def test_groups_and_fp8_have_the_same_numbers(opened: Opened, name: str) -> None:
    checkpoint, floats = opened(name)
    scheme = SCHEMES[name]
    for each in matrices(floats):
        groups, fp8 = checkpoint.read_groups(each), checkpoint.read_fp8(each)
        assert (groups is None) == (scheme.bits is None) and (fp8 is not None) == scheme.has_fp8
        if groups is not None:
            assert groups.bits == scheme.bits and int(groups.q.max()) < 1 << groups.bits
            assert torch.equal(expand(groups), floats[each])
        if fp8 is not None:
            assert torch.equal(fp8.wide(), floats[each])
    assert checkpoint.read_groups("lm_head.weight") is None


@pytest.mark.parametrize("name", SCHEMES)
def test_a_part_equals_the_cut_of_the_whole(opened: Opened, name: str) -> None:
    checkpoint, floats = opened(name)
    draw = random.Random(name)
    for each in matrices(floats)[:7]:
        rows, columns = (sorted(draw.sample(range(size + 1), 2)) for size in floats[each].shape)
        part = Part(slice(*rows), slice(*columns))
        assert torch.equal(checkpoint.read(each, part), floats[each][part])
        some = Part(part.rows)  # as matrices with other inputs are divided
        if (fp8 := checkpoint.read_fp8(each, some)) is not None:
            assert torch.equal(fp8.wide(), floats[each][some])
        aligned = [32 * place for place in sorted(draw.sample(range(3), 2))]
        for columns in (aligned, [7, 39], [9, 40]):
            part = Part(part.rows, slice(*columns))
            groups = checkpoint.read_groups(each, part)
            assert groups is not None or columns != aligned or SCHEMES[name].bits is None
            assert groups is None or torch.equal(expand(groups), floats[each][part])


def test_matrices_of_the_text_part_of_a_model_with_images_are_found(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        for key in list(stored):
            stored[f"language_model.{key}"] = stored.pop(key)

    scheme = SCHEMES["fp8 with a scale per matrix"]
    floats = quantized.write(tmp_path, scheme, change)
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(name), floats[name]) for name in floats)
    assert checkpoint.read_fp8(f"{DOWN}.weight") is not None


@pytest.mark.parametrize("name", SCHEMES)
def test_a_missing_or_wrong_tensor_is_named(name: str, tmp_path: Path) -> None:
    """For each tensor of a format: it is missing, has another shape, or has another type."""
    quantized.write(tmp_path, SCHEMES[name], num_hidden_layers=1)
    file, down = tmp_path / "model.safetensors", DOWN.replace("1", "0")
    stored = load_file(file)
    for key in [key for key in stored if key.startswith(f"{down}.")]:
        old = stored.pop(key)
        changed = {
            "shape|differs|order": torch.cat((old, old)) if old.dim() else torch.ones(3),
            "type|differs|order|stored too": old.double() + 1,
        }
        if not key.endswith("g_idx") or "trivial" in name:
            changed["is missing"] = None
        for problem, new in changed.items():
            save_file(stored if new is None else stored | {key: new}, file)
            checkpoint = open_checkpoint(tmp_path)
            checkpoint.read(f"{Q_PROJ.replace('1', '0')}.weight")
            with pytest.raises(ModelError, match=f"{down}.*({problem})"):
                checkpoint.read(f"{down}.weight")
        stored[key] = old


O_PROJ = ("o_proj",)
LISTS = [
    ("awq", "modules_to_not_convert", ["o_proj"]),
    ("gptq", "dynamic", {r"-:.*\.o_proj": {}}),
    (
        "fp8 in blocks",
        "modules_to_not_convert",
        [f"model.layers.{n}.self_attn.o_proj" for n in (0, 1)],
    ),
    ("w4a16", "ignore", ["lm_head", r"re:.*o_proj$"]),
    ("w8a8", "ignore", ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn"]),
]


@pytest.mark.parametrize(("name", "key", "listed"), LISTS)
def test_matrices_in_floats_are_read_as_floats(
    name: str, key: str, listed: Any, tmp_path: Path
) -> None:
    """Whether they are listed or not; one that is listed and quantized is an error."""
    scheme = SCHEMES[name]
    for config in (scheme.config, scheme.config | {key: listed}):
        floats = quantized.write(tmp_path, replace(scheme, config=config), kept=O_PROJ)
        checkpoint, each = open_checkpoint(tmp_path), f"{Q_PROJ[:-6]}o_proj.weight"
        assert torch.equal(checkpoint.read(each), floats[each])
        assert checkpoint.read_groups(each) is None and checkpoint.read_fp8(each) is None
        assert torch.equal(checkpoint.read(f"{DOWN}.weight"), floats[f"{DOWN}.weight"])
    quantized.write(tmp_path, replace(scheme, config=config))
    with pytest.raises(ModelError, match=r"o_proj\S* is quantized, but the config keeps"):
        open_checkpoint(tmp_path).read(each)


@pytest.mark.parametrize("name", ["awq", "w8a8"])
def test_scales_must_be_numbers(name: str, tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        scale = next(key for key in stored if DOWN in key and "scale" in key)
        stored[scale][0, 0] = torch.nan

    quantized.write(tmp_path, SCHEMES[name], change)
    with pytest.raises(ModelError, match=f"scales of {DOWN}.weight are NaN"):
        open_checkpoint(tmp_path).read(f"{DOWN}.weight")


def test_inputs_in_another_order_are_refused(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        stored[f"{DOWN}.g_idx"] = stored[f"{DOWN}.g_idx"].flip(0).contiguous()

    def without(stored: Tensors) -> None:
        del stored[f"{DOWN}.g_idx"]

    quantized.write(tmp_path, SCHEMES["gptq"], change)
    with pytest.raises(ModelError, match=rf"{DOWN}\.g_idx .*act-order is not supported"):
        open_checkpoint(tmp_path).read(f"{DOWN}.weight")
    ordered = replace(SCHEMES["gptq"], config=GPTQ | {"bits": 4, "desc_act": True})
    quantized.write(tmp_path, ordered, without)
    with pytest.raises(ModelError, match=rf"{DOWN}\.g_idx is missing"):
        open_checkpoint(tmp_path).read(f"{DOWN}.weight")


def test_zero_points_of_symmetric_weights_are_refused(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        stored[f"{DOWN}.weight_zero_point"] = torch.ones(64, 1, dtype=torch.int8)

    quantized.write(tmp_path, SCHEMES["w8a8"], change)
    with pytest.raises(ModelError, match=r"weight_zero_point is not zero, .*symmetric"):
        open_checkpoint(tmp_path).read(f"{DOWN}.weight")


def int4(**changes: Any) -> dict[str, Any]:
    made = compressed("pack-quantized", 4, "int", "group", group_size=64)
    made["config_groups"]["group_0"]["weights"] |= changes
    return made


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("fp8", "'fp8'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "auto-round"}, "'auto-round'"),
        (MAKER | {"weight_block_size": [128]}, "2 integers"),
        (MAKER | {"quant_method": ["fp8"]}, "quant_method"),
        (MAKER | {"weight_block_size": [128, 0]}, "2 integers"),
        (MAKER | {"modules_to_not_convert": "lm_head"}, "list of names"),
        (compressed("nvfp4-pack-quantized", 4, "float", "tensor_group"), "nvfp4-pack-quantized"),
        (compressed("mixed-precision", 4, "int", "group"), "mixed-precision"),
        (int4(num_bits=3), "int3"),
        (int4(group_size=0), "group_size is 0"),
        (int4(strategy="tensor_group"), "'tensor_group'"),
        (int4(actorder="group"), "actorder 'group'"),
        (int4() | {"config_groups": {}}, "config_groups"),
        (int4() | {"config_groups": {"a": 1}}, "must be an object"),
        (int4() | {"ignore": ["re:("]}, "pattern"),
        (int4() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (int4() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (int4() | {"config_groups": int4()["config_groups"] | {
            "b": int4(group_size=32)["config_groups"]["group_0"]}}, "2 schemes"),
        (compressed("float-quantized", 8, "float", "group"), "strategy 'group'"),
        (AWQ | {"group_size": 128, "version": "gemv"}, "gemv"),
        (AWQ | {"group_size": 128, "zero_point": False}, "zero_point False"),
        (AWQ | {"group_size": 128, "bits": 8}, "8 bits"),
        (AWQ | {"group_size": 128, "rotation": "hadamard"}, "rotation"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ, "bits is missing"),
        (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ | {"bits": 4, "is_marlin_format": True}, "marlin"),
        (GPTQ | {"bits": 4, "format": "marlin"}, "'marlin'"),
        (AWQ | {"group_size": 128, "version": None, "format": "gemv"}, "gemv"),
        (MAKER | {"expert_dtype": "fp4"}, "fp4"),
        (GPTQ | {"bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{named}"):
        from_hf(quantized.VALUES | {"quantization_config": config}, "config.json")


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].bits])
def test_the_quantized_kernels_get_the_numbers_of_the_file(opened: Opened, name: str) -> None:
    """They keep scales and minimums in float16, so a minimum may be rounded."""
    if reason := why_not_native():
        pytest.skip(reason)
    checkpoint, floats = opened(name)
    bits, module = SCHEMES[name].bits, DOWN
    assert bits is not None
    backend = NativeBackend(is_quantized=True, forms={"down": Form(bits, packing.GROUP)})
    weight = backend.weight(checkpoint, [module])
    assert weight.struct.bits == bits and weight.struct.group == packing.GROUP
    found, expected = weight.rows(torch.arange(64)), floats[f"{module}.weight"]
    if "zero" in name or "awq" in name or "gptq" in name or name == "w8a16":
        groups = checkpoint.read_groups(f"{module}.weight")
        assert groups is not None
        most = groups.minimum.abs().max() * 2.0**-11
        torch.testing.assert_close(found, expected, rtol=0, atol=float(most))
    else:
        assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {str(n): torch.randint(2, 128, (n,), generator=generator).tolist() for n in (3, 40)}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_generates_the_tokens_of_its_dequantized_weights(
    opened: Opened, name: str, prompts: dict[str, list[int]], tmp_path: Path
) -> None:
    checkpoint, floats = opened(name)
    (tmp_path / "config.json").write_text(json.dumps(quantized.VALUES), encoding="utf-8")
    save_file(floats, tmp_path / "model.safetensors")
    settings: dict[str, Any] = {"num_blocks": 24, "max_num_batched_tokens": 16}
    outputs = [
        real.Trial(Decoder(source, choose_backend(source.config, "float32")), **settings).ask_one(
            prompts, 8
        )
        for source in (checkpoint, open_checkpoint(tmp_path))
    ]
    assert outputs[0] == outputs[1]


def test_experts_may_be_quantized(prompts: dict[str, list[int]], tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "moe_intermediate_size": 64,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip
    folders = tmp_path / "awq", tmp_path / "floats"
    floats = quantized.write(folders[0], SCHEMES["awq"], kept=("mlp.gate",), **values)
    assert sum("experts" in name for name in floats) == 2 * 4 * 3
    folders[1].mkdir()
    (folders[1] / "config.json").write_text(json.dumps(quantized.VALUES | values))
    save_file(floats, folders[1] / "model.safetensors")
    outputs = [
        real.Trial(Decoder(open_checkpoint(folder), PlainBackend()), num_blocks=24).ask_one(
            prompts, 6
        )
        for folder in folders
    ]
    assert outputs[0] == outputs[1]


def test_mxfp4_numbers_are_a_4_bit_float_times_a_power_of_two() -> None:
    random = np.random.default_rng(2)
    blocks, scales = (random.integers(0, 255, s, np.uint8) for s in ((3, 10, 4, 16), (3, 10, 4)))
    scales[0, 0, :3] = 0, 1, 254
    q = np.stack((blocks % 16, blocks // 16), -1).reshape(3, 10, 4, 32)
    sign, exponent, half = 1.0 - q // 8 * 2.0, q // 2 % 4, q % 2
    size = np.where(exponent > 0, (1 + half / 2) * 2.0 ** (exponent - 1.0), half / 2)
    with np.errstate(over="ignore"):  # the largest become infinite
        expected = (sign * size * 2.0 ** (scales[..., None] - 127.0)).astype(np.float32)
    found = dequantize(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(found.numpy(), expected.reshape(3, 10, 128))
    scales[1, 2, 3] = 255
    found = dequantize(torch.from_numpy(blocks), torch.from_numpy(scales))
    assert found[1, 2, 96:].isnan().all() and not found[1, 2, :96].isnan().any()


@pytest.mark.parametrize("name", write_compressed.SCHEMES)
def test_numbers_are_those_of_the_compressed_tensors_package(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(write_compressed.FILE)
    with safe_open(write_compressed.FILE, framework="pt") as file:
        config = json.loads(file.metadata()["configs"])[name]
        expected = file.get_tensor(f"{name}.expected")
    given = stored_quantization(Fields({"quantization_config": config}, "config.json"))
    assert given is not None
    matrices = QuantizedTensors(given, TensorFiles(tmp_path))
    assert matrices.has(f"{name}.weight")
    found = matrices.read(f"{name}.weight", write_compressed.SHAPE, EVERYTHING).wide()
    assert torch.equal(found.to(expected.dtype), expected)


def test_the_configs_that_transformers_writes_are_understood() -> None:
    """With all keys, also those that say how the weights were found."""
    gptq = {
        "act_group_aware": True, "backend": "auto", "batch_size": 1, "cache_block_outputs": True,
        "damp_percent": 0.1, "dataset": "c4", "desc_act": False, "group_size": 128, "meta": None,
        "modules_in_block_to_quantize": None, "sym": True, "true_sequential": True,
    }  # fmt: skip
    fp8 = {"modules_to_convert": None, "dequantize": False, "scale_fmt": "float"}
    written = {
        "awq, 4 bits, groups of 128": gptq | AWQ | {"format": "gemm"},
        "gptq, 8 bits, a scale per output": gptq
        | {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq"},
        "fp8, 8 bits, blocks of 128 x 64": MAKER | fp8
        | {"expert_dtype": "fp8", "weight_block_size": [128, 64]},
        "fp8, 8 bits, a scale per output": MAKER | fp8 | {"activation_scheme": "static"},
    }  # fmt: skip
    for text, config in written.items():
        fields = Fields({"quantization_config": config}, "config.json")
        assert str(stored_quantization(fields)) == text


def test_newer_gptq_names_its_version_in_another_key() -> None:
    config = GPTQ | {"bits": 4, "format": "gptq_v2"}
    given = stored_quantization(Fields({"quantization_config": config}, "config.json"))
    assert given is not None and given.zero_offset == 0
