"""Makes Triton's interpreter faster by caching what it computes again and again.

One fix: it rounds to fp8 wrongly where the mantissa overflows into the exponent.
"""

from __future__ import annotations

import sys
from inspect import getmembers
from typing import Any

import numpy as np
import torch

from tests.support.quick_operators import ARITHMETIC, Operators, common_shape

NUMBERS = (int, float, bool)


def speed_up() -> None:
    """Patch the interpreter for the rest of the process."""
    interpreter, core = (
        sys.modules["triton.runtime.interpreter"],
        sys.modules["triton.language.core"],
    )
    semantic = sys.modules["triton.language.semantic"].TritonSemantic
    interpreter.InterpretedFunction.__call__ = prepared_once(interpreter.InterpretedFunction)
    interpreter._patch_attr = called_directly(
        interpreter.interpreter_semantic, Operators(core, interpreter)
    )
    semantic.binary_op_sanitize_overflow_impl = check_overflow
    semantic.binary_op_type_checking_impl = checked_by_type(semantic, core.tensor)
    semantic.broadcast_impl_value = broadcast_values(interpreter.TensorHandle, core.block_type)
    core._unwrap_if_constexpr = unwrapped_by_type(core)
    core.dtype.__eq__ = equal_if_same(core.dtype)
    core.block_type.__init__ = described_once(core)
    core.tensor.__init__ = shaped_once(core.tensor)
    interpreter.TensorHandle.__init__ = sized_once(interpreter._validate_np_data_size)
    interpreter._patch_builtin = listed_once(interpreter, core.is_builtin)
    interpreter._patch_lang = patched_once(interpreter)
    interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)
    interpreter._convert_float = rounded_by_torch(interpreter._convert_float)


def prepared_once(kind: Any) -> Any:
    """Patch the language module once per function: the interpreter does it for every call."""
    prepare, prepared = kind.__call__, set[object]()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn in prepared:
            return self.rewrite()(*args, **options)
        prepared.add(self.fn)
        return prepare(self, *args, **options)

    return call


def patched_once(interpreter: Any) -> Any:
    """Keep what the interpreter replaces for a launch: nothing here compiles kernels."""
    patch, known, nothing = interpreter._patch_lang, set[int](), interpreter._LangPatchScope()

    def patched(function: Any) -> Any:
        if (key := id(function.__globals__)) not in known:
            known.add(key)
            patch(function)
        return nothing

    return patched


