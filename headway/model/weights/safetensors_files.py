"""The tensors of a folder with safetensors: one file, or the shards of an index. Knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway.errors import ModelError
from headway.model.config import read_json

INDEX = "model.safetensors.index.json"


class TensorFiles:
    """Opened files; their headers are checked, tensors are read on demand."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._files: dict[str, Any] = {}  # by the tensor's name in the file
        for file in safetensors_files(folder):
            try:
                opened: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: not a valid safetensors file: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def entry(self, name: str) -> Any:
        """The tensor's type and shape, of which parts can be read; None if it is missing."""
        stored = self._stored(name)
        return self._files[stored].get_slice(stored) if stored in self._files else None

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, which must exist."""
        stored = self._stored(name)
        found: torch.Tensor = self._files[stored].get_tensor(stored)
        return found

    def _stored(self, name: str) -> str:
        """The name in the file.

        A model saved without its head has no `model.` prefix; one with images has another before it.
        """
        names = (name, name.removeprefix("model."), f"language_model.{name}")
        return next((each for each in names if each in self._files), name)


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
