"""Settings of a server: limits, timeouts, API keys, and the web pages that may call it.

Limits on waiting requests are in `headway.engine.queue_limits.QueueLimits`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.checks import Checked, count, number
from headway.errors import ConfigError

KEY_VARIABLE = "HEADWAY_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Checked):
    """Limits and secrets of a server. Times are in seconds; None: no limit. ConfigError names a field."""

    prefix = ""
    # From the arrival of the whole body until the response is made, or its stream has been sent.
    request_timeout: float | None = number(None, 0, above=True)
    body_timeout: float = number(60.0, 0, above=True)  # for a request's body to arrive
    stall_timeout: float = number(60.0, 0, above=True)  # for a client that has stopped reading
    # From connecting to the end of the first head, and from a later head's first byte to its end.
    head_timeout: float = number(10.0, 0, above=True)
    # Between two requests. Longer than the 60 s for which proxies keep idle connections, so that
    # a proxy does not send a request into a connection that the server is closing.
    keep_alive_timeout: float = number(75.0, 0, above=True)
    watchdog: float = 30.0  # without progress while there is work: unhealthy; may be infinite
    # Of one API process; None: derived from the limit of open files.
    max_connections: int | None = count(None, 1)
    max_connections_per_address: int | None = count(None, 1)
    max_body_bytes: int = count(16 << 20, 1)
    max_choices: int = count(2048, 1)  # choices of one request: prompts times n
    metrics_prefix: str = "headway"
    tool_call_parser: str = "auto"  # one of PARSERS
    reasoning_parser: str | None = None  # one of REASONING_PARSERS; None: reasoning is text
    disable_additional_properties: bool = False  # close the objects of all JSON schemas
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; none: CORS is off
    allowed_hosts: tuple[str, ...] = ("*",)  # accepted in the Host header; *: any
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is needed

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not self.watchdog > 0:
            raise ConfigError(f"watchdog must be a number above 0, not {self.watchdog!r}")
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
