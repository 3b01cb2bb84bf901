"""Quantized matrices as all formats of safetensors files decode to: numbers with shared scales.

Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        found = self.q.float()
        if self.zero is not None:
            found -= self._spread(self.zero)
        found *= self._spread(self.scale)
        return found[self.part].contiguous()

    def fp8(self) -> Fp8Matrix | None:
        """8-bit floats with a scale per output; None for integers and for blocks."""
        if self.zero is not None or self.rows > 1 or self.scale.shape[1] > 1:
            return None
        scale = self.scale[:, 0].expand(len(self.q))[self.part.rows]
        return Fp8Matrix(q=self.q[self.part], scale=scale.contiguous())

    def groups(self) -> QuantizedMatrix | None:
        """Integers in groups of 32; None for floats, or if groups of 32 would have two scales."""
        start, stop, _ = self.part.columns.indices(self.q.shape[1])
        has_one = self.scale.shape[1] == 1
        is_whole = has_one or self.columns % GROUP == start % GROUP == 0
        if self.zero is None or not is_whole or (stop - start) % GROUP:
            return None
        scale, minimum = (
            self._by_group(each, start, stop) for each in (self.scale, -self.zero * self.scale)
        )
        q = self.q[self.part].contiguous()
        return QuantizedMatrix(q=q, scale=scale, minimum=minimum, bits=self.bits)

    def _by_group(self, each: Tensor, start: int, stop: int) -> Tensor:
        """One number for each group of 32 in the columns [start, stop) and the part's rows."""
        wanted = slice(start // GROUP, stop // GROUP)
        if each.shape[1] == 1:
            found = each.expand(len(self.q), (stop - start) // GROUP)
        else:
            found = each.repeat_interleave(self.columns // GROUP, 1)[:, wanted]
        return found[self.part.rows].contiguous()

    def _spread(self, each: Tensor) -> Tensor:
        """One number for each of q; axes of length 1 stay so."""
        for axis, size in enumerate((self.rows, self.columns)):
            if each.shape[axis] > 1 and size > 1:
                each = each.repeat_interleave(size, axis).narrow(axis, 0, self.q.shape[axis])
        return each
