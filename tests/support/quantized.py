"""Writes tiny models in quantized formats, with encoders that share no code with the package.

Every scheme draws integers (or 8-bit floats) and scales, so that the weights are known exactly:
(q - zero) * scale. numpy packs the words, 32 bits at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.model.config import from_hf

Array = np.ndarray[Any, Any]
Tensors = dict[str, Tensor]
VALUES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1,
}  # fmt: skip
GROUP = 64  # inputs; down_proj has three groups
BLOCK = (48, 40)  # of fp8: outputs and inputs, of which no matrix is a multiple
IN_LAYERS = "model.layers."


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """`encode` returns the tensors of a random matrix [N, K], by suffix, and its numbers."""

    config: dict[str, Any]
    encode: Callable[[np.random.Generator, int, int], tuple[Tensors, Array]]
    bits: int | None  # of groups of 32 for the CPU
    has_fp8: bool = False


def drawn(
    random: np.random.Generator, shape: tuple[int, int], bits: int, group: int, zeros: range
) -> tuple[Array, Array, Array, Array]:
    """Integers, float16 scales, zero points, and the numbers (q - zero) * scale."""
    rows, columns = shape
    q = random.integers(0, 1 << bits, shape)
    scale = random.uniform(0.5, 2, (rows, columns // group)).astype(np.float16)
    scale *= np.float16(0.25 / (1 << bits))
    zero = random.integers(zeros.start, zeros.stop, scale.shape)
    wide = (each.repeat(group, axis=1) for each in (zero, scale.astype(np.float32)))
    wide_zero, wide_scale = wide
    return q, scale, zero, ((q - wide_zero).astype(np.float32) * wide_scale)


def words(numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers along an axis; the number at place order[n] of each word is its n-th."""
    count = 32 // bits
    last = np.moveaxis(numbers, axis, -1)
    short = -last.shape[-1] % count
    last = np.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, short)])
    grouped = last.reshape(*last.shape[:-1], -1, count).astype(np.uint64)
    packed = np.zeros(grouped.shape[:-1], np.uint64)
    for place, source in enumerate(order or range(count)):
        packed |= grouped[..., source] << np.uint64(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32), -1, axis))
                            .view(np.int32))  # fmt: skip


def tensor(numbers: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers))


