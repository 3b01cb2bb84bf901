"""The decoder's arithmetic through kernels.c. Calls pass pointers; nothing is copied.

Float32 on a CPU. A row's result is bitwise the same whatever else is in the batch, also with
quantized weights, because inputs are quantized per row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headway.model.backends.base import (
    ForwardPass,
    LayerWeights,
    ModelWeights,
    PassArguments,
    PassOutput,
    Weight,
)
from headway.model.backends.native import structs
from headway.model.backends.native import weights as packing
from headway.model.backends.native.build import load
from headway.model.backends.native.forms import Forms, can_be_wide, matrix_of
from headway.model.backends.native.routing import (
    RoutingBuffers,
    inner_width,
    routing_struct,
    why_not_routed,
)
from headway.model.backends.native.weights import (
    GROUP,
    NativeWeight,
    WeightStruct,
    address,
    layout,
)
from headway.model.backends.split import StepwisePass
from headway.model.config import ModelConfig
from headway.model.experts import Experts
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix

MAX_QUERIES = 32  # rows of queries in one attention task
MAX_HEAD = 256
SCALE_BYTES = 4  # of a row of an 8-bit KV cache
QUANTIZED_TOGETHER = 16  # maximum number of rows that the quantized product quantizes together
PARTS = (
    "preparation", "qkv", "rotation", "attention", "output", "router", "gate_up", "down", "head",
    "choice",
)  # fmt: skip
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
    return why_not_routed(config, lanes)


class NativeBackend:
    """Weights as floats, or quantized: the file's groups, or new 8-bit groups.

    The KV cache is in float32 or int8. A row of an int8 cache (one token's key or value of one head)
    has its float32 scale at its end.
    """

    uses_rope_table, keeps_passes, supports_padding = True, True, False

    def __init__(
        self,
        *,
        is_quantized: bool = False,
        forms: Forms | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`forms` are those of quantized matrices where they differ from the default."""
        assert kv_dtype in (None, torch.float32, torch.int8), f"no KV cache of type {kv_dtype}"
        self.kv_dtype = kv_dtype or torch.float32
        self.library = load()
        self._layers = WeakKeyDictionary[LayerWeights, structs.LayerStruct]()
        self._models = WeakKeyDictionary[ModelWeights, structs.ModelPointers]()
        self._arena = packing.Arena()
        self._buffers: PassBuffers | None = None  # of the latest pass
        self._is_quantized, self._forms = is_quantized, forms or {}
        self.shard: Shard | None = None
        self.times: Tensor | None = None  # int64, nanoseconds by part (PARTS), if set
        self.name = "native quantized" if is_quantized else "native float32"

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> NativeWeight:
        biases = [f"{name}.bias" for name in names if checkpoint.has(f"{name}.bias")]
        bias = torch.cat([checkpoint.read(name).float() for name in biases]) if biases else None
        matrices = [f"{name}.weight" for name in names]
        width = checkpoint.shape(matrices[0])[1]
        wanted = self._forms.get(matrix_of(names[0]))
        is_quantized = self._is_quantized and matrix_of(names[0])  # a router stays in floats
        if not (is_quantized and width % GROUP == 0):
            packed = packing.pack_floats(_floats(checkpoint, matrices), bias)
        elif can_be_wide(width) and (wanted is None or wanted.group > GROUP):
            packed = packing.pack_wide(_floats(checkpoint, matrices), bias)
        else:
            groups = _groups(checkpoint, matrices)
            if wanted is not None and wanted.bits == 8 and groups.bits == 4 and not groups.is_coded:
                groups = replace(groups, bits=5)  # the same numbers, one in each byte
            packed = packing.pack_groups(groups, bias)
        return packed.placed(self._arena)

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        return checkpoint.read(name).float().contiguous()

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        return layer

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, NativeWeight)
        return self._multiply(x, weight, torch.empty(len(x), weight.num_outputs), adds=False)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Weight) -> Tensor:
        """residual + x w, in place."""
        assert isinstance(weight, NativeWeight)
        return self._multiply(x, weight, residual, adds=True)

    def _multiply(self, x: Tensor, weight: NativeWeight, out: Tensor, *, adds: bool) -> Tensor:
        space = Space(len(x), weight.num_inputs, None)
        self.library.multiply(
            ctypes.addressof(weight.struct), x.data_ptr(), len(x), 0, 0.0, out.data_ptr(), adds,
            ctypes.addressof(space.struct),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        self.library.rms_norm(
            x.data_ptr(), weight.data_ptr(), *x.shape, epsilon, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gated(self, x: Tensor, activation: str) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width // 2)
        self.library.gate_rows(
            x.data_ptr(), rows, width // 2, structs.ACTIVATIONS[activation], out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def route(self, logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        rows, outputs = logits.shape
        struct = routing_struct(experts, WeightStruct(outputs=outputs))
        chosen = torch.empty(rows, experts.num_chosen, dtype=torch.int64)
        factors = torch.empty(rows, experts.num_chosen + 1)
        self.library.route(
            ctypes.addressof(struct), logits.data_ptr(), rows, chosen.data_ptr(), factors.data_ptr()
        )
        return chosen, factors

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        is_int8 = self.kv_dtype == torch.int8
        width = config.head_dim + (SCALE_BYTES if is_int8 else 0)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, width)
        return torch.from_numpy(np.empty(shape, np.int8 if is_int8 else np.float32))  # large pages

    def layer_struct(self, layer: LayerWeights, config: ModelConfig) -> structs.LayerStruct:
        if (found := self._layers.get(layer)) is None:
            found = self._layers[layer] = structs.layer_struct(layer, config)
        return found

    def model_pointers(self, model: ModelWeights, config: ModelConfig) -> structs.ModelPointers:
        if (found := self._models.get(model)) is None:
            found = self._models[model] = structs.ModelPointers(model, config)
        return found

    def buffers(self, config: ModelConfig, rows: int, num_sampled: int) -> PassBuffers:
        """Buffers that a call of the library uses; one call runs at a time."""
        found = self._buffers
        if found is None or not found.fit(config, rows, num_sampled, self.times):
            found = self._buffers = PassBuffers(config, rows, num_sampled, self.times)
        return found

    def begin(self, given: PassArguments) -> ForwardPass:
        return NativePass(self, given)


def _floats(checkpoint: Checkpoint, names: list[str]) -> Tensor:
    whole = [checkpoint.read(name).float() for name in names]
    return torch.cat(whole) if len(whole) > 1 else whole[0]


def _groups(checkpoint: Checkpoint, names: list[str]) -> QuantizedMatrix:
    """The file's groups if all have the same number of bits, otherwise new 8-bit groups."""
    found = [checkpoint.read_groups(name) for name in names]
    kept = [groups for groups in found if groups is not None]
    if len(kept) < len(names) or len({(each.bits, each.is_coded) for each in kept}) > 1:
        kept = [packing.quantize(checkpoint.read(name)) for name in names]
    return packing.stack(kept) if len(kept) > 1 else kept[0]


class NativePass(StepwisePass):
    """One batch; all layers of a kind use the same arguments, and all layers the same buffers."""

    _backend: NativeBackend

    def __init__(self, backend: NativeBackend, given: PassArguments) -> None:
        config, batch, blocks, cosine, sine, query_scale = given[:6]
        super().__init__(backend, config)
        rows, size = batch.tokens_t.shape[0], config.head_dim
        task_rows = MAX_QUERIES // (config.num_heads // config.num_kv_heads)
        itemsize = blocks.element_size()
        strides = (blocks.stride(axis) * itemsize for axis in (0, 1, 2, 4))
        cache = structs.CacheStruct(
            blocks.data_ptr(), *strides, blocks.shape[4], config.num_kv_heads, size, 8 * itemsize
        )
        inputs = (
            cosine, sine, query_scale, batch.tokens_t, batch.positions_t, batch.slots_t, batch.tables_sw,
            batch.starts_s, batch.ends_s, batch.sampled_n,
        )  # fmt: skip
        num_sampled, scale = batch.sampled_n.shape[0], config.attention_scale
        self._buffers = buffers = backend.buffers(config, rows, num_sampled)
        self._struct = structs.PassStruct(
            cache, buffers.space.struct, rows, config.num_heads, batch.ends_s.shape[0],
            batch.tables_sw.stride(0), num_sampled, *map(address, inputs),
            buffers.tasks, 0, task_rows, 1, batch.window or 0, config.has_whole_qk_norm,
            1 / math.sqrt(size) if scale is None else scale, *buffers.results,
        )  # fmt: skip
        self._kept = (blocks, inputs)  # keeps pointers valid
        self._hidden = torch.empty(rows, config.hidden_size)
        self._logits = buffers.logits[:num_sampled] if num_sampled else None
        self._best = np.empty(num_sampled, dtype=np.intc)
        self._forward: Callable[[], None] | None = None
        self._pointer = ctypes.addressof(self._struct)

    def run(self, model: ModelWeights, windowed: ForwardPass | None = None) -> PassOutput | None:
        if self._backend.shard is not None:
            return None
        if self._forward is None:
            self._forward = self._prepare(model, windowed)
        self._forward()
        if self._logits is None:
            return PassOutput(self._hidden, None)
        return PassOutput(self._hidden, self._logits, self._best.copy())

    def _prepare(self, model: ModelWeights, windowed: ForwardPass | None) -> Callable[[], None]:
        """The call that takes the batch through the model, with its arguments."""
        assert windowed is None or isinstance(windowed, NativePass)
        pointers = self._backend.model_pointers(model, self._config)
        logits = self._buffers.logits
        return partial(
            self._backend.library.forward,
            pointers.address, self._pointer, 0 if windowed is None else windowed._pointer,
            self._hidden.data_ptr(), logits.data_ptr(), self._best.ctypes.data,
        )  # fmt: skip

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        if self._backend.shard is not None:
            return super().layer(number, layer, x)
        struct = self._backend.layer_struct(layer, self._config)
        self._backend.library.layer(ctypes.addressof(struct), number, self._pointer, x.data_ptr())
        return x

    def rotate_and_store(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *,
        is_rotated: bool = True,
    ) -> None:
        norms, epsilon = (address(q_norm), address(k_norm)), self._config.norm_eps
        self._backend.library.rotate_and_store(
            self._pointer, layer, qkv.data_ptr(), *norms, epsilon, is_rotated
        )

    def attention(self, layer: int, qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(len(qkv), self._config.num_heads * self._config.head_dim)
        self._backend.library.attention(
            self._pointer, layer, qkv.data_ptr(), address(sinks), out.data_ptr()
        )
        return out


class Space:
    """Buffers for the inputs of products of at most `rows` rows and `width` inputs."""

    def __init__(self, rows: int, width: int, times: Tensor | None) -> None:
        threads = torch.get_num_threads()
        shared, own = (rows + QUANTIZED_TOGETHER - 1) * width, OWN_ROWS * width
        self._buffer = torch.empty(shared + threads * own)
        start = self._buffer.data_ptr()
        self.struct = structs.SpaceStruct(threads, start, start + 4 * shared, own, address(times))


class PassBuffers:
    """Buffers for passes of at most `rows` rows, of which `num_sampled` are sampled."""

    def __init__(
        self, config: ModelConfig, rows: int, num_sampled: int, times: Tensor | None
    ) -> None:
        heads, size = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        attended, inner = config.num_heads * size, inner_width(config)
        self._config, self._rows, self._times = config, rows, times
        self.space = Space(rows, max(config.hidden_size, inner // 2, attended), times)
        self.logits = torch.empty(num_sampled, config.vocab_size)
        unnormed = config.hidden_size if config.has_output_norms else 0
        widths = (heads * size, attended, inner, unnormed)
        self._results = [torch.empty(rows, width) for width in widths]
        self._tasks = torch.empty(rows, 2, dtype=torch.int32)
        self.results = [each.data_ptr() for each in self._results]
        self._routing = RoutingBuffers(config, config.experts, rows) if config.experts else None
        self.results.append(self._routing.address if self._routing else 0)
        self.tasks = self._tasks.data_ptr()

    def fit(self, config: ModelConfig, rows: int, num_sampled: int, times: Tensor | None) -> bool:
        is_same = config is self._config and times is self._times
        is_large = rows <= self._rows and num_sampled <= self.logits.shape[0]
        return is_same and is_large and self.space.struct.threads == torch.get_num_threads()
