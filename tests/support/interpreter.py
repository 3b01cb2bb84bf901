"""Makes Triton's interpreter faster by caching what it computes again and again."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def speed_up() -> None:
    """Patch the interpreter for the rest of the process; kernels give the same results."""
    interpreter, core = (
        sys.modules["triton.runtime.interpreter"],
        sys.modules["triton.language.core"],
    )
    semantic = sys.modules["triton.language.semantic"].TritonSemantic
    interpreter.InterpretedFunction.__call__ = prepared_once(interpreter.InterpretedFunction)
    semantic.binary_op_sanitize_overflow_impl = check_overflow
    core.block_type.__init__ = described_once(core)
    core.tensor.__init__ = shaped_once(core.tensor)
    interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)


def prepared_once(kind: Any) -> Any:
    """The interpreter patches its language module for every call of a function in a kernel.

    Once per function is enough, because the changes persist.
    """
    prepare, prepared = kind.__call__, set[object]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(self.fn)
        return prepare(self, *args, **options)

    return call


def check_overflow(_self: Any, left: Any, right: Any, operation: Any) -> None:
    """The interpreter checks every integer sum and product for overflow, with dozens of its own
    operations, and does not report it. This takes a few numpy operations, and asserts."""
    kind, name = left.type.scalar, operation.__name__
    if kind.int_bitwidth < 64:
        numbers = (np.asarray(each.handle.data, np.float64) for each in (left, right))
        found = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name](*numbers)
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        assert low <= found.min() and found.max() <= high, f"{name}: {kind} overflows"


def described_once(core: Any) -> Any:
    """Cache a block type, which is checked, counted and named for every value."""
    describe, known = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *(int(getattr(size, "value", size)) for size in shape))
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    return init


def shaped_once(kind: Any) -> Any:
    """Cache a value's shape and number of elements, which follow from its type."""
    shape, known = kind.__init__, dict[str, dict[str, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        key = str(type)
        if key not in known:
            shape(self, handle, type)
            known[key] = {name: self.__dict__[name] for name in ("numel", "shape")}
        self.__dict__.update(known[key], handle=handle, type=type, dtype=type.scalar)

    return init


def looked_up_once(look_up: Any) -> Any:
    """Cache numpy's type for a Triton type: the table is built again for every lookup."""
    known = dict[str, Any]()

    def found(kind: Any) -> Any:
        key = str(kind)
        if key not in known:
            known[key] = look_up(kind)
        return known[key]

    return found