def called_directly(semantic: Any, operators: Operators) -> Any:
    """The interpreter wraps every function of its language twice, and copies all options."""

    def patch(module: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        # without the check that `_semantic` is given
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(module, name, operators.quick(module, name, call))

    return patch


def check_overflow(_self: Any, left: Any, right: Any, operation: Any) -> None:
    """The interpreter checks every integer sum and product for overflow, with dozens of its own
    operations, and does not report it. This takes a few numpy operations, and asserts."""
    kind, name = left.type.scalar, operation.__name__
    if kind.int_bitwidth < 64:
        a, b, calculate = left.handle.data, right.handle.data, ARITHMETIC[name]
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        if a.size == b.size == 1:
            fits = low <= calculate(a.item(), b.item()) <= high
        else:
            found = calculate(np.asarray(a, np.float64), np.asarray(b, np.float64))
            fits = low <= found.min() and found.max() <= high
        assert fits, f"{name}: {kind} overflows"


def checked_by_type(semantic: Any, tensor: Any) -> Any:
    """Operands mostly have the same type, or one is a number, which becomes a constant only once.

    A constant has the type of the other operand and one element: numpy broadcasts it.
    """
    check, constants = semantic.binary_op_type_checking_impl, dict[Any, Any]()

    def constant(self: Any, value: Any, other: Any, div_or_mod: bool) -> Any:
        key = repr(value), str(other.type), div_or_mod
        if key not in constants:
            kind, own = other.dtype, self.to_tensor_type(value)
            is_kept = not kind.is_ptr() and kind == self.computation_type_impl(
                own, True, kind, False, div_or_mod
            )
            number = self._cast_to_computation_type(value, kind) if is_kept else None
            constants[key] = None if number is None else self.make_tensor(number.handle, other.type)
        return constants[key]

    def checked(
        self: Any, left: Any, right: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        kinds = type(left), type(right)
        if kinds == (tensor, tensor):
            kind = left.dtype
            if kind is right.dtype and not (kind.is_ptr() or (div_or_mod and kind.is_floating())):
                return self.broadcast_impl_value(left, right)  # type: ignore[no-any-return]
        elif arithmetic_check and tensor in kinds and not set(kinds).isdisjoint(NUMBERS):
            is_left = kinds[0] is tensor
            value, other = (right, left) if is_left else (left, right)
            if (found := constant(self, value, other, div_or_mod)) is not None:
                return (left, found) if is_left else (found, right)
        return check(  # type: ignore[no-any-return]
            self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    return checked


def broadcast_values(handle: Any, block_type: Any) -> Any:
    """The interpreter compares shapes as values of the language. This uses lists of integers."""

    def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        shapes = [each.type.shape.values if each.type.is_block() else [] for each in (left, right)]
        if shapes[0] == shapes[1]:
            return left, right
        shape = common_shape(*map(tuple, shapes))
        if shapes[0] != shape:
            left = repeated(self, left, shape)
        if shapes[1] != shape:
            right = repeated(self, right, shape)
        return left, right

    def repeated(semantic: Any, value: Any, shape: list[int]) -> Any:
        data = np.empty(shape, value.handle.data.dtype)
        data[...] = value.handle.data
        kind = block_type(value.type.scalar, shape)
        return semantic.make_tensor(handle(data, value.handle.dtype), kind)

    return broadcast


def unwrapped_by_type(core: Any) -> Any:
    """Most values are of types that cannot contain a constant."""
    unwrap, plain = core._unwrap_if_constexpr, dict[type, bool]()
    containers = (list, tuple, core.tuple, core.constexpr)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind not in plain:
            plain[kind] = not issubclass(kind, containers)
        return value if plain[kind] else unwrap(value)

    return unwrapped


def equal_if_same(kind: Any) -> Any:
    """Most types that are compared are the same object."""
    compare = kind.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self is other or bool(compare(self, other))

    return equal


def described_once(core: Any) -> Any:
    """Cache a block type, which is checked, counted and named for every value."""
    describe, known = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = (
            element_ty.name,
            *[s if type(s) is int else int(getattr(s, "value", s)) for s in sizes],
        )
        if (found := known.get(key)) is None:
            describe(self, element_ty, shape)
            known[key] = self.__dict__.copy()
        else:
            self.__dict__.update(found)
            self.element_ty = element_ty

    return init


def shaped_once(kind: Any) -> Any:
    """Cache a value's shape and number of elements, which follow from its type."""
    shape, known = kind.__init__, dict[str, tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        if (found := known.get(type.name)) is None:
            shape(self, handle, type)
            known[type.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = found

    return init


def sized_once(is_valid: Any) -> Any:
    """Compare the size of an element with its type once for every size and type."""
    valid = set[tuple[int, str]]()

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (key := (data.itemsize, dtype.name)) not in valid:
            assert is_valid(data, dtype), f"{data.itemsize} bytes in a value of type {dtype}"
            valid.add(key)

    return init


def listed_once(interpreter: Any, is_builtin: Any) -> Any:
    """Cache the functions of a module of the language, which are replaced for every launch."""
    known = dict[Any, list[tuple[str, Any]]]()

    def patch(module: Any, builder: Any, scope: Any) -> None:
        if module not in known:
            members = [(name, member) for name, member in getmembers(module) if is_builtin(member)]
            if not members:  # they are replaced already
                return
            known[module] = members
        for name, member in known[module]:
            interpreter._patch_attr(module, name, member, builder, scope)

    return patch


def looked_up_once(look_up: Any) -> Any:
    """Cache numpy's type for a Triton type: the table is built again for every lookup."""
    known = dict[str, Any]()

    def found(kind: Any) -> Any:
        key = str(kind)
        if key not in known:
            known[key] = look_up(kind)
        return known[key]

    return found


def rounded_by_torch(convert: Any) -> Any:
    """Convert to fp8 with torch: nearest even, and the largest number instead of an overflow."""

    def converted(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(target) != "fp8e4nv" or str(source) not in ("fp32", "fp16"):
            return convert(values, source, target, mode)
        wide = torch.from_numpy(np.array(values, np.float32)).clamp_(-448.0, 448.0)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted
