"""The structs of kernels.c, made from tensors. The caller must keep the tensors alive."""

from __future__ import annotations

import ctypes

from torch import Tensor

from headway.model.backends import base
from headway.model.backends.native.weights import NativeWeight


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


class WeightStruct(ctypes.Structure):
    _fields_ = (*_pointers("panels", "bias"), *_integers("outputs", "inputs", "bits"))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *_pointers("input_norm", "post_norm", "q_norm", "k_norm"),
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("epsilon", ctypes.c_double),
    )


class PassStruct(ctypes.Structure):
    """What all layers of a forward pass share."""

    _fields_ = (
        ("cache", CacheStruct),
        *_integers("rows", "heads"),
        *_pointers("cosine", "sine", "slots", "tables", "starts", "ends", "tasks"),
        *_integers("table_width", "num_tasks", "tokens", "split"),
        ("scale", ctypes.c_double),
        *_pointers("normed", "qkv", "attended", "inner", "active", "scratch"),
    )


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def struct_of(layer: base.LayerWeights, epsilon: float) -> LayerStruct:
    """A layer's weights as a C struct."""
    return LayerStruct(
        address(layer.input_norm), address(layer.post_norm),
        address(layer.q_norm), address(layer.k_norm),
        *map(_weight, (layer.qkv, layer.output, layer.gate_up, layer.down)), epsilon,
    )  # fmt: skip


def _weight(weight: base.Weight) -> WeightStruct:
    assert isinstance(weight, NativeWeight)
    sizes = (weight.num_outputs, weight.num_inputs, weight.bits)
    return WeightStruct(weight.pointer, address(weight.bias), *sizes)
