"""Which replica holds which prefix keys: exact copies of the replicas' prefix indexes.

The copies follow the journals of the indexes (`CacheDelta`), so a match is what the replica would
have found when it sent its last delta. They need as much memory as all pools have blocks with keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.kv.prefix_index import num_leading


class PrefixTracker:
    """The prefix keys of every replica, by its name."""

    def __init__(self) -> None:
        self._held: dict[str, set[bytes]] = {}

    @property
    def num_keys(self) -> int:
        """Keys in all copies together."""
        return sum(map(len, self._held.values()))

    def apply(
        self,
        replica: str,
        added: Iterable[bytes],
        removed: Iterable[bytes],
        cleared: bool = False,
    ) -> None:
        """Apply the fields of a CacheDelta."""
        held = set() if cleared else self._held.get(replica, set())
        held.difference_update(removed)
        held.update(added)
        self._held[replica] = held

    def clear(self, replica: str) -> None:
        """Forget a replica; one that starts again, or connects again, sends all its keys first."""
        self._held.pop(replica, None)

    def keys_of(self, replica: str) -> frozenset[bytes]:
        """A copy of the keys that a replica holds."""
        return frozenset(self._held.get(replica, ()))

    def num_cached(self, keys: Sequence[bytes], replica: str) -> int:
        """Leading blocks of a prompt, given by their keys, that a replica holds."""
        return num_leading(keys, self._held.get(replica, ()))

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """`num_cached` of every known replica."""
        return {replica: num_leading(keys, held) for replica, held in self._held.items()}
