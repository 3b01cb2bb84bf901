"""The memory that a model takes on a device, from its config and the headers of its files.

The sizes are those of the loaded model, without padding; nothing is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch

from headway.model.backends.native.backend import SCALE_BYTES
from headway.model.backends.native.forms import MATRICES, matrix_of
from headway.model.backends.native.weights import GROUP, quantized_bytes
from headway.model.config import ModelConfig
from headway.model.precision import (
    check_runs,
    kv_dtype_for,
    measured_precision,
    resolved,
    stored_precision,
)
from headway.model.quantization import FP8, INT4, INT4_SCALE_BYTES, keeps_fp8
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.fp8 import float_layers

MERGED = (*(MATRICES[name] for name in ("qkv", "gate_up")), ("w1", "w3"))  # the last as Mixtral's
FLOATS = {"int8": "float32", FP8: "bfloat16", INT4: "bfloat16"}  # the type of what is not quantized


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a model on a device."""

    config: ModelConfig
    precision: str
    weights: int
    experts: int  # of the weights: all experts that tokens choose among
    read: int  # of the weights: what every pass reads
    kv_dtype: str
    kv: int  # of a token, in the layers that see all tokens
    window_kv: int  # of a token, in the layers that see the latest `window` tokens
    window: int

    def request(self, num_tokens: int) -> int:
        """Bytes of the keys and values of a request."""
        return num_tokens * self.kv + min(num_tokens, self.window) * self.window_kv

    def longest(self, num_bytes: int, limit: int) -> int:
        """The number of tokens of the longest request that fits, up to a limit."""
        short = num_bytes // (self.kv + self.window_kv)
        rest = (num_bytes - self.window * self.window_kv) // self.kv if self.kv else limit
        return max(0, min(limit, short if short < self.window else rest))


def footprint(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Footprint:
    """ConfigError if a device of this type cannot run the model with these options."""
    config = checkpoint.config
    precision = stored_precision(config, resolved(dtype, quantization, device), dtype, device)
    precision = measured_precision(config, precision)
    kv_dtype = kv_dtype_for(kv_cache_dtype, device)
    check_runs(config, precision, device, kv_dtype)
    floats: torch.dtype = getattr(torch, FLOATS.get(precision, precision))
    sizes = {
        name: _quantized_bytes(checkpoint, name, shape, precision) or prod(shape) * floats.itemsize
        for name, shape in config.shapes().items()
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    looked_up = 0 if config.tie_embeddings else sizes["model.embed_tokens.weight"]
    kv_dtype = kv_dtype or floats
    scale = Fraction(SCALE_BYTES if kv_dtype == torch.int8 else 0, config.head_dim)
    full, windowed = (
        config.layers_of_kind(windowed=kind).kv_bytes(kv_dtype.itemsize + scale)
        for kind in (False, True)
    )
    return Footprint(
        config=config, precision=precision, weights=sum(sizes.values()),
        experts=experts, read=sum(sizes.values()) - experts - looked_up,
        kv_dtype=str(kv_dtype).removeprefix("torch."), kv=full, window_kv=windowed,
        window=config.sliding_window or 0,
    )  # fmt: skip


def _quantized_bytes(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], precision: str
) -> int:
    """0 for a tensor that is in floats."""
    module, given = name.removesuffix(".weight"), checkpoint.config.quantization
    is_whole = len(shape) == 2 and shape[1] % GROUP == 0
    if is_whole and precision == "int8" and matrix_of(module):
        return quantized_bytes((shape[0], shape[1]), _file_bits(checkpoint, module) or 8)
    if precision == INT4 and is_whole and _file_bits(checkpoint, module) and given:
        group = given.columns or shape[1]
        return prod(shape) // 2 + INT4_SCALE_BYTES * shape[0] * (shape[1] // group)
    if len(shape) == 2 and precision == FP8 and ".layers." in name:
        is_float = int(name.split(".")[2]) in float_layers(checkpoint.config)
        if given and keeps_fp8(given):
            is_float = any(given.keeps(each) for each in _merged(module))
        if not is_float:
            return prod(shape) + SCALE_BYTES * shape[0]
    return 0


def _file_bits(checkpoint: Checkpoint, module: str) -> int | None:
    """The bits of the file's groups; None if the parts of the matrix differ, which are merged."""
    found = {checkpoint.group_bits(f"{each}.weight") for each in _merged(module)}
    return found.pop() if len(found) == 1 else None


def _merged(module: str) -> list[str]:
    """The modules whose matrices are one in the loaded model: q, k and v, or gate and up."""
    parent, _, kind = module.rpartition(".")
    found = next((parts for parts in MERGED if kind in parts), None)
    return [f"{parent}.{part}" for part in found] if found else [module]
