"""Opens a model's weights and loads a decoder, whole or one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway.errors import ModelError
from headway.model.backends.base import Backend
from headway.model.config import load_hf
from headway.model.decoder import Decoder
from headway.model.devices import Device, room_for_weights
from headway.model.precision import weight_bytes
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint, DummyCheckpoint, ShardedCheckpoint
from headway.model.weights.converted import ConvertedCheckpoint
from headway.model.weights.gguf_checkpoint import GgufCheckpoint
from headway.model.weights.safetensors_checkpoint import SafetensorsCheckpoint
from headway.model.weights.safetensors_files import safetensors_files

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
Steps = Callable[[int, int], None]  # (done, total)


def open_checkpoint(
    path: Path, load_format: str = "auto", device: Device | str = "cpu"
) -> Checkpoint:
    """Open the weights of a folder or file; dummy needs only a config.json or a GGUF header.

    Random weights are created on the device, the others are read on the CPU.
    """
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        raise ModelError(f"unknown load format {load_format!r}; use one of {formats}")
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if load_format == "dummy" and (path.name == "config.json" or (path / "config.json").exists()):
        return DummyCheckpoint(load_hf(path), device)
    if load_format in ("auto", "safetensors"):
        if (path / "config.json").exists() and safetensors_files(path):
            return _converted(SafetensorsCheckpoint(path))
        if load_format == "safetensors":
            raise ModelError(f"{path} is not a folder with config.json and *.safetensors")
    opened = GgufCheckpoint(_gguf_file(path, load_format))
    return DummyCheckpoint(opened.config, device) if load_format == "dummy" else _converted(opened)


def _converted(stored: Checkpoint) -> Checkpoint:
    return ConvertedCheckpoint(stored) if stored.config.is_converted else stored


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


def load_decoder(
    checkpoint: Checkpoint,
    backend: Backend,
    device: Device,
    progress: Steps | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """Load all weights, or those of a shard; ConfigError if they do not fit on a GPU."""
    if shard is not None:
        backend.shard, checkpoint = shard, ShardedCheckpoint(checkpoint, shard)
    if device.type != "cuda":
        return Decoder(checkpoint, backend, progress)
    config = checkpoint.config
    if shard is not None:
        config = replace(config, vocab_size=len(shard.vocabulary[shard.rank]))
    with room_for_weights(weight_bytes(config, backend), device):
        return Decoder(checkpoint, backend, progress)
