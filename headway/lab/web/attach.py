"""Follows the recording of a server elsewhere, for the lab on this machine."""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from headway.errors import ConfigError
from headway.lab.recording.format import Record

TIMEOUT = 10.0  # seconds without a byte; a server that is followed sends some every few seconds
PIECE = 1 << 16


def check_url(url: str) -> str:
    """The address of a server; ConfigError unless it is http or https with a host."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--attach needs an address such as http://host:8000, not {url!r}")
    return url.rstrip("/")


def follow(url: str, api_key: str | None = None) -> Iterator[bytes]:
    """The recording of the server at this address; ConfigError says why there is none."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{check_url(url)}/lab/api/live", headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_refusal(url, error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"cannot reach {url}: {reason}; is `headway serve` running there?"
        ) from None
    pieces = _pieces(response)
    first = next(pieces, b"")
    if struct.unpack_from("<I", first.ljust(4, b"\0"))[0] != Record.HEADER:
        pieces.close()
        raise ConfigError(f"{url} sends no recording; it must be `headway serve` of this version")
    return chain([first], pieces)


def _pieces(response: Any) -> Generator[bytes, None, None]:
    with response:
        try:
            while piece := response.read1(PIECE):
                yield piece
        except OSError:  # the server is gone; the page says that the recording has no end
            return


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return f"{url} needs an API key; give it with --api-key or HEADWAY_API_KEY"
    if error.code == 404:
        return f"{url} has no lab; it must be `headway serve` of this version"
    try:
        message = json.loads(error.read(PIECE))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        message = error.reason
    return f"{url} cannot be followed (status {error.code}): {message}"
