"""Reads quantized matrices from the tensors of safetensors files, and checks what the file has.

A matrix is quantized if the file has no float tensor of its name. A float tensor beside quantized
ones, and a quantized matrix that the config lists as kept in floats, are errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ModelError
from headway.model.quantization import Quantization
from headway.model.sharding import Part
from headway.model.weights.formats import Fixed, Shape, Stored, format_of
from headway.model.weights.safetensors_files import TensorFiles
from headway.model.weights.scaled import ScaledMatrix

FLOATS = ("F64", "F32", "F16", "BF16")


class QuantizedTensors:
    """The quantized matrices of a checkpoint."""

    def __init__(self, given: Quantization, files: TensorFiles) -> None:
        self._given, self._format, self._files = given, format_of(given), files

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
            raise self._error(
                f"tensor {name} is stored in {whole.get_dtype()}, but {found[0]} is stored too"
            )
        if found and self._given.keeps(module):
            raise self._error(
                f"tensor {found[0]} contradicts quantization_config, which keeps {module} in floats"
            )
        return bool(found)

    def read(self, name: str, shape: Shape, part: Part) -> ScaledMatrix:
        """A part of a matrix; ModelError for tensors that are missing or do not fit."""
        module, own = name.removesuffix(".weight"), self._format
        for fixed in own.fixed:
            self._check_fixed(module, fixed, shape)
        around, inside = own.cut(part, shape)
        numbers, scale, zero = (
            None if each is None else self._tensor(module, each, shape, around)
            for each in (own.numbers, own.scale, own.zero)
        )
        assert numbers is not None and scale is not None, "only zero points may be missing"
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
        if self._files.entry(name) is None:
            if fixed.is_required:
                raise self._error(f"tensor {name} is missing")
            return
        expected, found = fixed.values(shape), self._files.read(name)
        if found.shape != expected.shape or not torch.equal(found.long(), expected):
            raise self._error(f"tensor {name} {fixed.problem}")

    def _tensor(self, module: str, stored: Stored, shape: Shape, part: Part) -> Tensor:
        """A part of a tensor [outputs, inputs]."""
        names = [f"{module}.{name}" for name in stored.names]
        entries = ((name, self._files.entry(name)) for name in names)
        name, entry = next((pair for pair in entries if pair[1] is not None), (names[0], None))
        if entry is None:
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
