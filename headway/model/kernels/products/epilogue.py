"""What products of few rows do after the sum: a norm, a bias, a gate, a residual, a store.

Loads are functions of their own, so that a kernel can start them before the product and nothing
waits for them later. Whatever is not given is 0 or 1 and is not used. Knows no tiles.

Shapes: M rows, N outputs, K inputs, J parts of a sum of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headway.model.kernels.activation import paired


@triton.jit
def load_squares(squares_mj, near_m, NUM_SQUARES: tl.constexpr, SQUARES_ROOM: tl.constexpr):
    """The parts of each row's sum of squares; zero without squares."""
    squares = 0.0
    if squares_mj is not None:
        j = tl.arange(0, SQUARES_ROOM)[None, :]
        place = squares_mj + near_m[:, None] * NUM_SQUARES + j
        squares = tl.load(place, mask=j < NUM_SQUARES, other=0.0)
    return squares


@triton.jit
def norm_factor(squares, squares_mj, epsilon, K: tl.constexpr):
    """One over the root mean square of each row; one without squares."""
    factor_m = 1.0
    if squares_mj is not None:
        factor_m = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)
    return factor_m


@triton.jit
def _place(
    first, near_m, is_row, num_outputs, out_stride, IS_GATED: tl.constexpr, WIDTH: tl.constexpr
):
    """The places of WIDTH products from `first` on in the output, and whether they are in it."""
    DIVISOR: tl.constexpr = 2 if IS_GATED else 1
    n = first // DIVISOR + tl.arange(0, WIDTH // DIVISOR)
    is_inside = is_row[:, None] & (n < num_outputs // DIVISOR)[None, :]
    return near_m[:, None] * out_stride + n[None, :], is_inside


@triton.jit
def load_ends(
    first, bias_n, residual_mn, near_m, is_row, num_outputs, out_stride,
    IS_GATED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What `finish` adds to WIDTH products from `first` on: bias and residual, zero without them."""
    bias, residual = 0.0, 0.0
    if bias_n is not None:
        n = first + tl.arange(0, WIDTH)
        bias = tl.load(bias_n + n, mask=n < num_outputs, other=0.0)
    if residual_mn is not None:
        place, is_inside = _place(first, near_m, is_row, num_outputs, out_stride, IS_GATED, WIDTH)
        residual = tl.load(residual_mn + place, mask=is_inside, other=0.0)
    return bias, residual


@triton.jit
def finish(
    total, first, factor_m, bias, residual, squares_mj, bias_n, residual_mn, out_mn, near_m, is_row,
    num_outputs, out_stride, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Norm, bias, gate and residual; store, and return the squares of the output.

    `first` and `num_outputs` are counted before the gate. IS_GATED is 0 or one of GATES.
    """
    if squares_mj is not None:
        total *= factor_m[:, None]
    if bias_n is not None:
        total += bias[None, :].to(tl.float32)
    WIDTH: tl.constexpr = total.shape[1]
    place, is_inside = _place(first, near_m, is_row, num_outputs, out_stride, IS_GATED, WIDTH)
    if IS_GATED:
        total = paired(total, total.shape[0], WIDTH, IS_GATED)
    if residual_mn is not None:
        total += residual.to(tl.float32)
    rounded = total.to(out_mn.dtype.element_ty)
    tl.store(out_mn + place, rounded, mask=is_inside)
    stored = tl.where(is_inside, rounded.to(tl.float32), 0.0)
    return tl.sum(stored * stored, 1)
