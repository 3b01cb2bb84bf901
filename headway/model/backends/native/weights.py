"""Weights in the layouts that kernels.c reads: panels of floats, or of 4- and 8-bit groups."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.backends.native.build import load
from headway.model.weights.tensors import QuantizedMatrix

GROUP = 32  # inputs that share a scale
PANELS_PER_TASK = 4  # panels per task of the quantized product


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout that the compiled kernels expect."""

    lanes: int  # floats per vector
    panel: int  # outputs per panel of float weights
    is_signed: bool  # whether the byte product takes signed weights


@cache
def layout() -> Layout:
    numbers = (ctypes.c_int64 * 3)()
    load().layout(ctypes.addressof(numbers))
    return Layout(numbers[0], numbers[1], bool(numbers[2]))


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A matrix [N, K]: floats if bits is 32, otherwise integer groups with float16 scales."""

    packed: Tensor
    pointer: int
    num_outputs: int
    num_inputs: int
    bits: int
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        if self.bits == 32:
            panel = layout().panel
            return self.packed[ids // panel, :, ids % panel].contiguous()
        out = torch.empty(len(ids), self.num_inputs)
        load().quantized_rows(
            ids.data_ptr(), len(ids), self.num_inputs, self.pointer, self.bits, out.data_ptr()
        )
        return out


def pack_floats(matrix_nk: Tensor, bias: Tensor | None) -> NativeWeight:
    """Panels [P, K, panel], in the order in which a tile reads them."""
    num_outputs, num_inputs = matrix_nk.shape
    panel = layout().panel
    whole = F.pad(matrix_nk.float(), (0, 0, 0, -num_outputs % panel))
    packed = whole.view(-1, panel, num_inputs).transpose(1, 2).contiguous()
    return NativeWeight(packed, packed.data_ptr(), num_outputs, num_inputs, 32, bias)


def pack_groups(groups: QuantizedMatrix, bias: Tensor | None) -> NativeWeight:
    """Panels of `lanes` outputs; each group has quads of inputs, then scales and minimums."""
    lanes, (num_outputs, num_inputs) = layout().lanes, groups.q.shape
    q, minimum, bits = groups.q, groups.minimum, 4 if groups.bits == 4 else 8
    if layout().is_signed and groups.bits == 8:
        q, minimum = q - 128, minimum + 128 * groups.scale  # wraps: the same bytes, signed
    spare = -num_outputs % (lanes * PANELS_PER_TASK)
    quads = F.pad(q, (0, 0, 0, spare)).view(-1, lanes, num_inputs // GROUP, 8, 4)
    quads = quads.permute(0, 2, 3, 1, 4)  # [panel, group, quad, lane, 4]
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    halves = [
        F.pad(part, (0, 0, 0, spare)).half().view(-1, lanes, num_inputs // GROUP).transpose(1, 2)
        for part in (groups.scale, minimum)
    ]
    sides = [half.contiguous().view(torch.uint8) for half in halves]
    packed = torch.cat([quads.flatten(2), *sides], dim=2)
    return NativeWeight(packed, packed.data_ptr(), num_outputs, num_inputs, bits, bias)


def quantize(matrix_nk: Tensor) -> QuantizedMatrix:
    """Quantize a matrix to 8-bit groups, symmetric around zero."""
    grouped = matrix_nk.float().view(len(matrix_nk), -1, GROUP)
    scale = (grouped.abs().amax(2) / 127).half().float()
    steps = torch.where(scale[..., None] > 0, grouped / scale[..., None], 0.0)
    q = (steps.round().clamp(-127, 127) + 128).to(torch.uint8).flatten(1)
    return QuantizedMatrix(q=q, scale=scale, minimum=-128 * scale, bits=8)


def stack(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate along the outputs."""
    return QuantizedMatrix(
        q=torch.cat([part.q for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        minimum=torch.cat([part.minimum for part in parts]),
        bits=parts[0].bits,
    )
