"""Reference of kernels/products/linear.py in plain torch. Shapes: M rows, N outputs, K inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def linear(
    x_mk: Tensor,
    weight_nk: Tensor,
    *,
    bias_n: Tensor | None = None,
    epsilon: float | None = None,
    squares_mj: Tensor | None = None,
    is_gated: bool = False,
    residual_mn: Tensor | None = None,
    out_mn: Tensor | None = None,
    squares_out_mj: Tensor | None = None,
    tile: object = None,
) -> Tensor:
    """x weight^T, in this order: divided by the root mean square of x if `epsilon` is given; plus
    bias; if gated, pairs of outputs become silu(first) * second; plus residual (may be `out_mn`).

    Rounded once, at the end. Squares may be in any number of parts.
    """
    total_mn = _wide(x_mk) @ _wide(weight_nk).T
    if epsilon is not None:
        squares_mj = row_squares(x_mk) if squares_mj is None else squares_mj
        total_mn *= torch.rsqrt(squares_mj.sum(1, keepdim=True) / x_mk.shape[1] + epsilon)
    if bias_n is not None:
        total_mn += bias_n
    if is_gated:
        total_mn = F.silu(total_mn[:, 0::2]) * total_mn[:, 1::2]
    if residual_mn is not None:
        total_mn += residual_mn
    if out_mn is None:
        out_mn = torch.empty_like(total_mn, dtype=x_mk.dtype)
    out_mn.copy_(total_mn)
    if squares_out_mj is not None:
        squares_out_mj.zero_()[:, :1] = row_squares(out_mn)
    return out_mn


def row_squares(x_mk: Tensor) -> Tensor:
    """[M, 1] float32: the sum of squares of every row, for a `linear` with a norm."""
    return _wide(x_mk).square().sum(1, keepdim=True).float()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
