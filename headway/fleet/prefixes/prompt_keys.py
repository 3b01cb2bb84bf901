"""The keys of a prompt that no cache has seen yet, computed when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from xxhash import xxh3_128_digest

from headway.kv.prefix_index import GROUP, known_tokens, pieces_of, root_key
from headway.request import Request


class PromptKeys(Sequence[bytes]):
    """The keys of a request's full blocks, each group of them computed when it is first read."""

    def __init__(self, request: Request, block_size: int) -> None:
        self._tokens, self._block_size = known_tokens(request), block_size
        self._num_keys = len(self._tokens) // block_size
        self._root, num_groups = root_key(request), self._num_keys // GROUP
        groups = pieces_of(self._tokens, GROUP * block_size, 0, num_groups)
        self.lasts = _chain(self._root, groups)  # the last key of each group
        self._inside: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return self._num_keys

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        number, inside = divmod(place if place >= 0 else place + len(self), GROUP)
        return self.lasts[number] if inside == GROUP - 1 else self.inside(number)[inside]

    def inside(self, number: int) -> list[bytes]:
        """The keys of a group but the last."""
        found = self._inside.get(number)
        if found is None:
            first = number * GROUP
            end = min(first + GROUP - 1, self._num_keys)
            parent = self.lasts[number - 1] if number else self._root
            found = _chain(parent, pieces_of(self._tokens, self._block_size, first, end))
            self._inside[number] = found
        return found


def _chain(parent: bytes, pieces: list[bytes]) -> list[bytes]:
    """A key for each piece, which depends on the one before; the first one on the parent."""
    return [parent := xxh3_128_digest(parent + piece) for piece in pieces]
