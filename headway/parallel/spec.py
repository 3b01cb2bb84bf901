"""The messages between rank 0 and the others: commands while the model is loaded, then plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NoReturn

import msgspec

from headway import __version__
from headway.config import Config

SIZES = (
    "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps", "block_size", "num_blocks",
    "num_host_blocks", "max_model_len",
)  # fmt: skip
LENGTH_BYTES = 4  # of a message, before it


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A tensor-parallel group, and how to load a part of the model.

    Rank r uses device `first_device` + r, unless each rank is on a machine of its own.
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
    is_remote: bool = False
    version: str = __version__

    def device(self, rank: int) -> str:
        number = 0 if self.is_remote else rank
        return "cpu" if self.first_device is None else f"cuda:{self.first_device + number}"


class CountBlocks(msgspec.Struct, tag=True):
    """Count the KV blocks that fit."""

    sizes: dict[str, int]
    utilization: float


class Start(msgspec.Struct, tag=True):
    """Create the executor; only plans follow."""

    sizes: dict[str, int]
    enforce_eager: bool


class Reply(msgspec.Struct, tag=True):
    """The result of a command, or why it failed."""

    value: int | None = None
    error: str | None = None


class Join(msgspec.Struct, tag=True):
    """The first message of a rank on another machine; `is_out`: it sends on this connection."""

    rank: int
    is_out: bool


class Beat(msgspec.Struct, tag=True):
    """This rank runs, and has reached a position."""

    position: int


class Report(msgspec.Struct, tag=True):
    """Why this rank ends."""

    text: str


class SetKey(msgspec.Struct, tag=True):
    """Set a value in the store of rank 0."""

    key: str
    value: bytes


class GetKey(msgspec.Struct, tag=True):
    """Send the value of a key, as bytes, once it is set."""

    key: str


FromRank = Reply | Beat | Report | SetKey | GetKey
decode_command = msgspec.msgpack.Decoder(RankSpec | CountBlocks | Start).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_from_rank = msgspec.msgpack.Decoder[FromRank](FromRank).decode


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
