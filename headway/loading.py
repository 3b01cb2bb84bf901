"""From a name and a few wishes to a model in memory and a scheduler's config that fits it.

Weighs memory: the weights first, then as many KV blocks as the budget allows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import Config
from headway.engine.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from headway.errors import ConfigError
from headway.model.checkpoint import open_checkpoint
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.gguf import read_metadata
from headway.model.names import resolve
from headway.model.precision import choose_backend, use_threads
from headway.scheduler import preset
from headway.scheduler.policies import recompute

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)
SHARE = 0.1  # of the memory that is free, for keys and values, unless told otherwise
SEATS, STEP_TOKENS = 64, 512  # more of either only makes a CPU's steps longer
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model ready to run, and the scheduler's config that goes with it."""

    path: Path
    decoder: Decoder
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    config: Config
    kv_bytes: int  # of all device blocks


def load(
    model: str,
    *,
    precision: str,
    load_format: str,
    preset_name: str,
    kv_memory: int | str | None,
    threads: int | None,
    progress: Progress | None,
    settings: Mapping[str, Any],
) -> Loaded:
    """Find, fetch if need be, and load a model; ModelError or ConfigError if that cannot be."""
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads must be a whole number from 1 up, not {threads}")
        use_threads(threads)
    path = resolve(model, progress=_titled(progress, f"fetching {model}"))
    checkpoint = open_checkpoint(path, load_format)
    backend = choose_backend(checkpoint.config, precision)
    decoder = Decoder(checkpoint, backend, _titled(progress, f"loading {model}"))
    tokenizer = find_tokenizer(path)
    itemsize = backend.kv_blocks(checkpoint.config, 0, 1).element_size()
    config = fit(checkpoint.config, itemsize, preset_name, kv_memory, settings)
    ends = checkpoint.config.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
    kv_bytes = config.num_blocks * config.block_size * checkpoint.config.kv_bytes(itemsize)
    return Loaded(
        path=path, decoder=decoder, tokenizer=tokenizer, eos_ids=ends, config=config,
        kv_bytes=kv_bytes,
    )  # fmt: skip


def _titled(progress: Progress | None, title: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(title, done, total)


def find_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer beside or inside a model; None where only a config.json was given."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if (path / "tokenizer.json").exists() or not found:
            has_any = any(path.glob("tokenizer*"))
            return load_tokenizer(path) if has_any else None
        path = found[0]
    if path.suffix != ".gguf":
        return None
    return tokenizer_from_gguf(read_metadata(path), str(path))


def fit(
    model: ModelConfig,
    itemsize: int,
    preset_name: str,
    kv_memory: int | str | None,
    settings: Mapping[str, Any],
) -> Config:
    """A preset with these settings, and with blocks and lengths that model and memory allow."""
    changes = {name: value for name, value in settings.items() if value is not None}
    changes.setdefault("max_requests", min(SEATS, changes.get("max_tokens", SEATS)))
    changes["max_length"] = min(changes.get("max_length", model.max_length), model.max_length)
    if "max_tokens" not in changes:
        wanted = max(STEP_TOKENS, changes["max_requests"])
        can_cut = preset(preset_name, **changes).chunk(changes["max_length"], wanted, True) > 0
        changes["max_tokens"] = wanted if can_cut else max(wanted, changes["max_length"])
    config = preset(preset_name, **changes)
    block = config.block_size * model.kv_bytes(itemsize)
    if "num_blocks" not in changes:
        changes["num_blocks"] = _num_blocks(config, block, kv_memory)
    if config.swap is not recompute:
        changes.setdefault("num_host_blocks", changes["num_blocks"])
    asked = (changes["num_blocks"] + changes.get("num_host_blocks", 0)) * block
    if asked > (free := free_memory()):
        raise ConfigError(
            f"the KV cache needs {_size(asked)} and {_size(free)} of memory are free; "
            "lower --kv-memory, --num-blocks or --num-host-blocks"
        )
    return preset(preset_name, **changes)


def _num_blocks(config: Config, block: int, kv_memory: int | str | None) -> int:
    """Blocks for the budget; without one, a share of what is free, but no more than can be used."""
    if kv_memory is None:
        most = config.max_requests * -(-config.max_length // config.block_size)
        return max(1, min(most, int(free_memory() * SHARE) // block))
    budget = parse_size(kv_memory)
    if budget < block:
        raise ConfigError(
            f"kv_memory: {_size(budget)} holds no block of {config.block_size} tokens, "
            f"which takes {_size(block)}; raise --kv-memory or lower --block-size"
        )
    return budget // block


def parse_size(size: int | str) -> int:
    """Bytes of a number, or of a text such as 512MiB, 2GiB or 1.5G."""
    match = re.fullmatch(r"([0-9.]+) ?([kmg]i?|)b?", str(size).strip().lower())
    try:
        value = float(match[1]) if match else -1.0
    except ValueError:
        value = -1.0
    if match is None or value < 0:
        raise ConfigError(f"kv_memory must be bytes, or a text such as 512MiB or 2GiB: {size!r}")
    return int(value * UNITS[match[2]])


def free_memory() -> int:
    """Bytes that can be had without swapping, as far as the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
