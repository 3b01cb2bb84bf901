"""The weights of one rank: reads only its part of each tensor."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.model.config import ModelConfig
from headway.model.sharding import EVERYTHING, Part, Shard
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.fp8 import Fp8Matrix
from headway.model.weights.tensors import QuantizedMatrix


class ShardedCheckpoint:
    """A checkpoint as one rank sees it; `config` has the sizes that the rank computes with."""

    def __init__(self, whole: Checkpoint, shard: Shard) -> None:
        self.config: ModelConfig = shard.config
        self.path: Path | None = whole.path
        self._whole, self._shard = whole, shard

    def has(self, name: str) -> bool:
        return self._whole.has(name) and self._shard.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        part, whole = self._shard.part(name), self._whole.shape(name)
        return tuple(len(range(size)[cut]) for size, cut in zip(whole, part, strict=False))

    def read(self, name: str) -> torch.Tensor:
        return self._whole.read_part(name, self._shard.part(name))

    def read_part(self, name: str, part: Part) -> torch.Tensor:
        own = self.read(name)
        return own[part[: own.dim()]]

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        assert part == EVERYTHING, "a rank's part is not divided again"
        return self._whole.read_groups(name, self._shard.part(name))

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        assert part == EVERYTHING, "a rank's part is not divided again"
        return self._whole.read_fp8(name, self._shard.part(name))
