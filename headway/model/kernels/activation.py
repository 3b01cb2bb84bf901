"""The gated activation of an MLP: silu or gelu of the first number of each pair, times the second.

Gate and up of a pair are adjacent. Knows rows, not layers. silu is rounded to the rows' type before
the product, as in torch. The result is optionally quantized to fp8, after it is rounded to the
rows' type.

Legend: T rows, N pairs in a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.model.families.variant import SWIGLU_ALPHA, SWIGLU_LIMIT
from headway.model.kernels.launch import begin, ceil_div, launch_options, launched, power_of_2
from headway.model.kernels.products.fp8 import PIECE, QuantizedRows, row_scale, row_warps

SILU, GELU, CLAMPED_SWIGLU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
GATES = {  # gelu in its tanh form
    "silu": SILU.value, "gelu": GELU.value, "clamped_swiglu": CLAMPED_SWIGLU.value,
}  # fmt: skip
ALPHA, LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def _argument(gate, GATE: tl.constexpr):
    """The activation of x is x times the sigmoid of this."""
    if GATE == GELU:  # limited, so that no exponential overflows
        return tl.maximum(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), -80.0)
    return gate * ALPHA if GATE == CLAMPED_SWIGLU else gate


@triton.jit
def _clamped(gate, up, GATE: tl.constexpr):
    if GATE == CLAMPED_SWIGLU:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    return gate, up


@triton.jit
def paired(total_mn, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr = SILU):
    """float32: gate and up are adjacent; each pair becomes one output, silu(gate) * up."""
    gate, up = tl.split(tl.reshape(total_mn, (ROWS, OUTPUTS // 2, 2)))
    gate, up = _clamped(gate, up, GATE)
    return gate * tl.sigmoid(_argument(gate, GATE)) * up


@triton.jit
def _gated(x_2n, first, WIDTH: tl.constexpr, PIECE: tl.constexpr, GATE: tl.constexpr = SILU):
    """PIECE results of a row of pairs from the pair `first` on, rounded to the row's type."""
    both = first * 2 + tl.arange(0, 2 * PIECE)
    pairs = tl.load(x_2n + both, mask=both < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(pairs.to(tl.float32), (PIECE, 2)))
    gate, up = _clamped(gate, up, GATE)
    silu = (gate / (1.0 + tl.exp(-_argument(gate, GATE)))).to(x_2n.dtype.element_ty).to(tl.float32)
    return (silu * up).to(x_2n.dtype.element_ty)


@launched
@triton.jit
def _silu_multiply(
    out_tn, x_t2n, x_stride,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, GATE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """PIECE pairs of one row; PIECES programs compute a row."""
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    first = (tl.program_id(0) % PIECES) * PIECE
    column = first + tl.arange(0, PIECE)
    begin(CHAINED)
    out = _gated(x_t2n + row * x_stride, first, WIDTH, PIECE, GATE)
    tl.store(out_tn + row * WIDTH + column, out, mask=column < WIDTH)


@launched
@triton.jit
def _silu_quantize(
    values_tn, scale_t, x_t2n, x_stride,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, in pieces: the first pass finds the scale; the second reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    begin(CHAINED)
    x_2n = x_t2n + row * x_stride
    top = tl.zeros((PIECE,), tl.float32)
    for start in range(0, WIDTH, PIECE):
        top = tl.maximum(top, tl.abs(_gated(x_2n, start, WIDTH, PIECE).to(tl.float32)))
    scale = row_scale(tl.max(top, 0))
    tl.store(scale_t + row, scale)
    for start in range(0, WIDTH, PIECE):
        column = start + tl.arange(0, PIECE)
        piece = _gated(x_2n, start, WIDTH, PIECE).to(tl.float32)
        rounded = (piece / scale).to(values_tn.dtype.element_ty)
        tl.store(values_tn + row * WIDTH + column, rounded, mask=column < WIDTH)


def silu_multiply(x_t2n: Tensor, activation: str = "silu") -> Tensor:
    """silu (or gelu) of the first number of every pair, times the second: [T, N]."""
    num_rows, width = x_t2n.shape[0], x_t2n.shape[1] // 2
    assert x_t2n.stride(1) == 1, "a row must be contiguous"
    out_tn = torch.empty((num_rows, width), dtype=x_t2n.dtype, device=x_t2n.device)
    if num_rows == 0:
        return out_tn
    piece = min(power_of_2(width), 1024)
    pieces = ceil_div(width, piece)
    num_warps = max(piece // 256, 1)  # a thread holds 8 numbers: two wide loads
    _silu_multiply[(num_rows * pieces,)](
        out_tn, x_t2n, x_t2n.stride(0),
        WIDTH=width, PIECES=pieces, PIECE=piece, GATE=GATES[activation],
        **launch_options(num_warps, 1),
    )  # fmt: skip
    return out_tn


def silu_multiply_quantized(x_t2n: Tensor) -> QuantizedRows:
    """Like `silu_multiply`, quantized."""
    num_rows, width = x_t2n.shape[0], x_t2n.shape[1] // 2
    assert x_t2n.stride(1) == 1, "a row must be contiguous"
    out = QuantizedRows.empty(width, x_t2n)
    if num_rows:
        piece = min(power_of_2(width), PIECE // 2)
        _silu_quantize[(num_rows,)](
            out.values_tk, out.scale_t, x_t2n, x_t2n.stride(0),
            WIDTH=width, PIECE=piece, **launch_options(row_warps(2 * piece), 1),
        )  # fmt: skip
    return out
