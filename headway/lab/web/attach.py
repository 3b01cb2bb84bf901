"""Follows the film of a server elsewhere, for the lab on this machine."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from headway.errors import ConfigError

TIMEOUT = 10.0  # seconds without a byte; a server that is followed sends some every few seconds
PIECE = 1 << 16


def check_url(url: str) -> str:
    """The address of a server; ConfigError unless it is http or https with a host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--attach needs an address such as http://host:8000, not {url!r}")
    return url.rstrip("/")


def follow(url: str, api_key: str | None = None) -> Iterator[bytes]:
    """The film of the server at this address; ConfigError says why there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{check_url(url)}/lab/api/live", headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        raise ConfigError(_refusal(url, error.code)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"cannot reach {url}: {reason}; is `headway serve` running there?"
        ) from None
    return _pieces(response)


def _pieces(response: object) -> Iterator[bytes]:
    read = response.read1  # type: ignore[attr-defined]
    while piece := read(PIECE):
        yield piece


def _refusal(url: str, status: int) -> str:
    if status == 401:
        return f"{url} needs an API key; give it with --api-key or HEADWAY_API_KEY"
    if status == 404:
        return f"{url} has no lab; it must be `headway serve` of this version"
    return f"{url} refused to be followed (status {status})"
