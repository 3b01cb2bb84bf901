"""Weights of safetensors files: one file, or the shards of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway.errors import ModelError
from headway.model.config import load_hf, read_json
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.fp8 import Fp8Matrix, scale_problem

FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"  # safetensors' name
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__(load_hf(folder), folder)
        self._files: dict[str, Any] = {}  # by the tensor's name in the file
        for file in safetensors_files(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: not a valid safetensors file: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return super().has(name) and self._stored(name) in self._files

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        if (quantized := self.read_fp8(name, part)) is not None:
            return quantized.wide()
        entry, stored = self._entry(name), self._stored(name)
        tensor: torch.Tensor
        if part == EVERYTHING:
            tensor = self._files[stored].get_tensor(stored)
        else:
            tensor = entry[part[: len(entry.get_shape())]]
        # Norm weights as factors; a family may store their difference from 1.
        offset = self.config.norm_offset if name.endswith("norm.weight") else 0.0
        return tensor.float() + offset if offset else tensor

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        entry = self._entry(name)
        if entry.get_dtype() != FP8:
            return None
        scale = self._stored(f"{name}_scale")
        found = self._files[scale].get_tensor(scale) if scale in self._files else None
        num_outputs = self._shapes[name][0]
        if problem := scale_problem(None if found is None else found.shape, num_outputs):
            raise ModelError(
                f"{self.path}: tensor {name} is fp8, but its scale {name}_scale {problem}"
            )
        assert found is not None, "scale_problem reports a missing scale"
        scales = found.float().flatten().expand(num_outputs)
        return Fp8Matrix(q=entry[part[:2]], scale=scales[part.rows].contiguous())

    def _entry(self, name: str) -> Any:
        """The tensor's entry in its file; ModelError if it is missing or not as expected."""
        stored = self._stored(name)
        entry = self._files[stored].get_slice(stored) if stored in self._files else None
        self._check(name, None if entry is None else entry.get_shape())
        assert entry is not None, "check raises for a missing tensor"
        supported = FLOATS if self.config.quantization is None else (*FLOATS, FP8)
        if entry.get_dtype() not in supported:
            raise ModelError(
                f"{self.path}: tensor {name} has type {entry.get_dtype()}; "
                f"supported: {', '.join(supported)}"
            )
        return entry

    def _stored(self, name: str) -> str:
        """The name in the file: a model saved without its head has no `model.` prefix."""
        return name if name in self._files else name.removeprefix("model.")


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; a single file is used before an index."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return [single]
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) > 1:
            raise ModelError(f"{folder} has {len(found)} safetensors files but no {INDEX}")
        return found
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{index} has no weight_map from tensor names to files")
    files = [folder / shard for shard in sorted(set(shards.values()))]
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} does not exist, but {INDEX} lists it")
    return files
