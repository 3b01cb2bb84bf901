"""What whoever runs a server may set: limits, times, keys, who may call it from a browser.

What may wait in the engine is not here but in `headway.engine.loop.Limits`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import ConfigError

KEY_VARIABLE = "HEADWAY_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of the connections of one API process. Times in seconds."""

    # From connecting to the end of the first head, and from a later head's first byte to its end.
    head_timeout: float = 10.0
    # Between two requests. Longer than the 60 s for which proxies keep idle connections: a proxy
    # must not send a request into a connection that the server closes at that moment.
    keep_alive_timeout: float = 75.0
    stall_timeout: float = 60.0  # for the client to take what is sent to it
    max_connections: int | None = None  # None: as many as the limit of descriptors allows
    max_connections_per_address: int | None = None  # None: no limit

    def __post_init__(self) -> None:
        _check_times(self, "head_timeout", "keep_alive_timeout", "stall_timeout")
        for name in ("max_connections", "max_connections_per_address"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or None, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's limits and secrets. Times in seconds; None: no such limit."""

    request_timeout: float | None = None  # from a request's arrival to its last byte
    body_timeout: float | None = 60.0  # for a request's body to arrive
    stall_timeout: float | None = 60.0  # for a client to take what is sent to it
    max_body_bytes: int = 16 << 20
    max_choices: int = 2048  # texts of one request: prompts times n
    metrics_prefix: str = "headway"
    disable_additional_properties: bool = False  # objects of JSON schemas are closed by default
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; none: CORS is off
    allowed_hosts: tuple[str, ...] = ("*",)  # accepted in the Host header; *: any
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: everybody may call

    def __post_init__(self) -> None:
        _check_times(self, "request_timeout", "body_timeout", "stall_timeout")
        for name in ("max_body_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for key in self.api_keys:  # a header cannot carry anything else
            if not key.isascii() or not key.isprintable() or key.strip() != key or not key:
                raise ConfigError("an API key is printable ASCII without spaces around it")


def _check_times(settings: Settings | ConnectionSettings, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 seconds, or None, not {value!r}")


def read_api_keys(
    path: Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Keys from a file, one in each line, and from HEADWAY_API_KEY; # begins a comment line."""
    keys = [environment[KEY_VARIABLE].strip()] if environment.get(KEY_VARIABLE, "").strip() else []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys cannot be read from {path}: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:  # an empty file must not open the server to everybody
            raise ConfigError(f"{path} holds no API key; write one in each line")
        keys += found
    return tuple(dict.fromkeys(keys))
