"""Loads a model and makes a scheduler config that fits the model and the memory.

Weights are loaded first. The KV cache gets a share of the memory that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from headway.checks import whole_number
from headway.config import Config
from headway.draft_loading import load_draft_decoder, open_draft_checkpoint
from headway.errors import ConfigError
from headway.kv.window import most_useful_window_blocks
from headway.model.backends.base import kv_itemsize
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.devices import (
    Device,
    check_gpus,
    free_device_memory,
    free_memory,
    parse_size,
    size,
    use_device,
)
from headway.model.loader import Steps, load_decoder, open_checkpoint
from headway.model.precision import (
    FASTEST,
    check_attention,
    choose_backend,
    fastest_forms,
    kv_dtype_for,
    measured_precision,
    num_threads,
    resolved,
    stored_precision,
    use_threads,
    with_forms,
)
from headway.model.registry import resolve
from headway.model.sharding import check_size
from headway.model.weights.gguf import read_metadata
from headway.options import EngineOptions
from headway.parallel.launch import RankLauncher
from headway.parallel.ranks import Ranks, ended_on_error
from headway.parallel.spec import RankSpec
from headway.scheduler import preset
from headway.scheduler.policies.swap import recompute
from headway.text.chat_template import read_template
from headway.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

Progress = Callable[[str, int, int], None]  # (description, done, total)
# The number of KV blocks that fit in a fraction of GPU memory; the last is the draft model, if any.
Measure = Callable[[Decoder, Config, float, Decoder | None], int]
KV_FRACTION = 0.1  # default fraction of free CPU memory for the KV cache
PINNED_FRACTION = 0.125  # fraction of free host memory for blocks swapped out of a GPU
CPU_NUM_SEQS, CPU_BATCHED_TOKENS = 64, 512  # on a CPU, more of either only makes steps longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to run, and the scheduler config for it."""

    path: Path
    device: str  # cpu, or cuda:0 and so on
    precision: str  # such as float32, or int8 (down 8-bit/32) if a form is not the default
    decoder: Decoder
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    config: Config
    kv_bytes: int  # size of all device blocks, of one rank
    draft_decoder: Decoder | None = None  # of the drafter `model`
    ranks: Ranks | None = None  # the other ranks of a tensor-parallel group

    @property
    def is_on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def kv_dtype(self) -> str:
        """The type of the KV cache: float32, int8 and so on."""
        blocks = self.decoder.backend.kv_blocks(self.decoder.config, 0, 1)
        return str(blocks.dtype).removeprefix("torch.")

    @property
    def execution(self) -> str:
        """Precision and device, and the type of the KV cache if it has 8 bits."""
        has_bytes = self.kv_dtype in ("int8", "float8_e4m3fn")
        text = f"{self.precision} on {self.device}"
        return f"{text} with {self.kv_dtype} KV cache" if has_bytes else text

    @property
    def kv_cache(self) -> str:
        blocks = f"{self.config.num_blocks:,} KV blocks of {self.config.block_size} tokens"
        return f"{blocks} in {self.kv_dtype}, {size(self.kv_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRoom:
    """GPU memory that is left for KV blocks."""

    free: int  # bytes
    measure: Callable[[Config], int]  # blocks that fit beside the steps of a config


def load(
    options: EngineOptions,
    *,
    progress: Progress | None,
    measure: Measure,
    launcher: RankLauncher | None = None,
) -> Loaded:
    """Find, download if necessary, and load a model; ModelError or ConfigError if that fails.

    With a `launcher`, the other ranks of a tensor-parallel group run on other machines.
    """
    template = None if options.chat_template is None else read_template(options.chat_template)
    if options.threads is not None:
        use_threads(options.threads)
    device = use_device(options.device)
    precision = resolved(options.dtype, options.quantization, device)
    kv_dtype = kv_dtype_for(options.kv_cache_dtype, device)
    check_attention(options.attention, device)
    name = options.model
    path = resolve(name, progress=_with_title(progress, f"downloading {name}"))
    checkpoint = open_checkpoint(path, options.load_format, device)
    # Before the weights are loaded, which takes long.
    max_model_len = _max_model_len(checkpoint.config, options.max_model_len)
    title = _with_title(progress, "downloading the draft model")
    draft_checkpoint = open_draft_checkpoint(options, checkpoint.config, device, title)
    precision = stored_precision(
        checkpoint.config, precision, options.dtype, device, deterministic=options.deterministic
    )
    ranks = _start_ranks(checkpoint.config, path, options, device, precision, launcher)
    with ended_on_error(ranks):
        if ranks is not None:
            precision = ranks.spec.precision
        is_measured = precision == FASTEST
        precision = measured_precision(checkpoint.config, precision)
        forms = fastest_forms(checkpoint) if is_measured and precision == "int8" else {}
        backend = choose_backend(
            checkpoint.config, precision, device, kv_dtype, options.attention, forms,
            deterministic=options.deterministic,
        )  # fmt: skip
        shard = ranks.connect(checkpoint.config) if ranks else None
        title = _with_title(progress, f"loading {name}")
        decoder = load_decoder(checkpoint, backend, device, title, shard)
        if ranks is not None:
            ranks.wait_until_loaded()
        tokenizer = find_tokenizer(path)
        if template is not None and tokenizer is not None:
            tokenizer = tokenizer.with_chat_template(template)
        draft, draft_bytes = None, 0
        if draft_checkpoint is not None:
            title = _with_title(progress, "loading the draft model")
            draft = load_draft_decoder(draft_checkpoint, options, device, max_model_len, title)
            draft_bytes = draft.config.kv_bytes(kv_itemsize(draft.backend, draft.config))
        itemsize = kv_itemsize(backend, decoder.config)
        room = _gpu_room(decoder, draft, device, options.gpu_memory_utilization, measure, ranks)
        config = fit(decoder.config, itemsize, options, room, draft_bytes)
    ends = decoder.config.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
    full, windowed = _block_bytes(decoder.config, config, itemsize, draft_bytes)
    kv_bytes = config.num_blocks * full + config.num_window_blocks * windowed
    return Loaded(
        path=path, device=str(device), precision=with_forms(precision, forms), decoder=decoder, tokenizer=tokenizer,
        eos_ids=ends, config=config, kv_bytes=kv_bytes, draft_decoder=draft, ranks=ranks,
    )  # fmt: skip


