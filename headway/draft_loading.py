"""Loads the model of the drafter `model`, which makes drafts for another model.

It is checked before the weights of that model are loaded, and loaded after them, with the same
options. Drafts never change a text, so it may be any model with as many tokens.
"""

from __future__ import annotations

from dataclasses import replace

from headway.config import Config
from headway.drafters.model import model as model_drafter
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.devices import Device
from headway.model.loader import Steps, load_decoder, open_checkpoint
from headway.model.precision import (
    FASTEST,
    choose_backend,
    fastest_forms,
    kv_dtype_for,
    measured_precision,
    resolved,
    stored_precision,
)
from headway.model.registry import resolve
from headway.model.weights.checkpoint import Checkpoint
from headway.options import EngineOptions
from headway.scheduler import preset


def open_draft_checkpoint(
    options: EngineOptions, target: ModelConfig, device: Device, progress: Steps | None
) -> Checkpoint | None:
    """The checkpoint of the draft model, if the options have one; ConfigError if it cannot draft."""
    given = options.preset_changes().items()
    slots = {name: value for name, value in given if name in ("draft", "drafter")}
    config = preset(options.preset, **slots)
    check_one_rank(config, options.tensor_parallel_size)
    if config.draft is None or not isinstance(config.drafter, model_drafter):
        return None
    name = config.drafter.path
    load_format = "dummy" if options.load_format == "dummy" else "auto"
    checkpoint = open_checkpoint(resolve(name, progress=progress), load_format, device)
    check_draft_model(checkpoint.config, name, target, options.model)
    return checkpoint


def check_one_rank(config: Config, num_ranks: int) -> None:
    """ConfigError for drafts on several ranks."""
    if config.draft is not None and num_ranks > 1:
        raise ConfigError(
            f"drafts need one rank, not tensor_parallel_size {num_ranks}; use --draft none or "
            "--tensor-parallel-size 1"
        )


def check_draft_model(draft: ModelConfig, name: str, target: ModelConfig, target_name: str) -> None:
    """ConfigError unless the draft model has as many tokens, and full attention in all layers."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size} tokens, and {target_name} "
            f"one of {target.vocab_size}; use a draft model with the same vocabulary"
        )
    if draft.windowed_layers:
        raise ConfigError(
            f"the draft model {name} has layers with a sliding window, which draft models cannot "
            "have; use another draft model"
        )


def load_draft_decoder(
    checkpoint: Checkpoint, options: EngineOptions, device: Device, max_model_len: int,
    progress: Steps | None,
) -> Decoder:  # fmt: skip
    """The decoder of the draft model, for contexts of this length, even if it was trained for less."""
    precision = resolved(options.dtype, options.quantization, device)
    precision = stored_precision(
        checkpoint.config, precision, options.dtype, device, deterministic=options.deterministic
    )
    is_measured = precision == FASTEST
    precision = measured_precision(checkpoint.config, precision)
    forms = fastest_forms(checkpoint) if is_measured and precision == "int8" else {}
    backend = choose_backend(
        checkpoint.config, precision, device, kv_dtype_for(options.kv_cache_dtype, device),
        options.attention, forms, deterministic=options.deterministic,
    )  # fmt: skip
    decoder = load_decoder(checkpoint, backend, device, progress)
    decoder.config = replace(decoder.config, max_model_len=max_model_len)
    decoder.use_length(max_model_len)
    return decoder
