"""Reads quantized matrices from the tensors of safetensors files, and checks what the file has.

A matrix may be stored in floats. One that the config keeps in floats must be.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.model.quantization import Quantization
from headway.model.sharding import Part
from headway.model.weights.formats import FORMATS, Fixed, Shape, Stored
from headway.model.weights.safetensors_files import TensorFiles
from headway.model.weights.scaled import ScaledMatrix

FLOATS = ("F64", "F32", "F16", "BF16")


class QuantizedTensors:
    """The quantized matrices of a checkpoint."""

    def __init__(self, given: Quantization, files: TensorFiles) -> None:
        self._given, self._format, self._files = given, FORMATS[given.layout](given), files

    def has(self, name: str) -> bool:
        """Whether the matrix of this name is quantized."""
        module, _, last = name.rpartition(".")
        if last != "weight":
            return False
        whole = self._files.entry(name)
        is_float = whole is not None and whole.get_dtype() in FLOATS
        names = {f"{module}.{other}" for each in self._format.tensors for other in each.names}
        names -= {name} if is_float else set()
        found = sorted(other for other in names if self._files.entry(other) is not None)
        if is_float and found:
            raise self._error(f"tensor {name} is stored in floats, but {found[0]} is stored too")
        if found and self._given.keeps(module):
            raise self._error(f"tensor {found[0]} is quantized, but the config keeps it in floats")
        return bool(found)

    def read(self, name: str, shape: Shape, part: Part) -> ScaledMatrix:
        """A part of a matrix; ModelError for tensors that are missing or do not fit."""
        module, own = name.removesuffix(".weight"), self._format
        for fixed in own.fixed:
            self._check_fixed(module, fixed, shape)
        around, inside = own.cut(part, shape)
        read = partial(self._tensor, module, shape, around)
        numbers, scale = read(own.numbers), read(own.scale)
        zero = None if own.zero is None else read(own.zero)
        if not scale.float().isfinite().all():
            raise self._error(f"the scales of {name} are NaN or infinite: the file is damaged")
        q, zero = own.decode(numbers, zero)
        num_rows, num_columns = (each.stop - each.start for each in around)
        return ScaledMatrix(
            q=q[:num_rows, :num_columns], scale=scale.float(), bits=own.bits, part=inside,
            zero=None if zero is None else zero.float()[:num_rows],
            rows=own.scale.rows, columns=own.scale.columns or num_columns,
        )  # fmt: skip

    def _check_fixed(self, module: str, fixed: Fixed, shape: Shape) -> None:
        name = f"{module}.{fixed.name}"
        is_missing = self._files.entry(name) is None
        if is_missing and fixed.is_required:
            raise self._error(f"tensor {name} is missing")
        if not is_missing and not torch.equal(self._files.read(name).long(), fixed.values(shape)):
            raise self._error(f"tensor {name} {fixed.problem}")

    def _tensor(self, module: str, shape: Shape, part: Part, stored: Stored) -> Tensor:
        """A part of a tensor [outputs, inputs]."""
        names = [f"{module}.{name}" for name in stored.names]
        name = next((each for each in names if self._files.entry(each) is not None), names[0])
        if (entry := self._files.entry(name)) is None:
            raise self._error(f"tensor {name} is missing, which {self._given} needs")
        if entry.get_dtype() not in stored.types:
            raise self._error(
                f"tensor {name} has type {entry.get_dtype()}; supported: {', '.join(stored.types)}"
            )
        found, rows, columns = tuple(entry.get_shape()), *stored.part(part)
        if not stored.columns and found in ((), (1,), (1, 1)):  # one number for all outputs
            return self._files.read(name).reshape(1, 1)
        if not stored.columns and found == (shape[0],):
            one: Tensor = entry[rows]
            return one[:, None]
        if found != stored.shape(shape):
            raise self._error(
                f"tensor {name} has shape {list(found)}; {self._given} of a matrix "
                f"{list(shape)} requires {list(stored.shape(shape))}"
            )
        if stored.is_transposed:
            rows, columns = columns, rows
        cut: Tensor = entry[rows, columns]
        return cut.T if stored.is_transposed else cut

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._files.folder}: {problem}")
