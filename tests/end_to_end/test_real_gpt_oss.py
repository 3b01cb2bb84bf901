"""gpt-oss: equal to transformers, with experts in floats and in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError, ModelError
from headway.model.backends.native import weights as packing
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.config import from_hf, load_hf
from headway.model.decoder import Decoder
from headway.model.footprint import footprint
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, why_not_native
from headway.model.sharding import Part, check_size
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.mxfp4 import INTEGERS
from tests.end_to_end.test_real_families import (
    BACKENDS,
    Family,
    check_against_transformers,
    rope,
    save,
)

native_only = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
YARN = {"factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
HIDDEN, INNER, NUM_EXPERTS = 128, 64, 5
FAMILY = Family(
    "GptOss",
    rope("yarn", **YARN) | {
        "intermediate_size": INNER, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
        "sliding_window": 20, "hidden_size": HIDDEN,
    },
)  # fmt: skip
STACKS = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


class Saved(NamedTuple):
    floats: Path
    mxfp4: Path
    reference: Any  # transformers' model of both


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model whose experts were made from MXFP4 by transformers; its sinks take some attention."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    floats, packed = (tmp_path_factory.mktemp(name) for name in ("floats", "mxfp4"))
    save(FAMILY, floats)
    weights, generator = load_file(floats / "model.safetensors"), torch.Generator().manual_seed(8)
    stored = dict(weights)
    for name in weights:
        if name.endswith("sinks"):
            stored[name] = weights[name] = 2 + weights[name] * 10
        if (last := name.rpartition(".")[2]) not in STACKS:
            continue
        rows, columns = STACKS[last]
        shape = NUM_EXPERTS, rows, columns // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config = json.loads((floats / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for folder, tensors in ((floats, weights), (packed, stored)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    return Saved(floats, packed, reference.eval())


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_tokens_equal_transformers(saved: Saved, backend: str) -> None:
    if backend == "native" and (reason := why_not_native()):
        pytest.skip(reason)
    model = Decoder(open_checkpoint(saved.mxfp4), BACKENDS[backend]())
    assert model.config.windowed_layers == {0} and model.layers[1].sinks is not None
    check_against_transformers(model, saved.reference, 32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().float().view(torch.int32)


def test_weights_in_floats_and_in_mxfp4_are_those_of_transformers(saved: Saved) -> None:
    """Bit for bit, in whole and in parts that end at blocks."""
    floats, packed = open_checkpoint(saved.floats), open_checkpoint(saved.mxfp4)
    expected = dict(saved.reference.named_parameters())
    for layer in range(2):
        of_layer = f"model.layers.{layer}.mlp.experts"
        rows = {
            "gate": expected[f"{of_layer}.gate_up_proj"].mT[:, 0::2],
            "up": expected[f"{of_layer}.gate_up_proj"].mT[:, 1::2],
            "down": expected[f"{of_layer}.down_proj"].mT,
        }
        for kind, matrices in rows.items():
            for number, matrix in enumerate(matrices):
                name = f"{of_layer}.{number}.{kind}_proj.weight"
                part = Part(slice(3, 40), slice(32, 64))
                for file in (floats, packed):
                    assert torch.equal(bits(file.read(name)), bits(matrix))
                    assert torch.equal(bits(file.read(name, part)), bits(matrix[part]))
                assert torch.equal(as_groups(packed, name), matrix)
                assert floats.read_groups(name) is None
        biases = expected[f"{of_layer}.gate_up_proj_bias"][4]
        assert torch.equal(floats.read(f"{of_layer}.4.up_proj.bias"), biases[1::2])


def as_groups(file: Checkpoint, name: str) -> Tensor:
    groups = file.read_groups(name)
    assert groups is not None and groups.is_coded and groups.q.max() < 16 and groups.bits == 4
    for half in (groups.scale, groups.minimum):
        assert torch.equal(half.half().float(), half), "the kernels would round it"
    wide = torch.tensor(INTEGERS)[groups.q.int()].float().view(*groups.scale.shape, 32)
    return (groups.scale[..., None] * wide + groups.minimum[..., None]).flatten(1)


@native_only
def test_quantized_kernels_keep_the_experts_of_a_file(saved: Saved) -> None:
    checkpoint, expected = open_checkpoint(saved.mxfp4), dict(saved.reference.named_parameters())
    experts = Decoder(checkpoint, NativeBackend(is_quantized=True)).layers[0].experts
    assert experts is not None
    found = torch.stack([weight.rows(torch.arange(HIDDEN)) for weight in experts.down])
    exact = expected["model.layers.0.mlp.experts.down_proj"].mT
    if packing.layout().wide_group:
        torch.testing.assert_close(found, exact, rtol=0, atol=0.01)
    else:
        assert torch.equal(found, exact)
    biases = 4 * NUM_EXPERTS * (HIDDEN + 2 * INNER)
    known = footprint(checkpoint, torch.device("cpu"), quantization="int8")
    assert known.experts == 2 * (experts.expert_bytes + biases)


def test_the_gate_equals_that_of_transformers_beyond_its_limit(saved: Saved) -> None:
    gate_up = torch.randn(9, 2 * INNER, generator=torch.Generator().manual_seed(2)) * 9
    expected = saved.reference.model.layers[0].mlp.experts._apply_gate(gate_up)
    halves = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
    found = PlainBackend().gated(halves, "clamped_swiglu")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_scales_that_kernels_cannot_hold_and_damaged_files_are_not_read_as_groups(
    saved: Saved, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(saved.mxfp4 / "model.safetensors")
    (tmp_path / "config.json").write_bytes((saved.mxfp4 / "config.json").read_bytes())
    first, second = (f"model.layers.0.mlp.experts.{n}.down_proj.weight" for n in (0, 1))

    def reopened() -> Checkpoint:
        save_file(tensors, tmp_path / "model.safetensors")
        return open_checkpoint(tmp_path)

    tensors[f"{name}_scales"][1, 2, 1], tensors[f"{name}_blocks"][1, 2, 1] = 3, 0x80  # zeros
    tensors[f"{name}_scales"][0, 3, 1] = 150
    assert reopened().read_groups(first) is None and reopened().read_groups(second) is not None
    tensors[f"{name}_scales"][0, 3, 1] = 255
    with pytest.raises(ModelError, match=r"the scales of .*down_proj are NaN: the file is damaged"):
        reopened().read(first)
    with pytest.raises(ModelError, match="cannot be cut at inputs 0 to 20 of 64: MXFP4 has blocks"):
        open_checkpoint(saved.mxfp4).read(first, Part(slice(None), slice(0, 20)))
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :40].contiguous()
    with pytest.raises(
        ModelError, match=r"shape \[5, 40, 2, 16\]; .* \[5, 128, 2, 16\], of type U8"
    ):
        reopened().read(second)
    del tensors[f"{name}_bias"]
    with pytest.raises(ModelError, match="down_proj_bias is missing"):
        reopened().read(first.replace("weight", "bias"))


def test_a_gpu_dequantizes_the_experts(saved: Saved) -> None:
    """One matrix for all experts; gate and up of a pair are adjacent."""
    gpu = pytest.importorskip("headway.model.backends.gpu")
    model = Decoder(open_checkpoint(saved.mxfp4), gpu.GpuBackend(torch.float32, "cpu"))
    expected = dict(saved.reference.named_parameters())
    for number, layer in enumerate(model.layers):
        (gate_up,), (down,) = layer.experts.gate_up, layer.experts.down
        prefix = f"model.layers.{number}"
        norm = expected[f"{prefix}.post_attention_layernorm.weight"]
        stack = expected[f"{prefix}.mlp.experts.gate_up_proj"].mT
        assert torch.equal(gate_up.matrix, stack * norm)
        assert torch.equal(gate_up.bias, expected[f"{prefix}.mlp.experts.gate_up_proj_bias"])
        assert torch.equal(down.matrix, expected[f"{prefix}.mlp.experts.down_proj"].mT)


def test_what_is_not_supported_is_named(saved: Saved) -> None:
    config = load_hf(saved.mxfp4)
    with pytest.raises(ConfigError, match="fp8 is not supported for experts, .*gpt_oss has"):
        choose_backend(config, "fp8", "cuda")
    with pytest.raises(ConfigError, match="gpt_oss has layers with a sliding window, .* one rank"):
        check_size(config, 2)
    values = json.loads((saved.mxfp4 / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ModelError, match="swiglu_limit 6 is not supported; only 7 is"):
        from_hf({**values, "swiglu_limit": 6.0}, "x")
    with pytest.raises(ModelError, match="mxfp4 is not supported for llama; only for gpt_oss"):
        quantized = {"quantization_config": values["quantization_config"]}
        llama = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
        sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
        counts = {"num_hidden_layers": 1, "num_attention_heads": 4}
        from_hf({**llama, **sizes, **counts, **quantized}, "x")
