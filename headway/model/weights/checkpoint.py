"""A model's weights by Hugging Face name, whatever file they are in, one tensor at a time.

Opening a file checks its whole header. Reading a tensor does not load any other.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Protocol

import torch

from headway.errors import ModelError
from headway.model.config import ModelConfig, load_hf, read_json
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.fp8 import Fp8Matrix, quantize, scale_problem
from headway.model.weights.gguf_checkpoint import GgufCheckpoint
from headway.model.weights.tensors import ExpectedTensors, QuantizedMatrix

__all__ = [
    "Checkpoint", "DummyCheckpoint", "GgufCheckpoint", "QuantizedMatrix", "SafetensorsCheckpoint",
    "open_checkpoint",
]  # fmt: skip

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
FLOATS = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"  # safetensors' name
INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Weights by name; ModelError for a tensor that is missing or has the wrong shape."""

    config: ModelConfig
    path: Path | None

    def has(self, name: str) -> bool:
        """Whether the model has this tensor and the file contains it."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor that `read` returns."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored type; float32 if it is quantized."""
        ...

    def read_part(self, name: str, part: Part) -> torch.Tensor:
        """Like `read`, for some rows and columns; the others are not read from the file."""
        ...

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        """The tensor, or a part of it, in its quantized form.

        None if it is not quantized, or if the part does not consist of whole groups.
        """
        ...

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        """The matrix, or a part of it, in 8-bit floats; None if it is not stored so."""
        ...


class SafetensorsCheckpoint:
    """The safetensors of a folder: one file, or the shards of an index."""

    def __init__(self, folder: Path) -> None:
        self.path: Path | None = folder
        self.config = load_hf(folder)
        self._expected = ExpectedTensors(self.config, folder)
        self._files: dict[str, Any] = {}  # by the tensor's name in the file
        for file in _safetensors_files(folder):
            opened = _open_safetensors(file)
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return name in self._expected.shapes and self._stored(name) in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._expected.shapes[name]

    def read(self, name: str) -> torch.Tensor:
        if (quantized := self.read_fp8(name)) is not None:
            return quantized.wide()
        tensor: torch.Tensor = self._files[self._stored(name)].get_tensor(self._stored(name))
        return self._with_offset(name, tensor)

    def read_part(self, name: str, part: Part) -> torch.Tensor:
        if (quantized := self.read_fp8(name, part)) is not None:
            return quantized.wide()
        entry = self._entry(name)
        tensor: torch.Tensor = entry[part[: len(entry.get_shape())]]
        return self._with_offset(name, tensor)

    def _with_offset(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Norm weights as factors; a family may store their difference from 1."""
        offset = self.config.norm_offset if name.endswith("norm.weight") else 0.0
        return tensor.float() + offset if offset else tensor

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        entry = self._entry(name)
        if entry.get_dtype() != FP8:
            return None
        scale = self._stored(f"{name}_scale")
        found = self._files[scale].get_tensor(scale) if scale in self._files else None
        num_outputs = self._expected.shapes[name][0]
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
        self._expected.check(name, None if entry is None else entry.get_shape())
        assert entry is not None, "check raises for a missing tensor"
        supported = FLOATS if self.config.quantization is None else (*FLOATS, FP8)
        if entry.get_dtype() not in supported:
            raise ModelError(
                f"{self.path}: tensor {name} has type {entry.get_dtype()}; "
                f"supported: {', '.join(supported)}"
            )
        return entry

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        return None

    def _stored(self, name: str) -> str:
        """The name in the file: a model saved without its head has no `model.` prefix."""
        return name if name in self._files else name.removeprefix("model.")


class DummyCheckpoint:
    """Random weights for benchmarks; the same on every run on the same type of device."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        """`device` creates the weights: a GPU takes seconds for billions of them."""
        self.config = config
        self.path: Path | None = None
        self._device = torch.device(device)
        self._expected = ExpectedTensors(config, None)

    def has(self, name: str) -> bool:
        return name in self._expected.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._expected.shapes[name]

    def read(self, name: str) -> torch.Tensor:
        shape = self._expected.check(name, self._expected.shapes.get(name))
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator)

    def read_part(self, name: str, part: Part) -> torch.Tensor:
        whole = self.read(name)
        return whole[part[: whole.dim()]].contiguous()

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        return None

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        return quantize(self.read_part(name, part)) if self.config.quantization else None


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """Open the weights of a folder or file; dummy needs only a config.json or a GGUF header."""
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        raise ModelError(f"unknown load format {load_format!r}; use one of {formats}")
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if load_format == "dummy" and (path.name == "config.json" or (path / "config.json").exists()):
        return DummyCheckpoint(load_hf(path))
    if load_format in ("auto", "safetensors"):
        if (path / "config.json").exists() and _safetensors_files(path):
            return SafetensorsCheckpoint(path)
        if load_format == "safetensors":
            raise ModelError(f"{path} is not a folder with config.json and *.safetensors")
    opened = GgufCheckpoint(_gguf_file(path, load_format))
    return DummyCheckpoint(opened.config) if load_format == "dummy" else opened


def _safetensors_files(folder: Path) -> list[Path]:
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


def _open_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: not a valid safetensors file: {error}") from error


def _gguf_file(path: Path, load_format: str) -> Path:
    """The GGUF file of a path; ModelError unless there is exactly one."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelError(f"{path}: use a .gguf file, or the folder that contains config.json")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelError(f"{path} contains {len(found)} GGUF files ({names}); choose one of them")
    wanted = {"gguf": "a .gguf file", "dummy": "config.json or a .gguf file"}
    needs = wanted.get(load_format, "config.json with *.safetensors, or a .gguf file")
    raise ModelError(f"{path} contains no model; expected {needs}")
