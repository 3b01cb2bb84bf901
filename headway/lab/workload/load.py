"""Workloads by text: a file, or a synthetic workload described by its fields."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.lab.workload.files import adjust, read_workload
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic


def is_synthetic(text: str) -> bool:
    """Whether a text describes a workload; otherwise it names a file."""
    return "=" in text and not Path(text).exists()


def load_workload(
    text: str, limit: int | None, speed: float, max_tokens: int | None
) -> list[WorkloadRequest]:
    """The requests of a file or of a synthetic workload."""
    if is_synthetic(text):
        if max_tokens is not None:
            raise ConfigError(
                "--allowed-tokens is for workload files; a synthetic workload has a field "
                f"max_tokens: '{text},max_tokens={max_tokens}'"
            )
        return adjust(parse_synthetic(text).generate(), limit, speed)
    return read_workload(text, limit=limit, speed=speed, max_tokens=max_tokens or 1)
