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
from headway.model.backends.native.weights import GROUP, NativeWeight, address, layout
from headway.model.backends.split import SplitPass
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.tensors import QuantizedMatrix

MAX_QUERIES = 32  # rows of queries in one attention task
MAX_HEAD = 256
QUANTIZED_TOGETHER = 16  # maximum number of rows that the quantized product quantizes together
PARTS = ("preparation", "qkv", "rotation", "attention", "output", "gate_up", "down")
OWN_ROWS = 8  # size of a thread's own buffer, in rows of floats


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
        self._structs = WeakKeyDictionary[LayerWeights, structs.LayerStruct]()
        self._stacks = WeakKeyDictionary[LayerWeights, structs.LayerStack]()
        self._arena = packing.Arena()
        self._is_quantized = is_quantized
        self.shard: Shard | None = None
        self.times: Tensor | None = None  # int64, nanoseconds by part (PARTS), if set
        self.name = "native quantized" if is_quantized else "native float32"

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> NativeWeight:
        biases = [f"{name}.bias" for name in names if checkpoint.has(f"{name}.bias")]
        bias = torch.cat([checkpoint.read(name).float() for name in biases]) if biases else None
        matrices = [f"{name}.weight" for name in names]
        width = checkpoint.shape(matrices[0])[1]
        if self._is_quantized and self._can_be_wide(width):
            packed = packing.pack_wide(_floats(checkpoint, matrices), bias)
        elif self._is_quantized and width % GROUP == 0:
            packed = packing.pack_groups(_groups(checkpoint, matrices), bias)
        else:
            packed = packing.pack_floats(_floats(checkpoint, matrices), bias)
        return packed.placed(self._arena)

    def _can_be_wide(self, width: int) -> bool:
        return layout().wide_group > 0 and width % layout().wide_group == 0

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        return checkpoint.read(name).float().contiguous()

    def prepared(self, layer: LayerWeights) -> LayerWeights:
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
        space = Space(len(x), weight.num_inputs, None)
        self.library.multiply(
            ctypes.addressof(weight.struct), x.data_ptr(), len(x), 0, 0.0, out.data_ptr(), adds,
            ctypes.addressof(space.struct),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self.library.rms_norm(
            x.data_ptr(), weight.data_ptr(), *x.shape, epsilon, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def silu_multiply(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width // 2)
        self.library.silu_multiply(
            x.data_ptr(), rows, width // 2, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        return torch.from_numpy(np.empty((num_blocks, *shape), np.float32))  # in large pages

    def stack_of(self, layers: Sequence[LayerWeights], epsilon: float) -> structs.LayerStack:
        """The C structs of consecutive layers, valid while these are alive."""
        stack = self._stacks.get(layers[0])
        if stack is None or len(stack) != len(layers):
            for layer in layers:
                if layer not in self._structs:
                    self._structs[layer] = structs.layer_struct(layer, epsilon)
            stack = structs.stack_of([self._structs[layer] for layer in layers])
            self._stacks[layers[0]] = stack
        return stack

    def begin(
        self, config: ModelConfig, batch: ForwardBatch, blocks: Tensor, cosine: Tensor, sine: Tensor
    ) -> ForwardPass:
        whole = NativePass(self, config, batch, blocks, cosine, sine)
        return whole if self.shard is None else SplitPass(whole, self, self.shard, config.norm_eps)


def _floats(checkpoint: Checkpoint, names: list[str]) -> Tensor:
    whole = [checkpoint.read(name).float() for name in names]
    return torch.cat(whole) if len(whole) > 1 else whole[0]


def _groups(checkpoint: Checkpoint, names: list[str]) -> QuantizedMatrix:
    """The file's groups if all have the same number of bits, otherwise new 8-bit groups."""
    found = [checkpoint.read_groups(name) for name in names]
    kept = [groups for groups in found if groups is not None]
    if len(kept) < len(names) or len({groups.bits for groups in kept}) > 1:
        kept = [packing.quantize(checkpoint.read(name)) for name in names]
    return packing.stack(kept) if len(kept) > 1 else kept[0]


class NativePass(ForwardPass):
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
        group, size = config.num_heads // config.num_kv_heads, config.head_dim
        tokens, rows = MAX_QUERIES // group, len(batch.tokens_t)
        tasks = tasks_of(batch.starts_s.numpy(), tokens)
        is_few = len(tasks) * config.num_kv_heads < 4 * torch.get_num_threads()
        cache = structs.CacheStruct(
            blocks.data_ptr(), blocks.stride(0), blocks.stride(1), blocks.stride(2), blocks.shape[4],
            config.num_kv_heads, size,
        )  # fmt: skip
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * size)
        space, buffers = Space(rows, widest, backend.times), _buffers(config, rows)
        self._struct = structs.PassStruct(
            cache, space.struct, rows, config.num_heads, cosine.data_ptr(), sine.data_ptr(),
            batch.slots_t.data_ptr(), batch.tables_sw.data_ptr(), batch.starts_s.data_ptr(),
            batch.ends_s.data_ptr(), tasks.ctypes.data, batch.tables_sw.stride(0), len(tasks),
            tokens, group if is_few else 1, 1 / math.sqrt(size),
            *(part.data_ptr() for part in buffers),
        )  # fmt: skip
        self._kept = (batch, blocks, cosine, sine, tasks, space, buffers)  # keeps pointers valid
        self._pointer = ctypes.addressof(self._struct)

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        return self._run(number, [layer], x)

    def layers(self, layers: Sequence[LayerWeights], x: Tensor) -> Tensor:
        return self._run(0, layers, x)

    def _run(self, first: int, layers: Sequence[LayerWeights], x: Tensor) -> Tensor:
        """Run consecutive layers in one call."""
        stack = self._backend.stack_of(layers, self._config.norm_eps)
        self._backend.library.layers(
            ctypes.addressof(stack), first, len(layers), self._pointer, x.data_ptr()
        )
        return x

    def rotate_and_store(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> None:
        """Run one step of a layer by itself, in place."""
        norms, epsilon = (address(q_norm), address(k_norm)), self._config.norm_eps
        self._backend.library.rotate_and_store(
            self._pointer, layer, qkv.data_ptr(), *norms, epsilon
        )

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        out = torch.empty(len(qkv), self._config.num_heads * self._config.head_dim)
        self._backend.library.attention(self._pointer, layer, qkv.data_ptr(), out.data_ptr())
        return out


class Space:
    """Buffers for the inputs of products of at most `rows` rows and `width` inputs."""

    def __init__(self, rows: int, width: int, times: Tensor | None) -> None:
        threads = torch.get_num_threads()
        shared, own = (rows + QUANTIZED_TOGETHER - 1) * width, OWN_ROWS * width
        self._buffer = torch.empty(shared + threads * own)
        start = self._buffer.data_ptr()
        self.struct = structs.SpaceStruct(threads, start, start + 4 * shared, own, address(times))


def _buffers(config: ModelConfig, rows: int) -> list[Tensor]:
    """Buffers for the intermediate results of a layer."""
    heads, size = config.num_heads + 2 * config.num_kv_heads, config.head_dim
    widths = (heads * size, config.num_heads * size, 2 * config.intermediate_size)
    return [torch.empty(rows, width) for width in widths]


def tasks_of(starts_s: np.ndarray, tokens: int) -> np.ndarray:
    """[tasks, 2] int32: a sequence, and the first of at most `tokens` of its rows."""
    counts = -(-np.diff(starts_s) // tokens)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts_s[sequence] + tokens * within
    return np.ascontiguousarray(np.stack([sequence, first], axis=1).astype(np.int32))
