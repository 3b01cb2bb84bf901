"""What a prefix tracker knows of a replica. It keeps no list of keys, so tests ask for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.fleet.prefix_tracker import PrefixTracker


def num_cached(tracker: PrefixTracker, keys: Sequence[bytes], replica: str) -> int:
    """Leading blocks of a prompt, given by their keys, that a replica holds."""
    bit = 1 << tracker.slots[replica] if replica in tracker.slots else 0
    return next((number for number, _ in tracker.leading(keys, bit)), 0)


def holds(tracker: PrefixTracker, replica: str, keys: Collection[bytes]) -> bool:
    """Whether the tracker has exactly these keys for a replica."""
    return tracker.num_keys(replica) == len(keys) and all(
        num_cached(tracker, [key], replica) == 1 for key in keys
    )
