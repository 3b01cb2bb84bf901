"""Products of tiles in Triton's interpreter as a tensor core computes them: in the order of inputs.

numpy's product chooses its order of summation by the shape of the tile. On a device an element
depends only on its own row and column, which bench/gpu/deterministic.py tests there.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest


def use_ordered_dots(patch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter, if kernels are interpreted."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)


def _dot(_builder: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
    """d + a b, one input after the other."""
    kind = d.data.dtype
    used = a.data.any(axis=tuple(range(a.data.ndim - 1)))  # other inputs add zeros
    left, right = a.data[..., used].astype(kind), b.data[..., used, :].astype(kind)
    terms = left.swapaxes(-1, -2)[..., :, :, None] * right[..., :, None, :]
    total = np.add.reduce(np.concatenate([d.data[..., None, :, :], terms], axis=-3), axis=-3)
    return type(d)(total, d.dtype.scalar)
