"""The tensors of a model: the shapes that its config requires, and the quantized format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.errors import ModelError
from headway.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A quantized matrix: w = scale * q + minimum, in groups of 32 numbers along a row."""

    q: torch.Tensor  # uint8 [out, in]
    scale: torch.Tensor  # float32 [out, in / 32]
    minimum: torch.Tensor  # float32 [out, in / 32]
    bits: int  # 4, 5 or 8: q < 2 ** bits


class ExpectedTensors:
    """The tensors that a config requires; checks a file's tensors against them."""

    def __init__(self, config: ModelConfig, path: Path | None) -> None:
        self.architecture = config.architecture
        self.path = path
        self.shapes = config.shapes()

    def check(self, name: str, found: Sequence[int] | None) -> tuple[int, ...]:
        """Return the tensor's shape; ModelError if the file's tensor is missing or differs."""
        if name not in self.shapes:
            raise ModelError(
                f"{self.path}: unexpected tensor {name}: a {self.architecture} model with this "
                "config does not have it"
            )
        if found is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        if tuple(found) != self.shapes[name]:
            raise ModelError(
                f"{self.path}: tensor {name} has shape {list(found)}; "
                f"the config requires {list(self.shapes[name])}"
            )
        return self.shapes[name]
