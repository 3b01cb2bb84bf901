"""Weights in the layouts that kernels.c reads: panels of floats, or of 4- and 8-bit groups."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.backends.native.build import load
from headway.model.weights.checkpoint import QuantizedMatrix

GROUP = 32  # inputs that share a scale
CODED = 5  # in place of bits, as in bytes.c: codes of MXFP4
PANELS_PER_TASK = 4  # panels per task of the quantized product
BYTE_PRODUCTS = (
    "portable C (the CPU has no dot products of bytes)",
    "Arm dot products, weights in 8-bit groups of 64",
    "AVX2",
    "AVX-512 VNNI",
    "AVX-512 VNNI and AMX",
    "Arm dot products and 8-bit matrix products (i8mm), weights in 8-bit groups of 64",
)
LINE = 64  # bytes of a cache line
CHUNK = 1 << 25  # bytes


class WeightStruct(ctypes.Structure):
    """A matrix in matrices.c."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits", "group")),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout that the compiled kernels expect."""

    lanes: int  # floats per vector
    panel: int  # outputs per panel of float weights
    is_signed: bool  # whether the byte product takes signed weights
    wide_group: int  # inputs per group of the 8-bit format for Arm; 0 if it cannot be used
    wide_panel: int  # outputs per panel of that format
    byte_products: str  # the instructions that multiply quantized weights


@cache
def layout() -> Layout:
    numbers = (ctypes.c_int64 * 6)()
    load().layout(ctypes.addressof(numbers))
    lanes, panel, is_signed, group, outputs, kind = numbers
    return Layout(lanes, panel, bool(is_signed), group, outputs, BYTE_PRODUCTS[kind])


class Arena:
    """Memory for many matrices. numpy requests large pages for it, so that reading is faster."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor, aligned to a cache line."""
        size = -(-tensor.nbytes // LINE) * LINE
        if len(self._free) < size:
            chunk = np.empty(max(size, CHUNK) + LINE, np.uint8)
            self._free = chunk[-chunk.ctypes.data % LINE :]
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        copied = torch.from_numpy(place).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A matrix [N, K]: floats if bits is 32, otherwise integer groups with float16 scales."""

    packed: Tensor
    struct: WeightStruct
    bias: Tensor | None

    @classmethod
    def of(
        cls, packed: Tensor, shape: Sequence[int], bits: int, group: int, bias: Tensor | None
    ) -> NativeWeight:
        struct = WeightStruct(packed.data_ptr(), address(bias), *shape, bits, group)
        return cls(packed, struct, bias)

    def placed(self, arena: Arena) -> NativeWeight:
        """The same matrix in memory of an arena."""
        struct, shape = self.struct, (self.num_outputs, self.num_inputs)
        return self.of(arena.copy(self.packed), shape, struct.bits, struct.group, self.bias)

    @property
    def num_outputs(self) -> int:
        return int(self.struct.outputs)

    @property
    def num_inputs(self) -> int:
        return int(self.struct.inputs)

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), self.num_inputs)
        struct = ctypes.addressof(self.struct)
        load().weight_rows(struct, ids.data_ptr(), len(ids), out.data_ptr())
        return out


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows with `count` more of zeros; not a copy if there are none."""
    return F.pad(rows, (0, 0, 0, count)) if count else rows


def pack_floats(matrix_nk: Tensor, bias: Tensor | None) -> NativeWeight:
    """Panels [P, K, panel], in the order in which a tile reads them."""
    panel = layout().panel
    whole = _padded(matrix_nk.float(), -len(matrix_nk) % panel)
    packed = whole.view(-1, panel, matrix_nk.shape[1]).transpose(1, 2).contiguous()
    return NativeWeight.of(packed, matrix_nk.shape, 32, 0, bias)


def pack_groups(groups: QuantizedMatrix, bias: Tensor | None) -> NativeWeight:
    """Panels of `lanes` outputs; each group has quads of inputs, then scales and minimums."""
    lanes, (num_outputs, num_inputs) = layout().lanes, groups.q.shape
    q, minimum, bits = groups.q, groups.minimum, 4 if groups.bits == 4 else 8
    kind = CODED if groups.is_coded else bits
    if layout().is_signed and groups.bits == 8:
        q, minimum = q - 128, minimum + 128 * groups.scale  # wraps: the same bytes, signed
    spare = -num_outputs % (lanes * PANELS_PER_TASK)
    quads = _padded(q, spare).view(-1, lanes, num_inputs // GROUP, 8, 4)
    quads = quads.permute(0, 2, 3, 1, 4)  # [panel, group, quad, lane, 4]
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    halves = [
        _padded(part, spare).half().view(-1, lanes, num_inputs // GROUP).transpose(1, 2)
        for part in (groups.scale, minimum)
    ]
    sides = [half.contiguous().view(torch.uint8) for half in halves]
    packed = torch.cat([quads.flatten(2), *sides], dim=2)
    return NativeWeight.of(packed, groups.q.shape, kind, GROUP, bias)


def pack_wide(matrix_nk: Tensor, bias: Tensor | None) -> NativeWeight:
    """8-bit groups for Arm, symmetric around zero, in the layout of dotprod.c."""
    panel, group = layout().wide_panel, layout().wide_group
    num_outputs, num_inputs = matrix_nk.shape
    whole = _padded(matrix_nk.float(), -num_outputs % panel)
    grouped = whole.view(-1, panel, num_inputs // group, group)
    scale, q = _symmetric(grouped)
    quads = q.view(*grouped.shape[:3], group // 4, 4).permute(0, 2, 3, 1, 4)
    sides = scale.half().transpose(1, 2).contiguous().view(torch.int8)
    packed = torch.cat([quads.flatten(2), sides], dim=2)
    return NativeWeight.of(packed, matrix_nk.shape, 8, group, bias)


def _symmetric(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of groups (the last dimension), exact in float16, and integers up to 127."""
    scale = (grouped.abs().amax(-1) / 127).half().float()
    # Where a scale is 0, the numbers are close to 0 and become 0.
    steps = grouped / torch.where(scale > 0, scale, 1.0)[..., None]
    return scale, steps.round_().clamp_(-127, 127).to(torch.int8)


def quantize(matrix_nk: Tensor) -> QuantizedMatrix:
    """Quantize a matrix to 8-bit groups, symmetric around zero."""
    scale, q = _symmetric(matrix_nk.float().view(len(matrix_nk), -1, GROUP))
    above = (q.to(torch.int16) + 128).to(torch.uint8).flatten(1)
    return QuantizedMatrix(q=above, scale=scale, minimum=-128 * scale, bits=8)


def quantized_bytes(shape: tuple[int, int], bits: int) -> int:
    """Bytes of a quantized matrix, without padding: in wide groups if this CPU has them."""
    (rows, columns), wide = shape, layout().wide_group
    if wide and columns % wide == 0:
        return rows * columns * (wide + 2) // wide
    return rows * (columns // GROUP) * ((16 if bits == 4 else 32) + 4)


def stack(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate along the outputs."""
    joined = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("q", "scale", "minimum")
    }
    return QuantizedMatrix(bits=parts[0].bits, is_coded=parts[0].is_coded, **joined)
