"""The `quantization_config` of a config.json: how a file stores its quantized matrices.

Knows names and sizes of formats, not tensors (see weights/formats.py). Does not import torch. A
format is described as far as it changes the weights: activations are never quantized because a
file says so, which is closer to the original model than what the file asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import ModelError
from headway.model.families.config_keys import refuse_unread
from headway.model.families.fields import Fields

FP8, MXFP4 = "fp8", "mxfp4"
INT4 = "int4"  # the precision of a GPU for integers of 4 bits
INT4_SCALE_BYTES = 5  # of a float32 scale and its zero point
SUPPORTED = (
    "supported: fp8; mxfp4 (experts of gpt_oss); compressed-tensors of format pack-quantized (4 and 8 bits), int-quantized and "
    "float-quantized (8 bits); awq (gemm, 4 bits); gptq (4 and 8 bits); and GGUF files"
)
# Of compressed-tensors: format -> (layout, types of weights).
COMPRESSED = {
    "pack-quantized": ("packed", ("int4", "int8")),
    "int-quantized": ("ints", ("int8",)),
    "float-quantized": (FP8, ("float8",)),
}
# Keys that say how the weights were found, or how another program computes with them.
IGNORED = frozenset({
    "act_group_aware", "activation_scheme", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize",
    "desc_act", "disable_exllama", "do_fuse", "dynamic", "exllama_config", "fmt", "format",
    "fuse_max_seq_len", "global_compression_ratio", "gptaq", "kv_cache_scheme", "lm_head",
    "max_input_length", "meta", "mock_quantization", "model_file_base_name", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "modules_to_convert", "modules_to_fuse", "mse", "observer", "observer_kwargs",
    "offload_to_disk", "pack_dtype", "pad_token_id", "quant_method", "quantization_status",
    "scale_dtype", "scale_fmt", "static_groups", "sym", "targets", "tokenizer", "true_sequential",
    "use_cuda_fp16", "use_exllama", "version", "zp_dtype",
})  # fmt: skip
# Values with which other keys have no effect.
OFF = {"expert_dtype": "fp8", "is_marlin_format": False, "transform_config": {}, "zero_point": True}
GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what the stored zero points lack


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the quantized matrices of a file are stored. Other matrices are floats."""

    method: str  # as config.json names it
    layout: str  # of the tensors: fp8, packed, ints, awq, gptq or mxfp4
    bits: int = 8
    rows: int = 1  # outputs that share a scale
    columns: int | None = None  # inputs that share a scale; None for all
    is_symmetric: bool = True  # no zero points are stored
    zero_offset: int = 0  # to be added to stored zero points
    is_reordered: bool = False  # inputs may be in another order, which a tensor g_idx says
    kept: tuple[str, ...] = ()  # modules whose matrices are floats: names, or re: and a pattern

    def keeps(self, module: str) -> bool:
        """Whether the module's matrix is in floats: the config lists it, or it cannot be quantized."""
        if self.layout == MXFP4 and ".experts." not in f"{module}.":
            return True
        return any(
            re.match(name[3:], module)
            if name.startswith("re:")
            else f".{module}.".endswith(f".{name}.") or f"{module}.".startswith(f"{name}.")
            for name in self.kept
        )

    @property
    def group_bits(self) -> int | None:
        """Bits of the numbers, if groups of 32 inputs share a scale; None for floats too."""
        is_whole = self.columns is None or self.columns % 32 == 0
        return self.bits if is_whole and self.layout != FP8 else None

    @property
    def int4_itemsize(self) -> float:
        """Bytes of a number on a GPU, with its scale; those of long rows' own scales do not count."""
        return 0.5 + (INT4_SCALE_BYTES / self.columns if self.columns else 0.0)

    def __str__(self) -> str:
        scales = "a scale per output" if self.columns is None else f"groups of {self.columns}"
        if self.rows > 1:
            scales = f"blocks of {self.rows} x {self.columns}"
        return f"{self.method}, {self.bits} bits, {scales}"


def keeps_fp8(given: Quantization | None) -> bool:
    """Whether the fp8 kernels can use the matrices as they are stored."""
    return given is not None and given.layout == FP8 and given.columns is None


def keeps_int4(given: Quantization | None) -> bool:
    """Whether a GPU has kernels for the 4-bit integers of the file."""
    return given is not None and given.layout in ("packed", "awq", "gptq") and given.group_bits == 4


def stored_quantization(fields: Fields) -> Quantization | None:
    """The format of the quantized matrices, None for float weights; ModelError if unsupported."""
    found = fields.get("quantization_config")
    if not found:
        return None
    own = _object(fields, found, "quantization_config")
    made = METHODS[_choice(own, "quant_method", METHODS)](own)
    refuse_unread(own, IGNORED, OFF)
    try:
        made.keeps("")
    except re.error as error:
        raise own.error(f"a pattern of modules is wrong: {error}") from error
    return made


