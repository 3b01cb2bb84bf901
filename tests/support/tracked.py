"""What a prefix tracker knows of a replica. It keeps no list of keys, so tests ask for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.fleet.prefixes.tracker import PrefixTracker


def num_cached(tracker: PrefixTracker, keys: Sequence[bytes], replica: str) -> int:
    """Leading blocks of a prompt, given by their keys, that a replica holds."""
    bit = 1 << tracker.slots[replica] if replica in tracker.slots else 0
    return next((number for number, _ in tracker.leading(keys, bit)), 0)


def num_keys(tracker: PrefixTracker, replica: str | None = None) -> int:
    """Keys of a replica, or of all replicas; one that several have counts for each."""
    slots = tracker.slots.values() if replica is None else [tracker.slots.get(replica, 1 << 20)]
    pairs = list(zip(tracker._holders, tracker._num_keys, strict=True))
    return sum(number for slot in slots for holders, number in pairs if holders >> slot & 1)


def holds(tracker: PrefixTracker, replica: str, keys: Collection[bytes]) -> bool:
    """Whether the tracker has exactly these keys for a replica."""
    return num_keys(tracker, replica) == len(keys) and all(
        num_cached(tracker, [key], replica) == 1 for key in keys
    )
