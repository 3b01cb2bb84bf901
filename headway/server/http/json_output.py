"""JSON encoding of response bodies, including large ones.

One `json.dumps` call for a large response would hold the GIL for too long, so large responses are
encoded in parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from headway.server.http.offload import yield_gil

MAX_PART_ITEMS = 32  # list items per call; each item may be an object of a hundred numbers


def to_json(value: Any) -> bytes:
    """Encode a value as compact ASCII JSON. Lone surrogates, which have no UTF-8, are escaped."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def large_to_json(value: Any) -> bytes:
    """Return the same bytes as `to_json`, yielding the GIL between parts."""
    parts = []
    for part in _parts(value):
        parts.append(part)
        yield_gil()
    return b"".join(parts)


def _parts(value: Any) -> Iterator[bytes]:
    """Encode lists longer than MAX_PART_ITEMS in slices, and descend into all other containers."""
    if isinstance(value, dict) and value:
        for number, (key, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(key) + b":"
            yield from _parts(inner)
        yield b"}"
    elif isinstance(value, list) and len(value) > MAX_PART_ITEMS:
        for start in range(0, len(value), MAX_PART_ITEMS):
            yield (b"," if start else b"[") + to_json(value[start : start + MAX_PART_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from _parts(inner)
        yield b"]"
    else:
        yield to_json(value)