def _fp8(fields: Fields) -> Quantization:
    """The format in which makers publish their models."""
    rows, columns = _block(fields, "weight_block_size")
    kept = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    return Quantization(method="fp8", layout=FP8, rows=rows, columns=columns, kept=kept)


def _compressed_tensors(fields: Fields) -> Quantization:
    sparsity = _object(fields, fields.get("sparsity_config", {}), "sparsity_config")
    _choice(sparsity, "format", ("dense",), "dense")
    groups = _object(fields, fields.get("config_groups"), "config_groups").values
    found = {_group(fields, _object(fields, group, name)) for name, group in groups.items()}
    if len(found) != 1:
        raise _unsupported(fields, f"config_groups with {len(found)} schemes of weights")
    return found.pop()


def _group(fields: Fields, group: Fields) -> Quantization:
    weights = _object(group, group.get("weights"), "weights")
    name = _choice(group if group.get("format") else fields, "format", COMPRESSED)
    layout, kinds = COMPRESSED[name]
    inputs = group.get("input_activations", {"type": "int", "num_bits": 8})
    activations = _object(group, inputs, "input_activations")
    for scheme, supported in ((weights, kinds), (activations, ("int8", "float8"))):
        if (kind := f"{scheme.get('type')}{scheme.get('num_bits')}") not in supported:
            raise _unsupported(scheme, f"type {kind}")
    _choice(weights, "actorder", ("weight", "static"), "weight")
    many = "block" if layout == FP8 else "group"
    strategy = _choice(weights, "strategy", ("tensor", "channel", many))
    rows, columns = _block(weights, "block_structure") if strategy == "block" else (1, None)
    made = Quantization(
        method=f"compressed-tensors {name}", layout=layout, rows=rows,
        columns=weights.count("group_size") if strategy == "group" else columns,
        bits=weights.count("num_bits"), is_symmetric=weights.flag("symmetric", True),
        kept=_names(fields, "ignore"),
    )  # fmt: skip
    refuse_unread(weights, IGNORED, {})
    refuse_unread(group, IGNORED, {})
    return made


def _awq(fields: Fields) -> Quantization:
    _choice(fields, "version" if fields.get("version") else "format", ("gemm", "GEMM"), "gemm")
    bits, columns = _sizes(fields, 4)
    return Quantization(
        method="awq", layout="awq", bits=bits, columns=columns, is_symmetric=False,
        kept=_names(fields, "modules_to_not_convert"),
    )  # fmt: skip


def _gptq(fields: Fields) -> Quantization:
    key = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    version = _choice(fields, key, GPTQ_OFFSETS, "gptq")
    special = _object(fields, fields.get("dynamic", {}), "dynamic").values
    if not all(key.startswith("-:") for key in special):
        raise _unsupported(fields, "gptq with other schemes for some modules (dynamic)")
    bits, columns = _sizes(fields, 4, 8)
    return Quantization(
        method="gptq", layout="gptq", bits=bits, columns=columns, is_symmetric=False,
        zero_offset=GPTQ_OFFSETS[version], is_reordered=fields.flag("desc_act"),
        kept=tuple(f"re:{key[2:]}" for key in special),
    )  # fmt: skip


def _mxfp4(fields: Fields) -> Quantization:
    """Experts only (weights/stacked_experts.py)."""
    kept = _names(fields, "modules_to_not_convert")
    return Quantization(method=MXFP4, layout=MXFP4, bits=4, columns=32, kept=kept)


METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq,
    MXFP4: _mxfp4,
}  # fmt: skip


def _object(fields: Fields, found: Any, name: str) -> Fields:
    if not isinstance(found, Mapping):
        raise fields.error(f"{name} is {found!r}; it must be an object")
    return Fields(found, f"{fields.where}: {name}")


def _sizes(fields: Fields, *supported: int) -> tuple[int, int | None]:
    """Bits of a number, and the inputs that share a scale."""
    if (bits := fields.count("bits")) not in supported:
        raise _unsupported(fields, f"{fields.get('quant_method')} with {bits} bits")
    return bits, None if fields.get("group_size") == -1 else fields.count("group_size")


def _block(fields: Fields, key: str) -> tuple[int, int | None]:
    """Outputs and inputs of a block that has a scale; one scale per output if there are none."""
    match fields.get(key):
        case None:
            return 1, None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case found:
            raise fields.error(f"{key} is {found!r}; it must be a list of 2 integers above 0")


def _names(fields: Fields, key: str) -> tuple[str, ...]:
    """Names of modules, or patterns that begin with re:."""
    found = fields.get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.error(f"{key} is {found!r}; it must be a list of names")
    return tuple(found)


def _choice(fields: Fields, key: str, allowed: Iterable[str], default: str | None = None) -> str:
    found = fields.get(key, default)
    if found not in tuple(allowed):
        raise _unsupported(fields, f"{key} {found!r}")
    return str(found)


def _unsupported(fields: Fields, what: str) -> ModelError:
    return fields.error(f"{what} is not supported; {SUPPORTED}")
