"""How scores of attention become weights: their scale, a window, and sinks.

A sink is one more logit of a head, which takes part in the softmax but has no value.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.attention.splits import LOG2_E

BASE_2 = tl.constexpr(LOG2_E)


class Scoring(NamedTuple):
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    sinks: Tensor | None = None  # [H]

    def scale_for(self, head_dim: int) -> float:
        """The factor of scores to base 2."""
        return (head_dim**-0.5 if self.scale is None else self.scale) * LOG2_E


DEFAULT = Scoring()


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that the token at this one sees."""
    return 0 if WINDOW is None else tl.maximum(position - (WINDOW - 1), 0)


@triton.jit
def sink_scores(sinks, head, is_here):
    """To base 2; -inf where a head is not here."""
    return tl.load(sinks + head, mask=is_here, other=-float("inf")).to(tl.float32) * BASE_2


@triton.jit
def finite(top):
    """The maximum score, or 0 where nothing is seen yet: scores of -inf minus it stay -inf."""
    return tl.where(top == -float("inf"), 0.0, top)
