"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0)."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.model.weights.scaled import ScaledMatrix

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
BLOCK = 32
NAN = 255  # as a scale
MOST = 12  # the largest of the values as integers, which are twice as large


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 numbers [..., 32 * G] of bytes [..., G, 16] with one scale byte [..., G] each.

    The lower half of a byte comes first. A scale byte of 255 is NaN.
    """
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    return (values[_codes(blocks, scales)] * _powers(scales)[..., None]).flatten(-2)


def integers(blocks: Tensor, scales: Tensor) -> ScaledMatrix | None:
    """The same numbers [N, 32 * G] as 5-bit integers, exact but for the sign of zeros.

    None if float16 numbers cannot hold the scales.
    """
    scale = _powers(scales) / 2
    if ((scale.half() != scale) | (MOST * scale).half().isinf()).any():
        return None
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    q = (2 * values + MOST).to(torch.uint8)[_codes(blocks, scales)].flatten(-2)
    return ScaledMatrix(
        q=q, scale=scale, zero=torch.full((1, 1), float(MOST)), rows=1, columns=BLOCK, bits=5
    )


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    assert blocks.dtype == scales.dtype == torch.uint8, "MXFP4 consists of bytes"
    assert blocks.shape == (*scales.shape, BLOCK // 2), (
        f"{blocks.shape} has no scales {scales.shape}"
    )
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()


def _powers(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float8_e8m0fnu).float()
