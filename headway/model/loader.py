"""Opens a model's weights and loads a decoder, whole or one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headway.model.backends.base import Backend
from headway.model.decoder import Decoder
from headway.model.devices import Device, room_for_weights
from headway.model.precision import weight_bytes
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint, DummyCheckpoint, open_checkpoint
from headway.model.weights.sharded import ShardedCheckpoint

Steps = Callable[[int, int], None]  # (done, total)


def open_weights(path: Path, load_format: str, device: Device) -> Checkpoint:
    """Open a checkpoint; random weights are created on the device itself."""
    opened = open_checkpoint(path, load_format)
    return DummyCheckpoint(opened.config, device) if load_format == "dummy" else opened


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
