"""The config of a simulated run: a preset, changes to it, and sizes that follow from the profile."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.swap import recompute
from headway.scheduler.policies.text import READY_MADE


def config_for(
    name: str, profile: Profile, changes: dict[str, Any], own: Container[str] = READY_MADE
) -> Config:
    """A preset with changes; ConfigError if a value is unknown or out of range.

    Without `num_blocks` it has as many blocks as the profile's KV cache. If the swap rule uses host
    memory, it has as many host blocks as device blocks by default. `own` as for `read_preset`.
    """
    changes = dict(changes)
    config = read_preset(changes, name, own=own)
    limit = profile.model.max_model_len
    if changes.get("max_model_len", 0) > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the limit of the model of profile "
            f"{profile.name}, not {changes['max_model_len']}"
        )
    if "num_blocks" not in changes:
        changes["num_blocks"] = profile.num_blocks(config.block_size)
    if config.swap is not recompute:
        changes.setdefault("num_host_blocks", changes["num_blocks"])
    return read_preset(changes, name, own=own)
