"""Weights of a GGUF file, with Hugging Face names and Hugging Face order of rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.errors import ModelError
from headway.model.config import ModelConfig, from_gguf
from headway.model.experts import matrix_kind
from headway.model.families.table import INTERLEAVED
from headway.model.sharding import EVERYTHING, WHOLE, Part
from headway.model.weights import gguf
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix

GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_EXPERTS = {
    "gate": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
EXPERT = re.compile(r"\.experts\.(\d+)\.")
GGUF_OUTPUT_NORMS = {  # in models that normalize the outputs of attention and MLP
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        header = gguf.read_header(path)
        super().__init__(_gguf_config(path, header), path)
        self._file, self._infos = path, header.tensors

    def has(self, name: str) -> bool:
        return super().has(name) and self._name(name) in self._infos

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        info = self._info(name)
        if len(info.shape) == 1:  # a vector is one row of the file
            values = _dequantize(self._file, name, info)
            return torch.from_numpy(self._in_order(name, values[part.rows]))
        values = _dequantize(self._file, name, info, part.rows)
        own = np.ascontiguousarray(self._in_order(name, values)[:, part.columns])
        return torch.from_numpy(own)

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        info = self._info(name)
        kind = self._kind(info)
        if kind not in gguf.GROUP_BYTES:
            return None
        columns = gguf.byte_columns(info, kind, part.columns)
        if columns is None:
            return None
        stored = gguf.read_bytes(self._file, info)[part.rows, columns]
        parts = gguf.unpack_groups(stored, kind)
        _check_numbers(self._file, name, *parts[1:])
        q, scale, minimum = (torch.from_numpy(self._in_order(name, part)) for part in parts)
        return QuantizedMatrix(q=q, scale=scale, minimum=minimum, bits=int(kind[1]))

    def group_bits(self, name: str) -> int | None:
        kind = self._kind(self._info(name))
        return int(kind[1]) if kind in gguf.GROUP_BYTES else None

    def _kind(self, info: gguf.TensorInfo) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(info.kind).name

    def _info(self, name: str) -> gguf.TensorInfo:
        info, expert = self._infos.get(self._name(name)), EXPERT.search(name)
        if info is not None and expert and len(info.shape) == 3:  # a stack of all experts
            num_bytes = info.num_bytes // info.shape[0]
            offset = info.offset + int(expert[1]) * num_bytes
            info = replace(info, shape=info.shape[1:], offset=offset, num_bytes=num_bytes)
        if info is not None and len(info.shape) == 1 < len(self._shapes.get(name, ())):
            info = replace(info, shape=(1, *info.shape))  # a gate with one output
        self._check(name, None if info is None else info.shape)
        assert info is not None, "check raises for a missing tensor"
        return info

    def _name(self, name: str) -> str:
        return gguf_name(name, has_output_norms=self.config.has_output_norms)

    def _in_order(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Undo llama.cpp's row order, which interleaves the two halves of the heads of some families.

        `rows` are those of whole heads.
        """
        if self.config.architecture not in INTERLEAVED or not re.search(r"\.(q|k)_proj\.", name):
            return rows
        heads = len(rows) // self.config.head_dim
        paired = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def gguf_name(name: str, *, has_output_norms: bool = False) -> str:
    """llama.cpp's name of the tensor with this Hugging Face name."""
    base, _, ending = name.rpartition(".")
    if base in GGUF_TOP:
        return f"{GGUF_TOP[base]}.{ending}"
    layer, _, part = base.removeprefix("model.layers.").partition(".")
    names = GGUF_LAYER | GGUF_OUTPUT_NORMS if has_output_norms else GGUF_LAYER
    kind = GGUF_EXPERTS.get(matrix_kind(part))
    if kind and part not in names:
        stack = "_exps" if ".experts." in part else "_shexp" if ".shared_expert." in part else ""
        return f"blk.{layer}.{kind}{stack}.{ending}"
    return f"blk.{layer}.{names.get(part, part)}.{ending}"


def _gguf_config(path: Path, header: gguf.Header) -> ModelConfig:
    num_parts = header.metadata.get("split.count")
    if isinstance(num_parts, int) and num_parts > 1:
        raise ModelError(f"{path} is one part of a split file; join the parts with gguf-split")
    info, divisors = header.tensors.get("rope_freqs.weight"), None
    if info is not None:
        divisors = tuple(_dequantize(path, "rope_freqs.weight", info).ravel().tolist())
    return from_gguf(header.metadata, str(path), tensors=header.tensors, divisors=divisors)


def _dequantize(
    path: Path, name: str, info: gguf.TensorInfo, rows: slice = WHOLE
) -> NDArray[np.float32]:
    try:
        values = gguf.dequantize(path, info, rows)
    except NotImplementedError as error:
        raise ModelError(f"{path}: cannot dequantize tensor {name}: {error}") from error
    _check_numbers(path, name, values)
    return values


def _check_numbers(path: Path, name: str, *arrays: NDArray[np.float32]) -> None:
    if not all(np.isfinite((values.min(), values.max())).all() for values in arrays):
        raise ModelError(f"{path}: tensor {name} contains NaN or infinity: the file is damaged")
