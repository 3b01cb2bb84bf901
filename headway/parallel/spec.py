"""The messages to the other ranks: how to load their part of the model, and the sizes to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from headway.config import Config

SIZES = (
    "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps", "block_size", "num_blocks",
    "num_host_blocks", "max_model_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """A tensor-parallel group; rank r uses device `first_device` + r."""

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


def config_sizes(config: Config) -> dict[str, int]:
    """The numbers of a config that executors read."""
    return {name: getattr(config, name) for name in SIZES}


def config_of(sizes: dict[str, int]) -> Config:
    """A config with these numbers, whose policies cannot be used."""
    slots = dict.fromkeys(("batching", "queue", "chunk", "headroom", "victim", "swap"), _no_policy)
    return Config(**slots, **sizes)  # type: ignore[arg-type]


def _no_policy(*_: object) -> NoReturn:
    raise AssertionError("only rank 0 makes plans")
