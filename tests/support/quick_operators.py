"""Quick functions of Triton's interpreter for values that numpy calculates with as they are."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import numpy as np

new = object.__new__
ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
NAMES = {np.add: "add", np.subtract: "sub", np.multiply: "mul"}


@cache
def common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> list[int]:
    return list(np.broadcast_shapes(left, right))


class Operators:
    """Functions of values that numpy calculates with as they are: most are int32, int64 or fp32.

    The interpreter takes a dozen calls for each, and copies what it broadcasts. Other operands,
    and whatever is refused, are left to it.
    """

    def __init__(self, core: Any, interpreter: Any) -> None:
        self.tensor, self._core, self._interpreter = core.tensor, core, interpreter
        self._handle, self._semantic = interpreter.TensorHandle, interpreter.interpreter_semantic
        self._types = dict[tuple[str, tuple[int, ...]], Any]()
        self._forms = dict[tuple[str, tuple[int, ...] | None, int], Any]()
        self._constants = dict[tuple[str, str], Any]()
        self._filled = dict[tuple[Any, str, tuple[int, ...]], Any]()

    def quick(self, module: Any, name: str, call: Any) -> Any:
        """The function `name` of a module or of a tensor, where `call` is the interpreter's."""
        if module is not self.tensor:
            kinds = {
                "load": self._loaded, "arange": self._kept, "full": self._kept,
                "program_id": self._numbered,
            }  # fmt: skip
            return kinds[name](call) if name in kinds else call
        if name in ("__getitem__", "to"):
            return self._indexed(call) if name == "__getitem__" else self._converted(call)
        plain = name.replace("__r", "__")
        if plain not in OPERATORS:
            return call
        return self._calculated(call, *OPERATORS[plain], is_swapped=plain != name)

    def made(self, data: Any, kind: Any, *, is_block: bool) -> Any:
        """A value with the type of its data; what follows from the type is computed once."""
        key = kind.name, data.shape if is_block else None, data.itemsize
        if (form := self._forms.get(key)) is None:
            type_of_all = self.block(kind, data.shape) if is_block else kind
            first = self.tensor(self._handle(data, kind), type_of_all)
            form = self._forms[key] = first.type, first.numel, first.shape
        value, handle = new(self.tensor), new(self._handle)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        value.handle, value.dtype, (value.type, value.numel, value.shape) = handle, kind, form
        return value

    def block(self, kind: Any, shape: tuple[int, ...]) -> Any:
        """The type of a block. All pointers are to global memory, so that a name is enough."""
        key = kind.name, shape
        if (found := self._types.get(key)) is None:
            found = self._types[key] = self._core.block_type(kind, list(shape))
        return found

    def constant(self, value: Any, kind: Any) -> Any:
        """A number as an array of one element, if the other operand keeps its type."""
        key = repr(value), kind.name
        if key not in self._constants:
            semantic = self._semantic
            own = semantic.to_tensor_type(value)
            is_kept = kind == semantic.computation_type_impl(own, True, kind, False, False)
            number = semantic._cast_to_computation_type(value, kind) if is_kept else None
            self._constants[key] = None if number is None else number.handle.data
        return self._constants[key]

    def filled(self, value: Any, kind: Any, shape: tuple[int, ...]) -> Any:
        """An array of equal numbers, or of zeros. Nothing may change it."""
        key = repr(value), kind.name, shape
        if (found := self._filled.get(key)) is None:
            number = np.zeros(1, self._interpreter._get_np_dtype(kind))
            if value is not None:
                number = self._semantic.cast(self._semantic.to_tensor(value), kind).handle.data
            found = self._filled[key] = np.full(shape, number)
        return found

    def _calculated(
        self, call: Any, calculate: Any, kinds: frozenset[str], result: str, *, is_swapped: bool
    ) -> Any:
        made, operand, core = self.made, self.operand, self._core
        is_comparison, is_checked = result == "flag", result == "checked"
        moved = self._moved(call) if calculate is np.add else call

        def operate(self: Any, other: Any) -> Any:
            if self.dtype.name not in kinds:
                return moved(self, other)
            kind, first, second = self.dtype, self.handle.data, operand(other, self.dtype)
            if second is None:
                return call(self, other)
            is_block = type(self.type) is core.block_type
            if type(other) is core.tensor:
                kind = kind if other.dtype.name == kind.name else core.int64
                is_block = is_block or type(other.type) is core.block_type
            if is_swapped:
                first, second = second, first
            data = calculate(first, second)
            if is_checked and kind.name == "int32":
                check_sum(calculate, first, second, data)
            return made(data, core.int1 if is_comparison else kind, is_block=is_block)

        return operate

    def operand(self, other: Any, kind: Any) -> Any:
        """The other operand's data: of the same type, of int32 and int64, or a number."""
        if type(other) is self.tensor:
            name, own = other.dtype.name, kind.name
            return other.handle.data if name == own or {name, own} == SIGNED else None
        value = other.value if type(other) is self._core.constexpr else other
        return self.constant(value, kind) if type(value) in (int, float) else None

    def _moved(self, call: Any) -> Any:
        """A pointer plus an offset."""
        made, tensor, block_type = self.made, self.tensor, self._core.block_type

        def move(pointer: Any, offset: Any) -> Any:
            kind = pointer.dtype
            if not kind.is_ptr():
                return call(pointer, offset)
            size = max(1, kind.element_ty.primitive_bitwidth // 8)
            if type(offset) is int and 0 <= offset < 2**31:
                data = pointer.handle.data + np.uint64(size * offset)
                return made(data, kind, is_block=type(pointer.type) is block_type)
            if type(offset) is not tensor or offset.dtype.name not in SIGNED:
                return call(pointer, offset)
            data = pointer.handle.data + size * offset.handle.data.astype(np.uint64)
            is_block = type(pointer.type) is block_type or type(offset.type) is block_type
            return made(data, kind, is_block=is_block)

        return move

    def _indexed(self, call: Any) -> Any:
        """New dimensions, as in `x[:, None]`."""
        made, whole = self.made, slice(None)

        def index(self: Any, places: Any) -> Any:
            data = self.handle.data
            if (
                type(places) is not tuple
                or data.ndim != len(self.shape)
                or len(places) - places.count(None) > data.ndim
                or any(place is not None and place != whole for place in places)
            ):
                return call(self, places)
            return made(data[places], self.dtype, is_block=True)

        return index

    def _converted(self, call: Any) -> Any:
        """Numbers of another type."""
        made, core = self.made, self._core
        found_type = self._interpreter._get_np_dtype

        def convert(self: Any, dtype: Any, *args: Any, **options: Any) -> Any:
            kind = dtype.value if type(dtype) is core.constexpr else dtype
            if not (args or options):
                if kind.name == self.dtype.name:
                    return self
                if (self.dtype.name, kind.name) in CONVERTED:
                    data = self.handle.data.astype(found_type(kind))
                    return made(data, kind, is_block=type(self.type) is core.block_type)
            return call(self, dtype, *args, **options)

        return convert

    def _kept(self, call: Any) -> Any:
        """A value that depends on numbers only is made once. Nothing changes a value."""
        known, tensor = dict[str, Any](), self.tensor

        def kept(*args: Any, **options: Any) -> Any:
            if any(type(each) is tensor for each in (*args, *options.values())):
                return call(*args, **options)
            if (found := known.get(key := repr((args, options)))) is None:
                found = known[key] = call(*args, **options)
            return found

        return kept

    def _numbered(self, call: Any) -> Any:
        """The number of a program along an axis; the same value for the same number."""
        known, builder = dict[int, Any](), self._interpreter.interpreter_builder

        def number(axis: Any) -> Any:
            place = builder.grid_idx[int(getattr(axis, "value", axis))]
            if (found := known.get(place)) is None:
                found = known[place] = call(axis)
            return found

        return number

    def _loaded(self, call: Any) -> Any:
        """Values in memory, where the mask allows it, and otherwise a number."""
        tensor, made, filled, core = self.tensor, self.made, self.filled, self._core
        load_each, found_type = self._interpreter._interpreter.load, self._interpreter._get_np_dtype
        valid = set[tuple[Any, ...]]()

        def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            places, names = pointer.handle.data, tuple(options.items())
            is_block = type(pointer.type) is core.block_type
            if (
                names not in valid
                or pointer.dtype.element_ty is core.int1
                or (other is not None and type(other) not in (int, float))
                or (mask is None and other is not None)
                or not (mask is None or (type(mask) is tensor and mask.dtype is core.int1))
            ):
                found = call(pointer, mask, other, **options)  # invalid options are refused here
                valid.add(names)
                return found
            if mask is None:
                allowed = filled(True, core.int1, places.shape)
            elif (allowed := mask.handle.data).shape != places.shape:
                if not is_block or common_shape(places.shape, allowed.shape) != list(places.shape):
                    return call(pointer, mask, other, **options)
                allowed = np.array(np.broadcast_to(allowed, places.shape))
            kind = pointer.dtype.element_ty
            others = filled(other, kind, places.shape)
            data = load_each(places, allowed, others, found_type(kind))
            return made(data, kind, is_block=is_block)

        return load


def whole_quotient(left: Any, right: Any) -> Any:
    """Rounded towards zero."""
    return (left - np.fmod(left, right)) // right


SIGNED = frozenset({"int32", "int64"})
PLAIN = SIGNED | {"fp32"}
# The function of numpy, the types of operands, and whether the result is a flag, or is checked.
OPERATORS = {
    "__add__": (np.add, PLAIN, "checked"),
    "__sub__": (np.subtract, PLAIN, "checked"),
    "__mul__": (np.multiply, PLAIN, "checked"),
    "__truediv__": (np.divide, frozenset({"fp32"}), "same"),
    "__floordiv__": (whole_quotient, SIGNED, "same"),
    "__mod__": (np.fmod, SIGNED, "same"),
    "__lt__": (np.less, PLAIN, "flag"),
    "__le__": (np.less_equal, PLAIN, "flag"),
    "__gt__": (np.greater, PLAIN, "flag"),
    "__ge__": (np.greater_equal, PLAIN, "flag"),
    "__eq__": (np.equal, PLAIN, "flag"),
    "__ne__": (np.not_equal, PLAIN, "flag"),
    "__and__": (np.bitwise_and, SIGNED | {"int1"}, "same"),
    "__or__": (np.bitwise_or, SIGNED | {"int1"}, "same"),
}
CONVERTED = {
    ("int32", "int64"), ("int32", "fp32"), ("int1", "int32"), ("int1", "fp32"), ("fp16", "fp32"),
    ("fp32", "fp16"),
}  # fmt: skip


def check_sum(calculate: Any, left: Any, right: Any, found: Any) -> None:
    """No sum, difference or product of int32 overflows."""
    name = NAMES[calculate]
    if found.size == 1:
        fits = -(2**31) <= ARITHMETIC[name](left.item(), right.item()) < 2**31
    else:
        fits = not np.count_nonzero(calculate(left, right, dtype=np.int64) != found)
    assert fits, f"{name}: int32 overflows"
