"""A model's weights by Hugging Face name, whatever file they are in, one tensor at a time.

Opening a file checks its whole header. Reading a tensor does not load any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.errors import ModelError
from headway.model.config import ModelConfig
from headway.model.quantization import keeps_fp8, keeps_int4
from headway.model.sharding import EVERYTHING, Part, Shard
from headway.model.weights.fp8 import Fp8Matrix, quantize


@dataclass(frozen=True, kw_only=True)
class QuantizedMatrix:
    """A quantized matrix: w = scale * q + minimum, in groups of 32 numbers along a row."""

    q: torch.Tensor  # uint8 [out, in]
    scale: torch.Tensor  # float32 [out, in / 32]
    minimum: torch.Tensor  # float32 [out, in / 32]
    bits: int  # 4, 5 or 8: q < 2 ** bits
    is_coded: bool = False  # q are codes of MXFP4, which stand for integers (mxfp4.INTEGERS)


class Checkpoint:
    """Weights by name; ModelError for a tensor that is missing or has the wrong shape."""

    def __init__(self, config: ModelConfig, path: Path | None) -> None:
        self.config, self.path = config, path
        self._shapes = config.stored_shapes()

    def has(self, name: str) -> bool:
        """Whether the model has this tensor and the file contains it."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shapes[name]

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        """The tensor in its stored type, or some rows and columns; float32 if it is quantized."""
        raise NotImplementedError

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        """The tensor, or a part of it, in its quantized form.

        None if it is not quantized, or if the part does not consist of whole groups.
        """
        return None

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        """The matrix, or a part of it, in 8-bit floats; None if it is not stored so."""
        return None

    def group_bits(self, name: str) -> int | None:
        """Bits of the groups that `read_groups` returns, by headers alone; None without groups."""
        given = self.config.quantization
        is_kept = given is None or ".layers." not in name or given.keeps(name.rpartition(".")[0])
        return None if given is None or is_kept else given.group_bits

    def _check(self, name: str, found: Sequence[int] | None) -> tuple[int, ...]:
        """Return the tensor's shape; ModelError if the file's tensor is missing or differs."""
        if name not in self._shapes:
            raise ModelError(
                f"{self.path}: unexpected tensor {name}: a {self.config.architecture} model with "
                "this config does not have it"
            )
        if found is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        if tuple(found) != self._shapes[name]:
            raise ModelError(
                f"{self.path}: tensor {name} has shape {list(found)}; "
                f"the config requires {list(self._shapes[name])}"
            )
        return self._shapes[name]


class ShardedCheckpoint(Checkpoint):
    """A checkpoint as one rank sees it; `config` has the sizes that the rank computes with."""

    def __init__(self, whole: Checkpoint, shard: Shard) -> None:
        self.config, self.path = shard.config, whole.path
        self._whole, self._shard = whole, shard

    def has(self, name: str) -> bool:
        return self._whole.has(name) and self._shard.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        part, whole = self._shard.part(name), self._whole.shape(name)
        return tuple(len(range(size)[cut]) for size, cut in zip(whole, part, strict=False))

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        return self._whole.read(name, self._own(name, part))

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        return self._whole.read_groups(name, self._own(name, part))

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        return self._whole.read_fp8(name, self._own(name, part))

    def _own(self, name: str, part: Part) -> Part:
        assert part == EVERYTHING, "a rank's part is not divided again"
        return self._shard.part(name)


class DummyCheckpoint(Checkpoint):
    """Random weights for benchmarks; the same on every run on the same type of device."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        """`device` creates the weights: a GPU takes seconds for billions of them."""
        super().__init__(config, None)
        self._shapes = config.shapes()
        self._device = torch.device(device)

    def whole(self, name: str) -> torch.Tensor:
        """The tensor of which `read` returns a part."""
        shape = self._check(name, self._shapes.get(name))
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, device=self._device).normal_(0.0, 0.02, generator=generator)

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        whole = self.whole(name)
        return whole[part[: whole.dim()]].contiguous()

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        """Symmetric ones of 4 bits for formats that a GPU computes with; they are None for others."""
        is_int4 = keeps_int4(self.config.quantization) and self.group_bits(name) is not None
        shape = self._shapes[name]
        if not is_int4 or len(shape) < 2 or len(range(shape[1])[part.columns]) % 32:
            return None
        whole = self.read(name, part)
        scale = whole.abs().amax(1, keepdim=True).expand(-1, whole.shape[1] // 32) / 7
        q = (whole / scale[:, :1] + 8).round().to(torch.uint8)
        return QuantizedMatrix(q=q, scale=scale, minimum=-8 * scale, bits=4)

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        return quantize(self.read(name, part)) if keeps_fp8(self.config.quantization) else None