def _start_ranks(
    model: ModelConfig,
    path: Path,
    options: EngineOptions,
    device: Device,
    precision: str,
    launcher: RankLauncher | None,
) -> Ranks | None:
    """Start the other ranks of a tensor-parallel group; None for one rank."""
    size, is_gpu = options.tensor_parallel_size, device.type == "cuda"
    check_size(model, size)
    if size == 1:
        return None
    if is_gpu:
        check_gpus(1 if launcher else size, device)
    threads, sums = options.threads or max(1, num_threads() // size), options.tensor_parallel_sums
    use_threads(threads)
    spec = RankSpec(
        size=size, is_exact=sums == "exact" or (sums == "auto" and not is_gpu),
        path=options.model if launcher else str(path), is_remote=launcher is not None,
        load_format=options.load_format, precision=measured_precision(model, precision),
        kv_cache_dtype=options.kv_cache_dtype, attention=options.attention,
        first_device=device.index if is_gpu else None, threads=threads,
    )  # fmt: skip
    return Ranks(spec, launcher)


def _gpu_room(
    decoder: Decoder,
    draft: Decoder | None,
    device: Device,
    fraction: float,
    measure: Measure,
    ranks: Ranks | None,
) -> GpuRoom | None:
    if device.type != "cuda":
        return None

    def fitting(config: Config) -> int:
        own = partial(measure, decoder, config, fraction, draft)
        return own() if ranks is None else ranks.count_blocks(config, fraction, own)

    return GpuRoom(free=free_device_memory(device), measure=fitting)


def _with_title(progress: Progress | None, title: str) -> Steps | None:
    return None if progress is None else lambda done, total: progress(title, done, total)


def find_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a model folder or GGUF file; None if there is none."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if (path / "tokenizer.json").exists() or not found:
            return load_tokenizer(path) if any(path.glob("tokenizer*")) else None
        path = found[0]
    return tokenizer_from_gguf(read_metadata(path), str(path)) if path.suffix == ".gguf" else None


def fit(
    model: ModelConfig,
    itemsize: int | Fraction,
    options: EngineOptions,
    room: GpuRoom | None = None,
    draft_bytes: int = 0,
) -> Config:
    """The preset with its changes, and with the length and blocks that model and memory allow.

    The ranks of a tensor-parallel group share the host's memory; `model` has the sizes of one rank.
    `draft_bytes` are those of a token in the KV cache of the draft model.
    """
    changes, kv_memory = options.preset_changes(), options.kv_memory
    changes["max_model_len"] = _max_model_len(model, options.max_model_len)
    _set_limits(changes, options.preset, is_gpu=room is not None)
    config = preset(options.preset, **changes)
    if model.windowed_layers:
        is_given = "num_blocks" in changes
        both = _block_bytes(model, config, itemsize, draft_bytes)
        return _fit_windowed(model, both, config, kv_memory, room, is_given=is_given)
    block, _ = _block_bytes(model, config, itemsize, draft_bytes)
    host_block = options.tensor_parallel_size * block
    if room is None:
        block = host_block
    can_swap = config.swap is not recompute and "num_host_blocks" not in changes
    if can_swap and room is not None:
        config = replace(config, num_host_blocks=int(free_memory() * PINNED_FRACTION) // host_block)
    if "num_blocks" not in changes:
        changes["num_blocks"] = _num_blocks(config, block, kv_memory, room)
    if can_swap:
        limit = changes["num_blocks"] if room is None else config.num_host_blocks
        changes["num_host_blocks"] = min(limit, changes["num_blocks"])
    config = preset(options.preset, **changes)
    _check_memory(config.num_blocks * block, config.num_host_blocks * host_block, room)
    return config


def _block_bytes(
    model: ModelConfig, config: Config, itemsize: int | Fraction, draft_bytes: int
) -> tuple[int, int]:
    """Bytes of a KV block of the layers that see all tokens, and of the sliding-window layers.

    The former are with the block of the draft model.
    """
    full, windowed = (model.layers_of_kind(windowed=kind) for kind in (False, True))
    length = config.block_size
    return length * (full.kv_bytes(itemsize) + draft_bytes), length * windowed.kv_bytes(itemsize)


def _fit_windowed(
    model: ModelConfig,
    block_bytes: tuple[int, int],
    config: Config,
    kv_memory: int | str | None,
    room: GpuRoom | None,
    *,
    is_given: bool,
) -> Config:
    """Divide the memory among both kinds of blocks; num_blocks `is_given`, or chosen here.

    Sliding-window layers get as many blocks as the others, but no more than they can use.
    """
    assert model.sliding_window is not None
    full, windowed = block_bytes
    num_blocks = config.num_blocks
    most = most_useful_window_blocks(model.sliding_window, config)
    if not is_given:
        num_blocks = _num_blocks(config, full + windowed, kv_memory, room)
        usable = config.max_num_seqs * -(-config.max_model_len // config.block_size)
        num_spare = max(0, num_blocks - most) * windowed // full
        num_blocks = max(num_blocks, min(usable, num_blocks + num_spare))
    num_window_blocks = min(num_blocks, most)
    _check_memory(num_blocks * full + num_window_blocks * windowed, 0, room)
    return replace(
        config, num_blocks=num_blocks, sliding_window=model.sliding_window,
        num_window_blocks=num_window_blocks,
    )  # fmt: skip


def _max_model_len(model: ModelConfig, given: int | None) -> int:
    """The given value or the model's limit; ConfigError if it is above that limit."""
    limit = model.max_model_len
    if isinstance(given, int) and given > limit:
        wanted = f"at most {limit}, the limit of this model"
        raise ConfigError(f"max_model_len must be {wanted}, not {given}")
    return limit if given is None else given


def _set_limits(changes: dict[str, Any], preset_name: str, *, is_gpu: bool) -> None:
    """Set max_num_seqs and max_num_batched_tokens, unless given: on a GPU those of the preset."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name in changes:  # compared below, before `preset` checks them
            whole_number(name, changes[name], 1)
    base = preset(preset_name)
    num_seqs, num_tokens = CPU_NUM_SEQS, CPU_BATCHED_TOKENS
    if is_gpu:
        num_seqs, num_tokens = base.max_num_seqs, base.max_num_batched_tokens
    limit = changes.get("max_num_batched_tokens", num_seqs)
    changes.setdefault("max_num_seqs", min(num_seqs, limit))
    if "max_num_batched_tokens" not in changes:
        budget = max(num_tokens, changes["max_num_seqs"])
        chunk = preset(preset_name, **changes, max_num_batched_tokens=budget).chunk
        if chunk(changes["max_model_len"], budget, True) <= 0:  # prompts are not split
            budget = max(budget, changes["max_model_len"])
        changes["max_num_batched_tokens"] = budget


def _num_blocks(
    config: Config, block: int, kv_memory: int | str | None, room: GpuRoom | None
) -> int:
    """Blocks for this much memory; by default a fraction of it, but no more than can be used."""
    if kv_memory is None:
        usable = config.max_num_seqs * -(-config.max_model_len // config.block_size)
        if room is not None:
            return min(usable, room.measure(config))
        return max(1, min(usable, int(free_memory() * KV_FRACTION) // block))
    budget = parse_size(kv_memory)
    if budget < block:
        raise ConfigError(
            f"kv_memory is {size(budget)}, but a block of {config.block_size} tokens takes "
            f"{size(block)}; raise --kv-memory or lower --block-size"
        )
    return budget // block


def _check_memory(on_device: int, on_host: int, room: GpuRoom | None) -> None:
    """ConfigError if blocks of these sizes, in bytes, do not fit into the free memory."""
    if room is None:
        parts = f" ({size(on_device)}, and {size(on_host)} for swapped requests)"
        what = f"the KV cache{parts if on_host else ''}"
        needs = [(what, on_device + on_host, free_memory(), "memory")]
    else:
        needs = [
            ("the KV cache", on_device, room.free, "GPU memory"),
            ("the KV cache on the host", on_host, free_memory(), "host memory"),
        ]
    for what, needed, free, where in needs:
        if needed > free:
            raise ConfigError(
                f"{what} needs {size(needed)}, but only {size(free)} of {where} is free; "
                "lower --kv-memory, --num-blocks or --num-host-blocks"
            )
