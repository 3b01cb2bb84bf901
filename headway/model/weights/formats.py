"""The tensors of quantized matrices in safetensors files, by format, and how they are decoded.

A matrix [N, K] has N outputs and K inputs. A format is the list of its tensors and a function that
unpacks them: a number of a tensor covers some outputs and inputs, as a word covers 8 numbers of 4
bits and a scale covers its group. Shapes, and what a part of the matrix needs, follow from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, lcm

import torch
from torch import Tensor

from headway.model.quantization import FP8, Quantization
from headway.model.sharding import Part

Shape = tuple[int, int]
SCALES = ("F32", "F16", "BF16")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each output in a word
WORD = 32  # bits


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of a quantized matrix; a number covers `rows` outputs and `columns` inputs."""

    names: tuple[str, ...]  # after the module's name; files use one of them
    types: tuple[str, ...]  # safetensors' names
    rows: int = 1
    columns: int = 1  # 0: all inputs
    is_transposed: bool = False  # [K, N]

    def shape(self, matrix: Shape) -> Shape:
        """Of the tensor in the file, for a matrix [N, K]."""
        rows, columns = ceil(matrix[0] / self.rows), ceil(matrix[1] / (self.columns or matrix[1]))
        return (columns, rows) if self.is_transposed else (rows, columns)

    def part(self, part: Part) -> tuple[slice, slice]:
        """What a part of the matrix, which begins at a whole number, needs: outputs, inputs."""
        columns = _divided(part.columns, self.columns) if self.columns else slice(0, 1)
        return _divided(part.rows, self.rows), columns


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A tensor that must have certain values for a matrix [N, K], if the file has it."""

    name: str
    values: Callable[[Shape], Tensor]
    problem: str
    is_required: bool = False


@dataclass(frozen=True, kw_only=True)
class Format:
    numbers: Stored
    scale: Stored
    zero: Stored | None  # None: `decode` returns a constant, or there is none
    decode: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    fixed: tuple[Fixed, ...] = ()
    bits: int = 8

    @property
    def tensors(self) -> list[Stored]:
        return [each for each in (self.numbers, self.scale, self.zero) if each is not None]

    def cut(self, part: Part, matrix: Shape) -> tuple[Part, Part]:
        """The smallest part of whole words and scales around a part, and the place in it."""
        units = (
            lcm(*(each.rows for each in self.tensors)),
            lcm(*(each.columns or 1 for each in self.tensors)),
        )
        around, inside = [], []
        for wanted, unit, size in zip(part, units, matrix, strict=True):
            start, stop, _ = wanted.indices(size)
            first = start // unit * unit
            around.append(slice(first, min(size, ceil(stop / unit) * unit)))
            inside.append(slice(start - first, stop - first))
        return Part(*around), Part(*inside)


def format_of(given: Quantization) -> Format:
    return FORMATS[given.layout](given)


def _fp8(given: Quantization) -> Format:
    return Format(
        numbers=Stored(names=("weight",), types=("F8_E4M3",)), zero=None,
        scale=_scale(given, "weight_scale", "weight_scale_inv"),
        decode=lambda numbers, _: (numbers, None),
    )  # fmt: skip


def _ints(given: Quantization) -> Format:
    """Signed bytes."""
    scale = _scale(given, "weight_scale")
    zero = replace(scale, names=("weight_zero_point",), types=("I8",))

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        above = torch.tensor([[128.0]]) if zero is None else zero.float() + 128
        return numbers.view(torch.uint8) ^ 128, above

    return Format(
        numbers=Stored(names=("weight",), types=("I8",)), scale=scale,
        zero=None if given.is_symmetric else zero, decode=decode, fixed=_no_zeros(given, scale),
    )  # fmt: skip


def _packed(given: Quantization) -> Format:
    """Numbers, and zero points along the outputs, in words; all are stored plus half the range."""
    count, scale = WORD // given.bits, _scale(given, "weight_scale")
    zero = replace(scale, names=("weight_zero_point",), types=("I32",), rows=count)

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        half = torch.tensor([[float(1 << given.bits - 1)]])
        zeros = half if zero is None else unpack(zero, given.bits, axis=0)
        return unpack(numbers, given.bits, axis=1), zeros

    return Format(
        numbers=Stored(names=("weight_packed",), types=("I32",), columns=count), scale=scale,
        zero=None if given.is_symmetric else zero, decode=decode, bits=given.bits,
        fixed=(
            Fixed(name="weight_shape", values=torch.tensor, problem="differs", is_required=True),
            _order(given, "weight_g_idx"),
            *_no_zeros(given, scale),
        ),
    )  # fmt: skip


def _awq(given: Quantization) -> Format:
    """Transposed; numbers and zero points in words along the outputs, in an order of their own."""
    words = Stored(names=("qweight",), types=("I32",), rows=8, is_transposed=True)

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        assert zero is not None, "the format has zero points"
        numbers, zero = (
            unpack(each, 4, axis=0).reshape(len(each), 8, -1)[:, AWQ_ORDER].flatten(0, 1)
            for each in (numbers, zero)
        )
        return numbers, zero

    scale = replace(_scale(given, "scales"), is_transposed=True)
    zero = replace(words, names=("qzeros",), columns=scale.columns)
    return Format(numbers=words, scale=scale, zero=zero, decode=decode, bits=4)


def _gptq(given: Quantization) -> Format:
    """Transposed; numbers in words along the inputs, zero points along the outputs."""
    count = WORD // given.bits
    scale = replace(_scale(given, "scales"), is_transposed=True)

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        assert zero is not None, "the format has zero points"
        zeros = unpack(zero, given.bits, axis=0).float() + given.zero_offset
        return unpack(numbers, given.bits, axis=1), zeros

    words = Stored(names=("qweight",), types=("I32",), columns=count, is_transposed=True)
    return Format(
        numbers=words, scale=scale, decode=decode, bits=given.bits,
        zero=replace(words, names=("qzeros",), rows=count, columns=scale.columns),
        fixed=(_order(given, "g_idx"),),
    )  # fmt: skip


FORMATS: dict[str, Callable[[Quantization], Format]] = {
    FP8: _fp8, "ints": _ints, "packed": _packed, "awq": _awq, "gptq": _gptq,
}  # fmt: skip


def _scale(given: Quantization, *names: str) -> Stored:
    return Stored(names=names, types=SCALES, rows=given.rows, columns=given.columns or 0)


def _order(given: Quantization, name: str) -> Fixed:
    """The group of each input."""
    return Fixed(
        name=name, values=lambda matrix: torch.arange(matrix[1]) // (given.columns or matrix[1]),
        problem="puts the inputs in another order: act-order is not supported",
        is_required=given.is_reordered,
    )  # fmt: skip


def _no_zeros(given: Quantization, scale: Stored) -> tuple[Fixed, ...]:
    problem = "is not zero, but the config says that the weights are symmetric"
    named = Fixed(
        name="weight_zero_point", values=lambda matrix: torch.zeros(scale.shape(matrix)).long(),
        problem=problem,
    )  # fmt: skip
    return (named,) if given.is_symmetric else ()


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """The uint8 numbers of 4 or 8 bits in int32 words, along an axis, lowest bits first."""
    last = words.movedim(axis, -1).contiguous().view(torch.uint8)
    if bits == 4:
        last = torch.stack((last & 15, last >> 4), -1).flatten(-2)
    return last.movedim(-1, axis)


def _divided(numbers: slice, size: int) -> slice:
    return slice(numbers.start // size, ceil(numbers.stop / size))
