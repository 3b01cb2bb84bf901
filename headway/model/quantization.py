"""The `quantization_config` of a config.json: which quantized weights can be read.

Knows names of formats, not weights. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ModelError
from headway.model.fields import Fields

FP8 = "fp8"
STRATEGIES = ("channel", "tensor")  # one scale for each output, or one for the matrix
SUPPORTED = (
    "supported: compressed-tensors of format float-quantized (fp8) with one scale per output or "
    "per matrix, and GGUF files"
)


def stored_quantization(fields: Fields) -> str | None:
    """FP8 for weights in compressed-tensors fp8 form, None for float weights.

    ModelError for any other format.
    """
    found = fields.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise fields.error(f"quantization_config is {found!r}; it must be an object")
    method, name = found.get("quant_method"), found.get("format")
    if found.get("weight_block_size"):
        raise _unsupported(fields, f"block-wise {method} (weight_block_size)")
    if method != "compressed-tensors":
        raise _unsupported(fields, f"quant_method {method!r}")
    if name != "float-quantized":
        raise _unsupported(fields, f"compressed-tensors format {name!r}")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("quantization_config: config_groups is missing or empty")
    for group in groups.values():
        _check_group(fields, group)
    return FP8


def _check_group(fields: Fields, group: Any) -> None:
    """ModelError unless weights and activations of a group have 8-bit floats."""
    if not isinstance(group, Mapping):
        raise fields.error(f"quantization_config: the group {group!r} must be an object")
    for part in ("weights", "input_activations"):
        scheme = group.get(part)
        if scheme is None and part == "input_activations":
            continue
        scheme = scheme if isinstance(scheme, Mapping) else {}
        kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
        if kind != "float8":
            raise _unsupported(fields, f"{part} of type {kind}")
        if part == "weights" and scheme.get("strategy") not in STRATEGIES:
            raise _unsupported(fields, f"weights with strategy {scheme.get('strategy')!r}")


def _unsupported(fields: Fields, what: str) -> ModelError:
    return fields.error(f"quantization_config: {what} is not supported; {SUPPORTED}")
