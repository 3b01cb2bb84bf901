"""MXFP4: 4-bit floats (e2m1) in blocks of 32 that share a power of two (e8m0)."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 numbers [..., 32 * G] of bytes [..., G, 16] with one scale byte [..., G] each.

    The lower half of a byte comes first. A scale byte of 255 is NaN.
    """
    assert blocks.dtype == scales.dtype == torch.uint8, "MXFP4 consists of bytes"
    assert blocks.shape == (*scales.shape, 16), f"{blocks.shape} has no scales {scales.shape}"
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    powers = scales.view(torch.float8_e8m0fnu).float()
    return (values[halves.int()] * powers[..., None]).flatten(-2)
