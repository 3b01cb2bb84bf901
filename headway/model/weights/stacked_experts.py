"""The experts of files that keep all experts of a layer in one tensor, in floats or in MXFP4.

Rows of `gate_up_proj` are gate and up in turns. Floats are transposed, [experts, inputs, outputs];
in MXFP4, `_blocks` are [experts, outputs, inputs / 32, 16] and `_scales` have a byte for each block.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import Tensor

from headway.errors import ModelError
from headway.model.experts import Experts
from headway.model.sharding import Part
from headway.model.weights import mxfp4
from headway.model.weights.checkpoint import QuantizedMatrix
from headway.model.weights.quantized_tensors import FLOATS
from headway.model.weights.safetensors_files import TensorFiles

NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
TURNS = {"gate": ("gate_up_proj", 2, 0), "up": ("gate_up_proj", 2, 1), "down": ("down_proj", 1, 0)}


class Place(NamedTuple):
    """Where a matrix or bias is: rows first, first + step, ... of an expert in a stack."""

    stack: str
    expert: int
    step: int
    first: int
    is_bias: bool

    @property
    def blocks(self) -> str:
        return f"{self.stack}_blocks"

    def rows(self, part: Part, shape: tuple[int, ...]) -> slice:
        """The rows of the stack that contain a part of the rows."""
        start, stop, _ = part.rows.indices(shape[0])
        return slice(start * self.step, stop * self.step)

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.first :: self.step]


class StackedExperts:
    """Reads the tensors of single experts, which have the names of other models' experts."""

    def __init__(self, files: TensorFiles, experts: Experts | None) -> None:
        self._files = files
        self._num_experts = experts.num_experts if experts and experts.is_stacked else 0

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is in a stack."""
        return self._num_experts > 0 and NAME.fullmatch(name) is not None

    def _place(self, name: str) -> Place:
        match = NAME.fullmatch(name)
        assert match is not None, f"{name} is not in a stack"
        prefix, number, matrix, kind = match.groups()
        stack, step, first = TURNS[matrix]
        return Place(f"{prefix}.{stack}", int(number), step, first, kind == "bias")

    def read(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """A part of a tensor of this shape; ModelError if the file's differs."""
        place = self._place(name)
        rows, count = place.rows(part, shape), shape[0] * place.step
        if place.is_bias:
            entry = self._entry(f"{place.stack}_bias", (count,), FLOATS)
            return place.own(entry[place.expert, rows])
        if self._files.entry(place.blocks) is None:
            entry = self._entry(place.stack, (shape[1], count), FLOATS)
            return place.own(entry[place.expert, part.columns, rows].T)
        return mxfp4.dequantize(*self._blocks(place, shape, part))

    def groups(self, name: str, shape: tuple[int, ...], part: Part) -> QuantizedMatrix | None:
        """A part of a matrix in codes; None if it is not stored in MXFP4."""
        place = self._place(name)
        if place.is_bias or self._files.entry(place.blocks) is None:
            return None
        return mxfp4.groups(*self._blocks(place, shape, part))

    def _blocks(self, place: Place, shape: tuple[int, ...], part: Part) -> tuple[Tensor, Tensor]:
        stored = (shape[0] * place.step, shape[1] // mxfp4.BLOCK)
        start, stop, _ = part.columns.indices(shape[1])
        if shape[1] % mxfp4.BLOCK or start % mxfp4.BLOCK or stop % mxfp4.BLOCK:
            raise self._error(
                f"{place.blocks} cannot be cut at inputs {start} to {stop} of {shape[1]}: MXFP4 has "
                f"blocks of {mxfp4.BLOCK}"
            )
        columns = slice(start // mxfp4.BLOCK, stop // mxfp4.BLOCK)
        blocks = self._entry(place.blocks, (*stored, mxfp4.BLOCK // 2), ("U8",))
        scales = self._entry(f"{place.stack}_scales", stored, ("U8",))
        where = place.expert, place.rows(part, shape), columns
        found = place.own(scales[where])
        if (found == mxfp4.NAN).any():
            raise self._error(f"the scales of {place.stack} are NaN: the file is damaged")
        return place.own(blocks[where]), found

    def _entry(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> Any:
        """A stack with this shape for each expert."""
        if (entry := self._files.entry(name)) is None:
            raise self._error(f"tensor {name} is missing")
        found, wanted = list(entry.get_shape()), [self._num_experts, *shape]
        if found != wanted or entry.get_dtype() not in types:
            raise self._error(
                f"tensor {name} has type {entry.get_dtype()} and shape {found}; the config requires "
                f"{wanted}, of type {', '.join(types)}"
            )
        return entry

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._files.folder}: {problem}")
