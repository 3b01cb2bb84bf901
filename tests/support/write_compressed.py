"""Writes compressed_tensors.safetensors: matrices of each scheme, encoded and decoded by the package.

`python -m tests.support.write_compressed`, with compressed-tensors installed, writes it again. The
metadata holds the package's version and, by scheme, the quantization_config that it writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

FILE = Path(__file__).with_name("compressed_tensors.safetensors")
SHAPE = (24, 64)
PACKED, INTS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
SCHEMES = {  # format, weights, type of the scales
    "w4a16": (PACKED, INT4 | {"strategy": "group", "group_size": 32}, torch.bfloat16),
    "w4a16_asymmetric": (
        PACKED, INT4 | {"strategy": "group", "group_size": 32, "symmetric": False}, torch.bfloat16,
    ),
    "w4a16_channel": (PACKED, INT4 | {"strategy": "channel", "symmetric": False}, torch.float16),
    "w8a16": (PACKED, INT8 | {"strategy": "group", "group_size": 64}, torch.bfloat16),
    "w8a8": (INTS, INT8 | {"strategy": "channel"}, torch.bfloat16),
    "w8a8_asymmetric": (INTS, INT8 | {"strategy": "channel", "symmetric": False}, torch.float32),
    "fp8": (FLOATS, FP8 | {"strategy": "tensor"}, torch.bfloat16),
    "fp8_blocks": (FLOATS, FP8 | {"strategy": "block", "block_structure": [16, 32]}, torch.bfloat16),
}  # fmt: skip


def ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each part that shares a scale."""
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "channel":
        return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    if args.strategy == "group":
        groups = weight.unflatten(-1, (-1, args.group_size))
        return groups.amin(-1), groups.amax(-1)
    rows, columns = args.block_structure
    padded = pad(weight, (0, -SHAPE[1] % columns, 0, -SHAPE[0] % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def main() -> None:
    import compressed_tensors
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    generator, stored, configs = torch.Generator().manual_seed(1), {}, {}
    for name, (kind, weights, dtype) in SCHEMES.items():
        args = QuantizationArgs(**weights)
        inputs = {"num_bits": 8, "type": args.type, "strategy": "token", "dynamic": True}
        scheme = QuantizationScheme(
            targets=["Linear"], weights=args,
            input_activations=None if kind == PACKED else QuantizationArgs(**inputs),
        )  # fmt: skip
        weight = (torch.randn(SHAPE, generator=generator) * 0.05 + 0.02).to(dtype)
        scale, zero = calculate_qparams(*ranges(weight, args), args)
        given = {"weight": weight, "weight_scale": scale.to(dtype)}
        if not args.symmetric:
            given["weight_zero_point"] = zero.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress(given, scheme)
        stored |= {f"{name}.{key}": value.contiguous() for key, value in packed.items()}
        stored[f"{name}.expected"] = compressor.decompress(packed, scheme)["weight"].contiguous()
        configs[name] = QuantizationConfig(
            config_groups={"group_0": scheme}, format=kind, quantization_status="compressed",
            ignore=["lm_head"],
        ).to_dict()  # fmt: skip
    version = {"compressed_tensors": compressed_tensors.__version__}
    save_file(stored, FILE, metadata=version | {"configs": json.dumps(configs)})


if __name__ == "__main__":
    main()
