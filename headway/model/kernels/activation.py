"""The gated activation of an MLP: silu of the first number of each pair, times the second.

Gate and up of a pair are adjacent. Knows rows, not layers. silu is rounded to the rows' type before
the product, as in torch.

Legend: T rows, N pairs in a row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2


@launched
@triton.jit
def _silu_multiply(
    out_tn, x_t2n, x_stride,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PIECE pairs of one row; PIECES programs compute a row."""
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    column = (tl.program_id(0) % PIECES) * PIECE + tl.arange(0, PIECE)
    is_here = column < WIDTH
    begin(CHAINED)
    both = (tl.program_id(0) % PIECES) * (2 * PIECE) + tl.arange(0, 2 * PIECE)
    pairs = tl.load(x_t2n + row * x_stride + both, mask=both < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(pairs.to(tl.float32), (PIECE, 2)))
    silu = (gate / (1.0 + tl.exp(-gate))).to(x_t2n.dtype.element_ty).to(tl.float32)
    tl.store(out_tn + row * WIDTH + column, (silu * up).to(out_tn.dtype.element_ty), mask=is_here)


def silu_multiply(x_t2n: Tensor) -> Tensor:
    """silu of the first number of every pair, times the second: [T, N]."""
    num_rows, width = x_t2n.shape[0], x_t2n.shape[1] // 2
    assert x_t2n.stride(1) == 1, "a row must be contiguous"
    out_tn = torch.empty((num_rows, width), dtype=x_t2n.dtype, device=x_t2n.device)
    if num_rows == 0:
        return out_tn
    piece = min(power_of_2(width), 1024)
    pieces = ceil_div(width, piece)
    _silu_multiply[(num_rows * pieces,)](
        out_tn, x_t2n, x_t2n.stride(0),
        WIDTH=width, PIECES=pieces, PIECE=piece, **launch_options(_num_warps(piece), 1),
    )  # fmt: skip
    return out_tn


def _num_warps(piece: int) -> int:
    """A thread holds 8 numbers: two wide loads."""
    return max(piece // 256, 1)
