"""Quantized matrices as all formats of safetensors files decode to: numbers with shared scales.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import QuantizedMatrix
from headway.model.weights.fp8 import Fp8Matrix

GROUP = 32  # inputs in a group of a QuantizedMatrix


@dataclass(frozen=True, kw_only=True)
class ScaledMatrix:
    """The part `part` of the matrix w = (q - zero) * scale.

    A scale, with its zero, covers `rows` outputs and `columns` inputs, from the first of q on. An
    axis of length 1 covers all.
    """

    q: Tensor  # float8_e4m3fn, or uint8 below 2 ** bits [out, in]
    scale: Tensor  # float32 [out / rows or 1, in / columns or 1]
    zero: Tensor | None  # float32, like the scale; integers have one
    rows: int
    columns: int
    bits: int
    part: Part = EVERYTHING

    def wide(self) -> Tensor:
        """float32 numbers, each rounded once; with 16-bit scales they are exact."""
        found = self.q[self.part].contiguous().float()
        if self.zero is not None:
            found -= self._covering(self.zero)
        found *= self._covering(self.scale)
        return found

    def fp8(self) -> Fp8Matrix | None:
        """8-bit floats with a scale per output; None for integers and for blocks."""
        if self.zero is not None or self.rows > 1 or self.scale.shape[1] > 1:
            return None
        q = self.q[self.part]
        return Fp8Matrix(q=q, scale=self._covering(self.scale)[:, 0].expand(len(q)).contiguous())

    def groups(self) -> QuantizedMatrix | None:
        """Integers in groups of 32; None for floats, or if groups of 32 would have two scales."""
        start, q = self.part.columns.indices(self.q.shape[1])[0], self.q[self.part].contiguous()
        is_whole = self.scale.shape[1] == 1 or self.columns % GROUP == start % GROUP == 0
        if self.zero is None or not is_whole or q.shape[1] % GROUP:
            return None
        scale, minimum = (
            self._covering(each, GROUP).expand(len(q), q.shape[1] // GROUP).contiguous()
            for each in (self.scale, -self.zero * self.scale)
        )
        return QuantizedMatrix(q=q, scale=scale, minimum=minimum, bits=self.bits)

    def _covering(self, each: Tensor, step: int = 1) -> Tensor:
        """Scales or zeros of the part, one for every `step` columns; axes of length 1 stay so."""
        sizes, steps = (self.rows, self.columns), (1, step)
        for axis, (wanted, size, stride) in enumerate(zip(self.part, sizes, steps, strict=True)):
            if each.shape[axis] > 1:
                start, stop, _ = wanted.indices(self.q.shape[axis])
                each = each.index_select(axis, torch.arange(start, stop, stride) // size)
        return each
