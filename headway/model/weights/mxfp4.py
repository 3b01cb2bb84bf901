"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.weights.checkpoint import QuantizedMatrix

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
VALUES = (*SIZES, *(-size for size in SIZES))  # by code
OFFSET = 12
INTEGERS = tuple(int(2 * value) + OFFSET for value in VALUES)  # as in bytes.c
BLOCK = 32
NAN = 255  # as a scale


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 numbers [..., 32 * G] of bytes [..., G, 16] with one scale byte [..., G] each.

    The lower half of a byte comes first. A scale byte of 255 is NaN.
    """
    assert blocks.dtype == scales.dtype == torch.uint8, "MXFP4 consists of bytes"
    assert blocks.shape == (*scales.shape, 16), f"{blocks.shape} has no scales {scales.shape}"
    values, byte = torch.tensor(VALUES), torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), -1)
    return (F.embedding(blocks.int(), pairs).flatten(-2) * _powers(scales)[..., None]).flatten(-2)


def groups(blocks: Tensor, scales: Tensor) -> QuantizedMatrix | None:
    """A matrix [N, 32 * G] with these numbers; None if float16 cannot hold the scales."""
    is_zero = (blocks & 0x77).amax(-1) == 0  # any scale will do
    scale = torch.where(is_zero, 1.0, _powers(scales) / 2)
    minimum = -OFFSET * scale
    if ((scale.half() != scale) | (minimum.half() != minimum)).any():
        return None
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return QuantizedMatrix(q=codes, scale=scale, minimum=minimum, bits=4, is_coded=True)


def _powers(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float8_e8m0fnu).float()
