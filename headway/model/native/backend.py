"""The decoder's arithmetic through kernels.c: every call hands over pointers, nothing is copied.

Float32 on a CPU. A row's result is the same to the bit whatever else is in the batch; with
quantized weights too, since inputs are rounded row by row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.model.backend import Pass, Weight
from headway.model.batch import Batch
from headway.model.checkpoint import Checkpoint
from headway.model.config import ModelConfig
from headway.model.native import weights as packing
from headway.model.native.build import load
from headway.model.native.weights import GROUP, NativeWeight, layout
from headway.model.tensors import Groups

MOST_QUERIES = 32  # rows of queries in one task of the attention
MOST_HEAD = 256


def refusal(config: ModelConfig) -> str | None:
    """Why a model cannot run on these kernels; None if it can."""
    lanes = layout().lanes
    if config.head_dim % lanes or config.head_dim > MOST_HEAD:
        return f"head size {config.head_dim} is not a multiple of {lanes} up to {MOST_HEAD}"
    if config.intermediate_size % lanes:
        return f"intermediate size {config.intermediate_size} is not a multiple of {lanes}"
    if config.num_heads // config.num_kv_heads > MOST_QUERIES:
        return f"more than {MOST_QUERIES} query heads share a key-value head"
    return None


class NativeBackend:
    """Weights as floats, or as the file's own groups and 8-bit ones where it has none."""

    def __init__(self, *, is_quantized: bool = False) -> None:
        self._library = load()
        self._is_quantized = is_quantized
        self.name = "native quantized" if is_quantized else "native float32"

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> NativeWeight:
        biases = [f"{name}.bias" for name in names if checkpoint.has(f"{name}.bias")]
        bias = torch.cat([checkpoint.read(name).float() for name in biases]) if biases else None
        matrices = [f"{name}.weight" for name in names]
        width = checkpoint.config.shapes()[matrices[0]][1]
        if self._is_quantized and width % GROUP == 0:
            return packing.pack_groups(_groups(checkpoint, matrices), bias)
        whole = [checkpoint.read(name).float() for name in matrices]
        return packing.pack_floats(torch.cat(whole) if len(whole) > 1 else whole[0], bias)

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        return checkpoint.read(name).float().contiguous()

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        out = torch.empty(len(x), weight.num_outputs)
        self._multiply(x, weight, out, 0)
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        self._multiply(x, weight, residual, 1)
        return residual

    def _multiply(self, x: Tensor, weight: NativeWeight, out: Tensor, adds: int) -> None:
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        rows, width = len(x), weight.num_inputs
        if weight.bits == 32:
            self._library.linear(
                x.data_ptr(), rows, width, weight.pointer, weight.num_outputs, bias,
                out.data_ptr(), adds,
            )  # fmt: skip
        else:
            scratch = torch.empty(rows * width)  # bytes, a step and a sum for every group
            self._library.quantized_linear(
                x.data_ptr(), rows, width, weight.pointer, weight.num_outputs, weight.bits, bias,
                out.data_ptr(), adds, scratch.data_ptr(),
            )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self._library.rms_norm(x.data_ptr(), weight.data_ptr(), *x.shape, epsilon, out.data_ptr())
        return out

    def silu_multiply(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width // 2)
        self._library.silu_multiply(x.data_ptr(), rows, width // 2, out.data_ptr())
        return out

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        return torch.empty((num_blocks, *shape))

    def begin(
        self, config: ModelConfig, batch: Batch, blocks: Tensor, cosine: Tensor, sine: Tensor
    ) -> Pass:
        return NativePass(self._library, config, batch, blocks, cosine, sine)


def _groups(checkpoint: Checkpoint, names: list[str]) -> Groups:
    """The file's own groups if all have the same kind, else new ones of 8 bits."""
    found = [checkpoint.read_groups(name) for name in names]
    kept = [groups for groups in found if groups is not None]
    if len(kept) < len(names) or len({groups.bits for groups in kept}) > 1:
        kept = [packing.quantize(checkpoint.read(name)) for name in names]
    return packing.stack(kept) if len(kept) > 1 else kept[0]


class Cache(ctypes.Structure):
    """Where the kernels find keys and values; as in kernels.c."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in (
            "block_stride", "layer_offset", "value_offset", "block_size", "heads", "head_size",
        )),
    )  # fmt: skip


class NativePass:
    """Attention of one batch: its tasks are made once, and every layer uses them."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        batch: Batch,
        blocks: Tensor,
        cosine: Tensor,
        sine: Tensor,
    ) -> None:
        self._library = library
        self._config = config
        self._batch, self._blocks = batch, blocks  # kept, so that the pointers stay good
        self._cosine, self._sine = cosine, sine
        self._cache = Cache(
            blocks.data_ptr(), blocks.stride(0), 0, blocks.stride(2), blocks.shape[4],
            config.num_kv_heads, config.head_dim,
        )  # fmt: skip
        self._cache_pointer = ctypes.addressof(self._cache)
        group = config.num_heads // config.num_kv_heads
        self._tokens = MOST_QUERIES // group
        self._tasks = tasks_of(batch.starts_s.numpy(), self._tokens)
        is_few = len(self._tasks) * config.num_kv_heads < 4 * torch.get_num_threads()
        self._split = group if is_few else 1

    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        self._cache.layer_offset = layer * self._blocks.stride(1)
        self._library.rotate_and_store(
            qkv.data_ptr(), len(qkv), self._config.num_heads,
            self._cosine.data_ptr(), self._sine.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
            self._config.norm_eps, self._batch.slots_t.data_ptr(), self._cache_pointer,
        )  # fmt: skip

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        config, batch = self._config, self._batch
        out = torch.empty(len(qkv), config.num_heads * config.head_dim)
        self._cache.layer_offset = layer * self._blocks.stride(1)
        self._library.attention(
            qkv.data_ptr(), config.num_heads, self._cache_pointer,
            batch.tables_sw.data_ptr(), batch.tables_sw.stride(0),
            batch.starts_s.data_ptr(), batch.ends_s.data_ptr(), 1 / math.sqrt(config.head_dim),
            self._tasks.ctypes.data, len(self._tasks), self._tokens, self._split, out.data_ptr(),
        )  # fmt: skip
        return out


def tasks_of(starts_s: np.ndarray, tokens: int) -> np.ndarray:
    """[tasks, 2] int32: a sequence and the first of at most `tokens` of its rows."""
    counts = -(-np.diff(starts_s) // tokens)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts_s[sequence] + tokens * within
    return np.ascontiguousarray(np.stack([sequence, first], axis=1).astype(np.int32))
