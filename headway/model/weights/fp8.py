"""fp8 matrices: 8-bit floats with one scale for each output.

Quantizes float matrices. Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.model.config import ModelConfig

FP8 = torch.float8_e4m3fn
MAX_FP8 = torch.finfo(FP8).max
NARROW, NUM_ENDS = 1024, 3  # hidden size and layers; see `float_layers`
PART = 4096  # rows that are quantized at a time: float32 copies are large


def float_layers(config: ModelConfig) -> frozenset[int]:
    """Layers that are not quantized at load: the first and the last three of a narrow model.

    With them in fp8 too, the perplexity of the bundled model is 2 percent higher.
    """
    if config.hidden_size > NARROW:
        return frozenset()
    last = config.num_layers - NUM_ENDS
    return frozenset(n for n in range(config.num_layers) if n < NUM_ENDS or n >= last)


@dataclass(frozen=True, kw_only=True)
class Fp8Matrix:
    """A quantized matrix: w = scale * q."""

    q: Tensor  # float8_e4m3fn [out, in]
    scale: Tensor  # float32 [out]

    def wide(self) -> Tensor:
        return self.q.float() * self.scale[:, None]


def quantize(matrix: Tensor) -> Fp8Matrix:
    """Round a matrix to 8 bits; the largest number of each row becomes the largest of the type."""
    q = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    scale = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for start in range(0, len(matrix), PART):
        part = slice(start, start + PART)
        wide = matrix[part].float()
        scale[part] = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / MAX_FP8
        q[part] = (wide / scale[part, None]).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
    return Fp8Matrix(q=q, scale=scale)


def stacked(matrices: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Matrices with the same inputs, stacked along the outputs."""
    bits = torch.cat([each.q.view(torch.uint8) for each in matrices])
    return Fp8Matrix(q=bits.view(FP8), scale=torch.cat([each.scale for each in matrices]))
