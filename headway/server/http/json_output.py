"""Large answers as JSON, in parts: one call for all of it would hold the GIL for too long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.server.http.errors import to_json
from headway.server.http.offload import pause

PART = 32  # items of a list, each of which may be an object of a hundred numbers


def large_to_json(value: Any) -> bytes:
    """What `to_json` gives, on a thread of `aside`."""
    parts = []
    for part in _parts(value):
        parts.append(part)
        pause()
    return b"".join(parts)


def _parts(value: Any) -> Iterator[bytes]:
    """Of a list at most `PART` items at once, unless they are lists or objects of a short list."""
    if isinstance(value, dict) and value:
        for number, (key, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(key) + b":"
            yield from _parts(inner)
        yield b"}"
    elif isinstance(value, list) and len(value) > PART:
        for start in range(0, len(value), PART):
            yield (b"," if start else b"[") + to_json(value[start : start + PART])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from _parts(inner)
        yield b"]"
    else:
        yield to_json(value)
