"""The messages between rank 0 and the others: commands while the model is loaded, then plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NoReturn

import msgspec

from headway.config import Config

SIZES = (
    "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps", "block_size", "num_blocks",
    "num_host_blocks", "max_model_len",
)  # fmt: skip
LENGTH_BYTES = 4  # of a message, before it


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A tensor-parallel group, and how to load a part of the model.

    Rank r uses device `first_device` + r.
    """

    size: int
    is_exact: bool
    path: str
    load_format: str
    precision: str
    kv_cache_dtype: str
    attention: str
    first_device: int | None  # number of a GPU; None: the CPU
    threads: int  # of each rank

    def device(self, rank: int) -> str:
        return "cpu" if self.first_device is None else f"cuda:{self.first_device + rank}"


class CountBlocks(msgspec.Struct, tag=True):
    """Count the KV blocks that fit."""

    sizes: dict[str, int]
    utilization: float


class Start(msgspec.Struct, tag=True):
    """Create the executor; only plans follow."""

    sizes: dict[str, int]
    enforce_eager: bool


class Reply(msgspec.Struct):
    """The result of a command, or why it failed."""

    value: int | None = None
    error: str | None = None


decode_command = msgspec.msgpack.Decoder(RankSpec | CountBlocks | Start).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def messages(stream: BinaryIO) -> Iterator[bytes]:
    """Wait for framed messages until the other side closes its socket."""
    while len(length := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield stream.read(int.from_bytes(length, "little"))


def config_sizes(config: Config) -> dict[str, int]:
    """The numbers of a config that executors read."""
    return {name: getattr(config, name) for name in SIZES}


def config_of(sizes: dict[str, int]) -> Config:
    """A config with these numbers, whose policies cannot be used."""
    slots = dict.fromkeys(("batching", "queue", "chunk", "headroom", "victim", "swap"), _no_policy)
    return Config(**slots, **sizes)  # type: ignore[arg-type]


def _no_policy(*_: object) -> NoReturn:
    raise AssertionError("only rank 0 makes plans")
