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
Values = Callable[[Shape], Tensor]
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
        rows, columns = (
            slice(each.start // size, ceil(each.stop / size)) if size else slice(0, 1)
            for each, size in zip(part, (self.rows, self.columns), strict=True)
        )
        return rows, columns


@dataclass(frozen=True)
class Fixed:
    """A tensor that must have certain values for a matrix [N, K], if the file has it."""

    name: str
    values: Values
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


def _fp8(given: Quantization) -> Format:
    return Format(
        numbers=Stored(names=("weight",), types=("F8_E4M3",)), zero=None,
        scale=_scale(given, "weight_scale", "weight_scale_inv"),
        decode=lambda numbers, _: (numbers, None),
    )  # fmt: skip


def _integers(given: Quantization) -> Format:
    """Signed bytes; or words of numbers, and along the outputs of zero points, plus half the range."""
    is_packed, scale = given.layout == "packed", _scale(given, "weight_scale")
    name, kind = ("weight_packed", "I32") if is_packed else ("weight", "I8")
    count = WORD // given.bits if is_packed else 1

    def unsigned(numbers: Tensor, axis: int) -> Tensor:
        if is_packed:
            return unpack(numbers, given.bits, axis)
        return numbers.view(torch.uint8) ^ 128

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        half = torch.tensor([[1 << given.bits - 1]])
        return unsigned(numbers, 1), half if zero is None else unsigned(zero, 0)

    zero = replace(scale, names=("weight_zero_point",), types=(kind,), rows=count)
    shape = Fixed("weight_shape", torch.tensor, "differs", is_packed)
    return Format(
        numbers=Stored(names=(name,), types=(kind,), columns=count), scale=scale, bits=given.bits,
        zero=None if given.is_symmetric else zero, decode=decode,
        fixed=(shape, _order(given, "weight_g_idx"), *_no_zeros(given, scale)),
    )  # fmt: skip


def _transposed(given: Quantization) -> Format:
    """AWQ and GPTQ, [K, N]. Words are along the outputs, but GPTQ's numbers along the inputs."""
    is_awq, count = given.layout == "awq", WORD // given.bits
    scale = replace(_scale(given, "scales"), is_transposed=True)
    words = Stored(names=("qweight",), types=("I32",), rows=count, is_transposed=True)

    def decode(numbers: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
        assert zero is not None, "both formats have zero points"
        zeros, q = unpack(zero, given.bits, 0), unpack(numbers, given.bits, 0 if is_awq else 1)
        if is_awq:
            q, zeros = (
                each.unfold(0, 8, 8)[..., AWQ_ORDER].movedim(-1, 1).flatten(0, 1)
                for each in (q, zeros)
            )
        return q, zeros.float() + given.zero_offset

    return Format(
        numbers=words if is_awq else replace(words, rows=1, columns=count), scale=scale,
        zero=replace(words, names=("qzeros",), columns=scale.columns), decode=decode,
        bits=given.bits, fixed=() if is_awq else (_order(given, "g_idx"),),
    )  # fmt: skip


FORMATS: dict[str, Callable[[Quantization], Format]] = {
    FP8: _fp8, "ints": _integers, "packed": _integers, "awq": _transposed, "gptq": _transposed,
}  # fmt: skip


def _scale(given: Quantization, *names: str) -> Stored:
    return Stored(names=names, types=SCALES, rows=given.rows, columns=given.columns or 0)


def _order(given: Quantization, name: str) -> Fixed:
    """The group of each input."""
    problem, size = "has another order of inputs: act-order is not supported", given.columns
    values: Values = lambda shape: torch.arange(shape[1]) // (size or shape[1])  # noqa: E731
    return Fixed(name, values, problem, given.is_reordered)


def _no_zeros(given: Quantization, scale: Stored) -> tuple[Fixed, ...]:
    problem = "is not zero, but the config says that the weights are symmetric"
    values: Values = lambda shape: torch.zeros(scale.shape(shape)).long()  # noqa: E731
    return (Fixed("weight_zero_point", values, problem),) if given.is_symmetric else ()


def unpack(words: Tensor, bits: int, axis: int) -> Tensor:
    """The uint8 numbers of 4 or 8 bits in int32 words, along an axis, lowest bits first."""
    last = words.movedim(axis, -1).contiguous().view(torch.uint8)
    if bits == 4:
        last = torch.stack((last & 15, last >> 4), -1).flatten(-2)
    return last.movedim(-1, axis)
