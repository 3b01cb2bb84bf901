"""The structs of kernels.c, made from tensors. The caller must keep the tensors alive."""

from __future__ import annotations

import ctypes

from headway.model.backends import base
from headway.model.backends.native.weights import NativeWeight, WeightStruct, address


def _integers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _pointers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class CacheStruct(ctypes.Structure):
    """The memory layout of keys and values."""

    _fields_ = (
        *_pointers("blocks"),
        *_integers("block_stride", "layer_offset", "value_offset", "block_size"),
        *_integers("heads", "head_size"),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *_pointers("input_norm", "post_norm", "q_norm", "k_norm"),
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("epsilon", ctypes.c_double),
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
    """What all layers of a forward pass share."""

    _fields_ = (
        ("cache", CacheStruct),
        ("space", SpaceStruct),
        *_integers("rows", "heads"),
        *_pointers("cosine", "sine", "slots", "tables", "starts", "ends", "tasks"),
        *_integers("table_width", "num_tasks", "tokens", "split"),
        ("scale", ctypes.c_double),
        *_pointers("qkv", "attended", "inner"),
    )


def layer_struct(layer: base.LayerWeights, epsilon: float) -> LayerStruct:
    """A layer's weights as a C struct."""
    return LayerStruct(
        address(layer.input_norm), address(layer.post_norm),
        address(layer.q_norm), address(layer.k_norm),
        *map(_struct_of, (layer.qkv, layer.output, layer.gate_up, layer.down)), epsilon,
    )  # fmt: skip


def _struct_of(weight: base.Weight) -> WeightStruct:
    assert isinstance(weight, NativeWeight)
    return weight.struct


LayerStack = ctypes.Array[ctypes.c_void_p]  # addresses of layers


def stack_of(layers: list[LayerStruct]) -> LayerStack:
    return (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
