"""The decoder's arithmetic through kernels.c. Calls pass pointers; nothing is copied.

Float32 on a CPU. A row's result is bitwise the same whatever else is in the batch, also with
quantized weights, because inputs are quantized per row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headway.model.backends.base import ForwardPass, LayerWeights, Weight
from headway.model.backends.native import structs
from headway.model.backends.native import weights as packing
from headway.model.backends.native.build import load
from headway.model.backends.native.weights import GROUP, NativeWeight, layout
from headway.model.backends.split import SplitPass
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.tensors import QuantizedMatrix

MAX_QUERIES = 32  # rows of queries in one attention task
MAX_HEAD = 256
QUANTIZED_TOGETHER = 16  # maximum number of rows that the quantized product quantizes together


def unsupported_reason(config: ModelConfig) -> str | None:
    """The reason that a model cannot use these kernels; None if it can."""
    lanes = layout().lanes
    if config.head_dim % lanes or config.head_dim > MAX_HEAD:
        return f"head size {config.head_dim} is not a multiple of {lanes}, or above {MAX_HEAD}"
    if config.intermediate_size % lanes:
        return f"intermediate size {config.intermediate_size} is not a multiple of {lanes}"
    if config.num_heads // config.num_kv_heads > MAX_QUERIES:
        return f"more than {MAX_QUERIES} query heads share a key-value head"
    return None


class NativeBackend:
    """Weights as floats, or quantized: the file's groups, or new 8-bit groups."""

    uses_rope_table = supports_padding = False

    def __init__(self, *, is_quantized: bool = False) -> None:
        self.library = load()
        self._structs = WeakKeyDictionary[
            LayerWeights, structs.LayerStruct
        ]()  # created on first use
        self._is_quantized = is_quantized
        self.shard: Shard | None = None
        self.name = "native quantized" if is_quantized else "native float32"

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> NativeWeight:
        biases = [f"{name}.bias" for name in names if checkpoint.has(f"{name}.bias")]
        bias = torch.cat([checkpoint.read(name).float() for name in biases]) if biases else None
        matrices = [f"{name}.weight" for name in names]
        width = checkpoint.shape(matrices[0])[1]
        if self._is_quantized and width % GROUP == 0:
            return packing.pack_groups(_groups(checkpoint, matrices), bias)
        whole = [checkpoint.read(name).float() for name in matrices]
        return packing.pack_floats(torch.cat(whole) if len(whole) > 1 else whole[0], bias)

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        return checkpoint.read(name).float().contiguous()

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        return layer

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        out = torch.empty(len(x), weight.num_outputs)
        self._multiply(x, weight, out, 0)
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
        """residual + x w, in place."""
        assert isinstance(weight, NativeWeight)
        self._multiply(x, weight, residual, 1)
        return residual

    def _multiply(self, x: Tensor, weight: NativeWeight, out: Tensor, adds: int) -> None:
        bias = 0 if weight.bias is None else weight.bias.data_ptr()
        rows, width = len(x), weight.num_inputs
        if weight.bits == 32:
            self.library.linear(
                x.data_ptr(), rows, width, weight.pointer, weight.num_outputs, bias,
                out.data_ptr(), adds,
            )  # fmt: skip
        else:
            scratch = torch.empty(rows + QUANTIZED_TOGETHER - 1, width)  # bytes, scales and sums
            self.library.quantized_linear(
                x.data_ptr(), rows, width, weight.pointer, weight.num_outputs, weight.bits, bias,
                out.data_ptr(), adds, scratch.data_ptr(),
            )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self.library.rms_norm(x.data_ptr(), weight.data_ptr(), *x.shape, epsilon, out.data_ptr())
        return out

    def silu_multiply(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width // 2)
        self.library.silu_multiply(x.data_ptr(), rows, width // 2, out.data_ptr())
        return out

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        return torch.empty((num_blocks, *shape))

    def struct_of(self, layer: LayerWeights, epsilon: float) -> int:
        """Address of a layer's C struct; valid while the layer is alive."""
        if layer not in self._structs:
            self._structs[layer] = structs.struct_of(layer, epsilon)
        return ctypes.addressof(self._structs[layer])

    def begin(
        self, config: ModelConfig, batch: ForwardBatch, blocks: Tensor, cosine: Tensor, sine: Tensor
    ) -> ForwardPass:
        whole = NativePass(self, config, batch, blocks, cosine, sine)
        return whole if self.shard is None else SplitPass(whole, self, self.shard, config.norm_eps)


def _groups(checkpoint: Checkpoint, names: list[str]) -> QuantizedMatrix:
    """The file's groups if all have the same number of bits, otherwise new 8-bit groups."""
    found = [checkpoint.read_groups(name) for name in names]
    kept = [groups for groups in found if groups is not None]
    if len(kept) < len(names) or len({groups.bits for groups in kept}) > 1:
        kept = [packing.quantize(checkpoint.read(name)) for name in names]
    return packing.stack(kept) if len(kept) > 1 else kept[0]


class NativePass:
    """One batch; its attention tasks and buffers are created once, and all layers use them."""

    def __init__(
        self,
        backend: NativeBackend,
        config: ModelConfig,
        batch: ForwardBatch,
        blocks: Tensor,
        cosine: Tensor,
        sine: Tensor,
    ) -> None:
        self._backend, self._config = backend, config
        self._blocks = blocks
        group, size = config.num_heads // config.num_kv_heads, config.head_dim
        tokens = MAX_QUERIES // group
        tasks = tasks_of(batch.starts_s.numpy(), tokens)
        is_few = len(tasks) * config.num_kv_heads < 4 * torch.get_num_threads()
        cache = structs.CacheStruct(
            blocks.data_ptr(), blocks.stride(0), 0, blocks.stride(2), blocks.shape[4],
            config.num_kv_heads, size,
        )  # fmt: skip
        rows, self._buffers = len(batch.tokens_t), _buffers(config, len(batch.tokens_t))
        self._struct = structs.PassStruct(
            cache, rows, config.num_heads, cosine.data_ptr(), sine.data_ptr(),
            batch.slots_t.data_ptr(), batch.tables_sw.data_ptr(), batch.starts_s.data_ptr(),
            batch.ends_s.data_ptr(), tasks.ctypes.data, batch.tables_sw.stride(0), len(tasks),
            tokens, group if is_few else 1, 1 / math.sqrt(size),
            *(part.data_ptr() for part in self._buffers),
        )  # fmt: skip
        self._kept = (batch, cosine, sine, tasks)  # keeps the pointers valid
        self._cache = ctypes.addressof(self._struct)  # the struct's first member
        self._pointer = ctypes.addressof(self._struct)

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        self._struct.cache.layer_offset = number * self._blocks.stride(1)
        weights = self._backend.struct_of(layer, self._config.norm_eps)
        self._backend.library.layer(weights, self._pointer, x.data_ptr())
        return x

    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Run one step of a layer by itself, in place."""
        step = self._struct
        step.cache.layer_offset = layer * self._blocks.stride(1)
        self._backend.library.rotate_and_store(
            qkv.data_ptr(), len(qkv), step.heads, step.cosine, step.sine,
            structs.address(q_norm), structs.address(k_norm), self._config.norm_eps, step.slots,
            self._cache,
        )  # fmt: skip

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        step, config = self._struct, self._config
        out = torch.empty(len(qkv), config.num_heads * config.head_dim)
        step.cache.layer_offset = layer * self._blocks.stride(1)
        self._backend.library.attention(
            qkv.data_ptr(), step.heads, self._cache, step.tables, step.table_width, step.starts,
            step.ends, step.scale, step.tasks, step.num_tasks, step.tokens, step.split,
            out.data_ptr(),
        )  # fmt: skip
        return out


def _buffers(config: ModelConfig, rows: int) -> list[Tensor]:
    """Buffers for the intermediate results of a layer."""
    heads, size = config.num_heads + 2 * config.num_kv_heads, config.head_dim
    widest = max(config.hidden_size, config.intermediate_size, config.num_heads * size)
    widths = (config.hidden_size, heads * size, config.num_heads * size)
    widths_inside = (2 * config.intermediate_size, config.intermediate_size)
    buffers = [torch.empty(rows, width) for width in (*widths, *widths_inside)]
    return [*buffers, torch.empty(rows + QUANTIZED_TOGETHER - 1, widest)]


def tasks_of(starts_s: np.ndarray, tokens: int) -> np.ndarray:
    """[tasks, 2] int32: a sequence, and the first of at most `tokens` of its rows."""
    counts = -(-np.diff(starts_s) // tokens)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts_s[sequence] + tokens * within
    return np.ascontiguousarray(np.stack([sequence, first], axis=1).astype(np.int32))
