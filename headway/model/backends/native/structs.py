"""The structs of kernels.c, made from tensors. The caller must keep the tensors alive."""

from __future__ import annotations

import ctypes

from headway.model.backends import base
from headway.model.backends.native.routing import ExpertPointers, struct_of
from headway.model.backends.native.weights import WeightStruct, address
from headway.model.config import ModelConfig

ACTIVATIONS = {"silu": 1, "gelu": 2, "clamped_swiglu": 3}  # as in norms.c


def _integers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class CacheStruct(ctypes.Structure):
    """The memory layout of keys and values; strides and offsets in bytes."""

    _fields_ = (
        *_pointers("blocks"),
        *_integers("block_stride", "layer_offset", "value_offset", "row_bytes"),
        *_integers("block_size", "heads", "head_size", "bits"),
    )


class LayerStruct(ctypes.Structure):
    kept: ExpertPointers | None  # keeps `experts` valid
    _fields_ = (
        *_pointers("input_norm", "post_norm", "q_norm", "k_norm", "attention_norm", "mlp_norm"),
        *_pointers("sinks"),
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("epsilon", ctypes.c_double),
        *_integers("activation", "is_windowed", "is_rotated"),
        *_pointers("experts"),
    )


class ModelStruct(ctypes.Structure):
    """All weights of a model; `layers` points to the addresses of LayerStructs."""

    _fields_ = (
        ("embedding", WeightStruct),
        ("head", WeightStruct),
        *_pointers("norm"),
        ("epsilon", ctypes.c_double),
        ("embedding_scale", ctypes.c_double),
        *_pointers("layers"),
        *_integers("num_layers"),
    )


class SpaceStruct(ctypes.Structure):
    """Buffers that the rows of a pass share, or that each thread has for itself."""

    _fields_ = (
        *_integers("threads"),
        *_pointers("scratch", "own"),
        *_integers("own_size"),
        *_pointers("times"),
    )


class PassStruct(ctypes.Structure):
    """What all layers of a kind share in a forward pass."""

    _fields_ = (
        ("cache", CacheStruct),
        ("space", SpaceStruct),
        *_integers("rows", "heads", "sequences", "table_width", "num_sampled"),
        *_pointers("cosine", "sine", "query_scale", "tokens", "positions", "slots", "tables"),
        *_pointers("starts", "ends", "sampled", "tasks"),
        *_integers("num_tasks", "task_rows", "split", "window", "has_whole_norms"),
        ("scale", ctypes.c_double),
        *_pointers("qkv", "attended", "inner", "unnormed", "routing"),
    )


def layer_struct(
    layer: base.LayerWeights, config: ModelConfig, *, is_windowed: bool = False
) -> LayerStruct:
    norms = (
        layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm, layer.attention_norm,
        layer.mlp_norm, layer.sinks,
    )  # fmt: skip
    experts = None
    if layer.experts is not None and config.experts is not None:
        experts = ExpertPointers(layer, config.experts)
    struct = LayerStruct(
        *map(address, norms),
        *map(struct_of, (layer.qkv, layer.output, layer.gate_up, layer.down)),
        config.norm_eps, ACTIVATIONS[config.activation], is_windowed, layer.is_rotated,
        experts.address if experts else 0,
    )  # fmt: skip
    struct.kept = experts
    return struct


class ModelPointers:
    """The C structs of a model, valid while its weights are alive."""

    def __init__(self, model: base.ModelWeights, config: ModelConfig) -> None:
        layers = [
            layer_struct(layer, config, is_windowed=number in config.windowed_layers)
            for number, layer in enumerate(model.layers)
        ]
        stack = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
        struct = ModelStruct(
            struct_of(model.embedding), struct_of(model.head), address(model.norm),
            config.norm_eps, config.embedding_scale, ctypes.addressof(stack), len(layers),
        )  # fmt: skip
        self._kept = (layers, stack, struct)
        self.address = ctypes.addressof(struct)
