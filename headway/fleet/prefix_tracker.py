"""Which replica holds which prefix keys: exact copies of the replicas' prefix indexes.

The copies follow the journals of the indexes (`CacheDelta`), so a match is what the replica would
have found when it sent its last delta. They need as much memory as all pools have blocks with keys.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import overload

from xxhash import xxh3_128_digest

from headway.kv.prefix_index import GROUP, known_tokens, num_leading, pieces_of, root_key
from headway.request import Request


class PrefixTracker:
    """The prefix keys that every replica holds, by its name."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}

    def apply(
        self,
        replica: str,
        added: Iterable[bytes],
        removed: Iterable[bytes],
        cleared: bool = False,
    ) -> None:
        """Apply the fields of a CacheDelta."""
        held = set() if cleared else self.held.get(replica, set())
        held.difference_update(removed)
        held.update(added)
        self.held[replica] = held

    def clear(self, replica: str) -> None:
        """Forget a replica; one that starts again, or connects again, sends all its keys first."""
        self.held.pop(replica, None)

    def num_cached(self, keys: Sequence[bytes], replica: str) -> int:
        """Leading blocks of a prompt, given by their keys, that a replica holds."""
        return num_leading_blocks(keys, self.held.get(replica, ()))


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


def num_leading_blocks(keys: Sequence[bytes], present: Container[bytes]) -> int:
    """As num_leading; of PromptKeys it reads one group at most."""
    if isinstance(keys, PromptKeys):
        num_groups = num_leading(keys.lasts, present)
        return num_groups * GROUP + num_leading(keys.inside(num_groups), present)
    return num_leading(keys, present)
