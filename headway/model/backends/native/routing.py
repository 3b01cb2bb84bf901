"""The C structs of layers with experts, and the buffers that route the rows of a pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import starmap

import torch

from headway.model.backends import base
from headway.model.backends.native.weights import NativeWeight, WeightStruct, address
from headway.model.config import ModelConfig
from headway.model.experts import Experts

MAX_EXPERTS = 1024  # as in experts.c
PRODUCT_BYTES = 128  # of a struct Product
TOGETHER = 16  # largest number of rows whose quantized inputs are interleaved


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int64) for n in ("num_experts", "num_chosen", "normalizes", "has_shared")),
        ("router", WeightStruct),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
    )


class ProductsStruct(ctypes.Structure):
    _fields_ = (
        ("all", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "num_prepared", "num_products")),
    )


class RoutingStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", "factors", "chosen", "pairs", "rows", "outputs", "space")
        ),
        ("gate_up", ProductsStruct),
        ("down", ProductsStruct),
    )


class ExpertPointers:
    """The C struct of a layer's experts, valid while the weights are alive."""

    def __init__(self, layer: base.LayerWeights, about: Experts) -> None:
        assert layer.experts is not None, "the layer has no experts"
        last = [(layer.gate_up, layer.down)] if about.shared_width else []
        pairs = [*zip(layer.experts.gate_up, layer.experts.down, strict=True), *last]
        self._stacks = [_stack(matrices) for matrices in zip(*pairs, strict=True)]
        self.struct = routing_struct(about, struct_of(layer.experts.router), self._stacks)
        self.address = ctypes.addressof(self.struct)


def routing_struct(
    about: Experts, router: WeightStruct, stacks: Sequence[ctypes.Array[WeightStruct]] = ()
) -> ExpertsStruct:
    return ExpertsStruct(
        about.num_experts, about.num_chosen, about.normalizes, about.shared_width > 0, router,
        *map(ctypes.addressof, stacks),
    )  # fmt: skip


def _stack(matrices: Sequence[base.Weight]) -> ctypes.Array[WeightStruct]:
    return (WeightStruct * len(matrices))(*map(struct_of, matrices))


def struct_of(weight: base.Weight) -> WeightStruct:
    """The struct of a matrix; an empty one if the layer does not have it."""
    if isinstance(weight, base.NoWeight):
        return WeightStruct()
    assert isinstance(weight, NativeWeight)
    return weight.struct


class RoutingBuffers:
    """Where the experts find their rows, for passes of at most `rows` rows."""

    def __init__(self, config: ModelConfig, about: Experts, rows: int) -> None:
        chosen, shared = about.num_chosen, about.shared_width
        pairs, places = rows * chosen, rows * (chosen + 1)
        # The rows of each expert are padded to whole interleaved rows.
        padded = pairs + min(pairs, about.num_experts) * (TOGETHER - 1)
        padded_shared = rows + TOGETHER - 1
        inputs = (padded + padded_shared) * config.hidden_size
        inner = padded * about.width + padded_shared * shared
        floats = (
            rows * (about.num_experts + 1), places, places * config.hidden_size, max(inputs, inner),
        )  # fmt: skip
        size = 2 * (about.num_experts + 1) * PRODUCT_BYTES
        self._tensors = [torch.empty(size) for size in floats]
        self._numbers = [torch.empty(n, dtype=torch.int64) for n in (pairs, places, places)]
        self._products = torch.empty(size, dtype=torch.uint8)
        logits, factors, outputs, space = map(address, self._tensors)
        lists = (self._products.data_ptr(), self._products.data_ptr() + size // 2)
        self.struct = RoutingStruct(
            logits, factors, *map(address, self._numbers), outputs, space,
            *starmap(ProductsStruct, ((each, 0, 0, 0) for each in lists)),
        )  # fmt: skip
        self.address = ctypes.addressof(self.struct)


def inner_width(config: ModelConfig) -> int:
    """Numbers for each row between the two products of an MLP, or of all a row's experts."""
    about, dense = config.experts, 2 * config.intermediate_size
    if about is None:
        return dense
    return max(dense, 2 * (about.num_chosen * about.width + about.shared_width))


def why_not_routed(config: ModelConfig, lanes: int) -> str | None:
    """The reason that the kernels cannot run a model's experts; None if they can, or it has none."""
    about = config.experts
    if about is None:
        return None
    for width in (about.width, about.shared_width):
        if width % lanes:
            return f"expert width {width} is not a multiple of {lanes}"
    if config.has_output_norms or not config.has_input_norms:
        return "experts without a norm before them, or with one after them"
    if about.num_experts > MAX_EXPERTS:
        return f"{about.num_experts} experts, above {MAX_EXPERTS}"
    return None
