"""Which replicas hold which prefix keys: one index of all replicas, from key to a bit for each.

It follows the journals of the replicas' own indexes (`CacheDelta`), so a match is what the replica
would have found when it sent its last delta. Keys with the same holders have the same number in the
table, so a replica is forgotten without a look at the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from headway.fleet.prefixes.key_table import KeyTable
from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.kv.prefix_index import GROUP


class PrefixTracker:
    """The replicas that hold each key, as bits of an int: bit `slots[name]` is a replica's."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self._table = KeyTable()
        # By the number of keys in the table: their holders, and how many keys have the number.
        self._holders, self._num_keys, self._unused = [0], [0], list[int]()
        self._numbers = {0: 0}  # by holders
        self._dead = set[int]()  # numbers without holders, of keys to remove from the table

    def slot(self, replica: str) -> int:
        """The bit of a replica, until `clear`; a new one gets the lowest that is free."""
        if (found := self.slots.get(replica)) is None:
            used = set(self.slots.values())
            found = self.slots[replica] = next(each for each in count() if each not in used)
        return found

    def apply(
        self, replica: str, added: Sequence[bytes], removed: Sequence[bytes], cleared: bool = False
    ) -> None:
        """Apply the fields of a CacheDelta."""
        bit = 1 << self.slot(replica)
        if cleared:
            self._forget(bit)
        self._change(removed, lambda holders: holders & ~bit)
        self._change(added, lambda holders: holders | bit)
        if self._dead:  # a part of the table, so that no delta takes long
            swept = self._table.sweep(self._dead, 1 + (len(added) + len(removed)) // 8)
            self._count(swept, dict.fromkeys(swept, 0))

    def clear(self, replica: str) -> None:
        """Forget a replica; one that starts again, or connects again, sends all its keys first."""
        if replica in self.slots:
            self._forget(1 << self.slots.pop(replica))

    def leading(self, keys: Sequence[bytes], among: int) -> Iterator[tuple[int, int]]:
        """How many leading blocks of a prompt, given by its keys, which replicas hold.

        Yields pairs of a number of blocks and the bits of the replicas that hold exactly that number.
        `among` has the bits of all replicas that are asked for.
        """
        if not isinstance(keys, PromptKeys):
            yield from self._runs(keys, among)
            return
        for num_groups, bits in self._runs(keys.lasts, among):
            for num_blocks, exactly in self._runs(keys.inside(num_groups), bits):
                yield num_groups * GROUP + num_blocks, exactly

    def _runs(self, keys: Sequence[bytes], bits: int) -> Iterator[tuple[int, int]]:
        """As `leading`. A holder of a key holds all before it.

        So the places between two with the same bits need no look, and others are divided in two.
        """
        holders, get, place = self._holders, self._table.get, 0
        if not keys or not bits & holders[get(keys[0])]:  # often none has the first
            ends = list[tuple[int, int]]()
        else:
            ends = [(len(keys), bits & holders[get(keys[-1])])]  # later places, with their bits
        while ends:
            end, after = ends[-1]
            if bits != after and end - place > 1:
                middle = (place + end) // 2
                ends.append((middle, bits & holders[get(keys[middle - 1])]))
                continue
            if bits != after:
                yield place, bits & ~after
            place, bits = ends.pop()
        if bits:
            yield place, bits

    def _change(self, keys: Sequence[bytes], change: Callable[[int], int]) -> None:
        """Change the holders of these keys."""
        after = _Numbers(lambda number: self._number(change(self._holders[number])))
        self._count(self._table.change(keys, after), after)

    def _number(self, holders: int) -> int:
        """The number of keys with these holders."""
        number = self._numbers.get(holders)
        if number is None:
            number = self._numbers[holders] = (
                self._unused.pop() if self._unused else len(self._holders)
            )
            self._holders[number : number + 1] = [holders]
            self._num_keys[number : number + 1] = [0]
        return number

    def _count(self, num_changed: dict[int, int], after: dict[int, int]) -> None:
        """This many keys with each number have another one now; unused numbers become free."""
        for before, number in num_changed.items():
            self._num_keys[after[before]] += number
            self._num_keys[before] -= number
        for before in num_changed:
            if before and not self._num_keys[before]:
                if self._numbers.get(self._holders[before]) == before:
                    del self._numbers[self._holders[before]]
                self._holders[before] = 0
                self._dead.discard(before)
                self._unused.append(before)
        self._num_keys[0] = 0

    def _forget(self, bit: int) -> None:
        """Remove a replica from all holders; the keys that it alone had are removed later."""
        self._holders = [holders & ~bit for holders in self._holders]
        used = [number for number, num_keys in enumerate(self._num_keys) if num_keys]
        self._dead = {number for number in used if not self._holders[number]}
        self._numbers = {self._holders[number]: number for number in used} | {0: 0}


class _Numbers(dict[int, int]):
    """The numbers of keys after a change, by those before; computed once each."""

    def __init__(self, compute: Callable[[int], int]) -> None:
        self._compute = compute

    def __missing__(self, before: int) -> int:
        self[before] = number = self._compute(before)
        return number
