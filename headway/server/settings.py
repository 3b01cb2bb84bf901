"""Settings of a server: limits, timeouts, API keys, and the web pages that may call it.

Limits on waiting requests are in `headway.engine.queue_limits.QueueLimits`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.errors import ConfigError

KEY_VARIABLE = "HEADWAY_API_KEY"


def check_seconds(name: str, value: float | None, *, is_finite: bool = True) -> None:
    """ConfigError unless a duration is None or a number above 0, and finite if it must be."""
    if value is not None and not (value > 0 and (value < math.inf or not is_finite)):
        raise ConfigError(f"{name} must be above 0 seconds, or None for no limit, not {value!r}")


def check_count(name: str, value: int | None) -> None:
    """ConfigError unless a count is None or at least 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Limits of the connections of one API process. Times are in seconds."""

    # From connecting to the end of the first head, and from a later head's first byte to its end.
    head_timeout: float = 10.0
    # Between two requests. Longer than the 60 s for which proxies keep idle connections, so that
    # a proxy does not send a request into a connection that the server is closing.
    keep_alive_timeout: float = 75.0
    stall_timeout: float = 60.0  # for a client that has stopped reading
    max_connections: int | None = None  # None: derived from the limit of open files
    max_connections_per_address: int | None = None  # None: no limit

    def __post_init__(self) -> None:
        for name in ("head_timeout", "keep_alive_timeout", "stall_timeout"):
            check_seconds(name, getattr(self, name))
        for name in ("max_connections", "max_connections_per_address"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and secrets of a server. Times are in seconds; None: no limit."""

    # From the arrival of the whole body until the response is made, or its stream has been sent.
    request_timeout: float | None = None
    body_timeout: float | None = 60.0  # for a request's body to arrive
    stall_timeout: float | None = 60.0  # for a client that has stopped reading
    max_body_bytes: int = 16 << 20
    max_choices: int = 2048  # choices of one request: prompts times n
    metrics_prefix: str = "headway"
    disable_additional_properties: bool = False  # close the objects of all JSON schemas
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; none: CORS is off
    allowed_hosts: tuple[str, ...] = ("*",)  # accepted in the Host header; *: any
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is needed

    def __post_init__(self) -> None:
        for name in ("request_timeout", "body_timeout", "stall_timeout"):
            check_seconds(name, getattr(self, name))
        for name in ("max_body_bytes", "max_choices"):
            check_count(name, getattr(self, name))
        for key in self.api_keys:  # the characters that a header can carry
            if not key.isascii() or not key.isprintable() or key.strip() != key or not key:
                raise ConfigError(
                    "an API key must be printable ASCII text without spaces at its ends"
                )


def read_api_keys(
    path: Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Keys from HEADWAY_API_KEY and from a file with one key per line; # begins a comment line."""
    keys = [environment[KEY_VARIABLE].strip()] if environment.get(KEY_VARIABLE, "").strip() else []
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the API keys cannot be read from {path}: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:  # an empty file must not turn authentication off
            raise ConfigError(f"{path} contains no API key; write one key per line")
        keys += found
    return tuple(dict.fromkeys(keys))
