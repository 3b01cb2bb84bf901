"""Token ids in a form that is short for synthetic workloads: equal and consecutive ones as runs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MAX_PACKED_BY_HAND = 64  # tokens; more are packed and unpacked with numpy


def pack_tokens(tokens: Sequence[int]) -> list[Any]:
    """Pack tokens: three or more equal or consecutive ones become (first, count, 0 or 1)."""
    if len(tokens) <= MAX_PACKED_BY_HAND:
        return _pack_few(tokens)
    return _pack_many(tokens if isinstance(tokens, array) else array("i", tokens))


def _pack_few(tokens: Sequence[int]) -> list[Any]:
    packed: list[Any] = []
    place, length = 0, len(tokens)
    while place < length:
        first, last = tokens[place], place + 1
        stride = tokens[last] - first if last < length else -1
        if stride == 0 or stride == 1:
            while last < length and tokens[last] - tokens[last - 1] == stride:
                last += 1
        if last - place > 2:
            packed.append((first, last - place, stride))
            place = last
        else:
            packed.append(first)
            place += 1
    return packed


def _pack_many(tokens: array[int]) -> list[Any]:
    """The same, faster for many tokens."""
    strides = np.diff(np.frombuffer(tokens, dtype=np.intc)) if len(tokens) > 2 else np.zeros(0)
    changes = np.flatnonzero(strides[1:] != strides[:-1]) + 1
    starts, ends = np.append(0, changes), np.append(changes, len(strides))  # of equal strides
    is_long = ends - starts >= 2
    packed: list[Any] = []
    place = 0
    for start, last in zip(starts[is_long].tolist(), ends[is_long].tolist(), strict=True):
        first = max(start, place)  # the previous run may include the token at `start`
        if last - first >= 2 and strides[first] in (0, 1):
            packed.extend(tokens[place:first])
            packed.append((tokens[first], last - first + 1, int(strides[first])))
            place = last + 1
    packed.extend(tokens[place:])
    return packed


def unpack_tokens(packed: Iterable[Any]) -> array[int]:
    """Unpack tokens that `pack_tokens` has packed."""
    tokens = array("i")
    for item in packed:
        if isinstance(item, int):
            tokens.append(item)
        else:
            tokens.extend(_run(*item))  # an array is copied at once
    return tokens


def _run(first: int, count: int, stride: int) -> Iterable[int]:
    if not stride:
        return array("i", [first]) * count
    if count <= MAX_PACKED_BY_HAND:
        return range(first, first + count)
    bounds = array("i", [first, first + count - 1])  # OverflowError, where numpy may wrap around
    return array("i", np.arange(bounds[0], bounds[1] + 1, dtype=np.intc).tobytes())


def num_packed(packed: int | Iterable[Any]) -> int:
    """The number of tokens in a packed list, without unpacking it, or in a redacted one."""
    if isinstance(packed, int):
        return packed
    return sum(1 if isinstance(item, int) else item[1] for item in packed)
