"""Weights of safetensors files, in floats or in a quantized format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway.errors import ModelError
from headway.model.config import load_hf
from headway.model.quantization import MXFP4
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix
from headway.model.weights.fp8 import Fp8Matrix
from headway.model.weights.quantized_tensors import FLOATS, QuantizedTensors
from headway.model.weights.safetensors_files import TensorFiles
from headway.model.weights.scaled import ScaledMatrix
from headway.model.weights.stacked_experts import StackedExperts


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        super().__init__(load_hf(folder), folder)
        self._files = TensorFiles(folder)
        given = self.config.quantization
        self._quantized = None
        if given is not None and given.layout != MXFP4:
            self._quantized = QuantizedTensors(given, self._files)
        self._stacks = StackedExperts(self._files, self.config.experts)

    def has(self, name: str) -> bool:
        is_stored = self._files.entry(name) is not None or self._is_quantized(name)
        return super().has(name) and (is_stored or self._stacks.has(name))

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        if self._stacks.has(name):
            return self._stacks.read(name, self._shapes[name], part)
        if (quantized := self._scaled(name, part)) is not None:
            return quantized.wide()
        entry = self._entry(name)
        if part == EVERYTHING:
            tensor = self._files.read(name)
        else:
            tensor = entry[part[: len(entry.get_shape())]]
        # Norm weights as factors; a family may store their difference from 1.
        offset = self.config.norm_offset if name.endswith("norm.weight") else 0.0
        return tensor.float() + offset if offset else tensor

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        if self._stacks.has(name):
            return self._stacks.groups(name, self._shapes[name], part)
        found = self._scaled(name, part)
        return None if found is None else found.groups()

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        found = self._scaled(name, part)
        return None if found is None else found.fp8()

    def _scaled(self, name: str, part: Part) -> ScaledMatrix | None:
        """The matrix, or a part of it, in its quantized form; None if it is stored in floats."""
        if self._quantized is None or not self._is_quantized(name):
            return None
        rows, columns = self._shapes[name]
        return self._quantized.read(name, (rows, columns), part)

    def _is_quantized(self, name: str) -> bool:
        is_matrix = len(self._shapes.get(name, ())) == 2
        return is_matrix and self._quantized is not None and self._quantized.has(name)

    def _entry(self, name: str) -> Any:
        """The tensor's entry in its file; ModelError if it is missing or not as expected."""
        entry = self._files.entry(name)
        self._check(name, None if entry is None else entry.get_shape())
        assert entry is not None, "check raises for a missing tensor"
        if entry.get_dtype() not in FLOATS:
            raise ModelError(
                f"{self.path}: tensor {name} has type {entry.get_dtype()}; "
                f"supported: {', '.join(FLOATS)}"
            )
        return entry