def fp8(block: tuple[int, int] | None, *, name: str, is_whole: bool = False) -> Any:
    def encode(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        q = tensor(random.normal(0, 60, (rows, columns)).astype(np.float32))
        stored = q.to(torch.float8_e4m3fn)
        high, wide = block or ((rows, columns) if is_whole else (1, columns))
        scale = random.uniform(1e-3, 4e-3, (-(-rows // high), -(-columns // wide)))
        scale = scale.astype(np.float32)
        spread = scale.repeat(high, 0)[:rows].repeat(wide, 1)[:, :columns]
        kept = tensor(scale.reshape(())) if is_whole else tensor(scale)
        return {"weight": stored, name: kept}, stored.float().numpy() * spread

    return encode


def packed(bits: int, group: int | None, *, is_symmetric: bool) -> Any:
    def encode(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        zeros = range(1 << bits - 1, (1 << bits - 1) + 1) if is_symmetric else range(1 << bits)
        q, scale, zero, numbers = drawn(random, (rows, columns), bits, group or columns, zeros)
        found = {
            "weight_packed": words(q, bits, 1), "weight_scale": tensor(scale),
            "weight_shape": torch.tensor([rows, columns]),
        }  # fmt: skip
        if not is_symmetric:
            found["weight_zero_point"] = words(zero, bits, 0)
        return found, numbers

    return encode


def signed_bytes(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
    q, scale, _, numbers = drawn(random, (rows, columns), 8, columns, range(128, 129))
    return {"weight": tensor((q - 128).astype(np.int8)), "weight_scale": tensor(scale)}, numbers


def awq(group: int | None) -> Any:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        q, scale, zero, numbers = drawn(random, (rows, columns), 4, group or columns, range(16))
        found = {
            "qweight": words(q.T, 4, 1, order), "qzeros": words(zero.T, 4, 1, order),
            "scales": tensor(scale.T),
        }  # fmt: skip
        return found, numbers

    return encode


def gptq(bits: int, group: int | None, *, offset: int = 1, has_order: bool = True) -> Any:
    def encode(random: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, Array]:
        size = group or columns
        q, scale, zero, numbers = drawn(
            random, (rows, columns), bits, size, range(offset, 1 << bits)
        )
        found = {
            "qweight": words(q.T, bits, 0), "qzeros": words(zero.T - offset, bits, 1),
            "scales": tensor(scale.T),
        }  # fmt: skip
        if has_order:
            found["g_idx"] = torch.arange(columns, dtype=torch.int32) // size
        return found, numbers

    return encode


def compressed(
    name: str, bits: int, kind: str, strategy: str, *, activations: str | None = None, **more: Any
) -> dict[str, Any]:
    """The config that llm-compressor writes."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    inputs = {"num_bits": 8, "type": activations, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"], "weights": weights, "output_activations": None,
        "input_activations": inputs if activations else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"],
        "quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
        "transform_config": {}, "config_groups": {"group_0": group},
    }  # fmt: skip


PACKED = "pack-quantized"
MAKER = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False, "group_size": GROUP}
SCHEMES = {
    "fp8 in blocks": Scheme(
        config=MAKER | {"weight_block_size": list(BLOCK)}, bits=None,
        encode=fp8(BLOCK, name="weight_scale_inv"),
    ),
    "fp8 with a scale per matrix": Scheme(
        config=MAKER | {"activation_scheme": "static"}, bits=None, has_fp8=True,
        encode=fp8(None, name="weight_scale", is_whole=True),
    ),
    "compressed fp8": Scheme(
        config=compressed("float-quantized", 8, "float", "channel", activations="float"),
        encode=fp8(None, name="weight_scale"), bits=None, has_fp8=True,
    ),
    "compressed fp8 in blocks": Scheme(
        config=compressed("float-quantized", 8, "float", "block", block_structure=list(BLOCK)),
        encode=fp8(BLOCK, name="weight_scale"), bits=None,
    ),
    "w4a16": Scheme(
        config=compressed(PACKED, 4, "int", "group", group_size=GROUP), bits=4,
        encode=packed(4, GROUP, is_symmetric=True),
    ),
    "w4a16 with zero points": Scheme(
        config=compressed(PACKED, 4, "int", "group", group_size=GROUP, symmetric=False), bits=4,
        encode=packed(4, GROUP, is_symmetric=False),
    ),
    "w4a16 per channel": Scheme(
        config=compressed(PACKED, 4, "int", "channel"), bits=4,
        encode=packed(4, None, is_symmetric=True),
    ),
    "w4a16 per channel with zero points": Scheme(
        config=compressed(PACKED, 4, "int", "channel", symmetric=False), bits=4,
        encode=packed(4, None, is_symmetric=False),
    ),
    "w8a16": Scheme(
        config=compressed(PACKED, 8, "int", "group", group_size=32, symmetric=False), bits=8,
        encode=packed(8, 32, is_symmetric=False),
    ),
    "w8a8": Scheme(
        config=compressed("int-quantized", 8, "int", "channel", activations="int"), bits=8,
        encode=signed_bytes,
    ),
    "awq": Scheme(config=AWQ | {"group_size": GROUP}, bits=4, encode=awq(GROUP)),
    "awq, a group per output": Scheme(
        config=AWQ | {"group_size": -1},
        bits=4, encode=awq(None),
    ),
    "gptq": Scheme(config=GPTQ | {"bits": 4}, bits=4, encode=gptq(4, GROUP)),
    "gptq in groups of 16": Scheme(
        config=GPTQ | {"bits": 4, "group_size": 16}, bits=None, encode=gptq(4, 16)
    ),
    "gptq, 8 bits, version 2": Scheme(
        config=GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, bits=8,
        encode=gptq(8, GROUP, offset=0, has_order=False),
    ),
    "gptq with a trivial order": Scheme(
        config=GPTQ | {"bits": 4, "group_size": -1, "desc_act": True}, bits=4,
        encode=gptq(4, None),
    ),
}  # fmt: skip


def write(
    folder: Path, scheme: Scheme, change: Callable[[Tensors], None] = lambda _: None,
    kept: tuple[str, ...] = (), **values: Any,
) -> Tensors:  # fmt: skip
    """Write a model whose layers are quantized; return its weights in float32 by name.

    The matrices of the modules `kept` end so, and are stored in floats.
    """
    folder.mkdir(exist_ok=True)
    config = VALUES | {"quantization_config": scheme.config} | values
    random, stored, floats = np.random.default_rng(7), Tensors(), Tensors()
    for name, shape in from_hf(config, "config.json").shapes().items():
        module = name.removesuffix(".weight")
        if name.startswith(IN_LAYERS) and len(shape) == 2 and not module.endswith(kept or "-"):
            made, numbers = scheme.encode(random, *shape)
            stored |= {f"{module}.{suffix}": each for suffix, each in made.items()}
            floats[name] = tensor(numbers)
            continue
        noise = random.normal(0, 0.2, shape).astype(np.float32)
        floats[name] = stored[name] = tensor(1 + noise if len(shape) == 1 else noise)
    change(stored)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return floats
