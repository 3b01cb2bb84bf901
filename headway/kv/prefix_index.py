"""Prefix keys, and an index from key to block.

A key names all tokens up to the end of a full block: it is a hash of the block's tokens and the
previous key, starting from the request's salt. The last key of a group of blocks is a hash of the
group's tokens and the last key of the group before, so that a router can compare whole groups. The
index is closed under prefixes: if it has a key, it has all keys before it, because blocks are freed
tail first and equal blocks are all registered. So the longest match is found by binary search.
Knows nothing of holders or free blocks.

A journal, off by default, records which keys became present and which vanished. A copy of the index
elsewhere, such as a router's, follows it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence

import numpy as np
from xxhash import xxh3_128_digest

from headway.request import Request

GROUP = 32  # blocks


def extend_keys(
    keys: list[bytes], request: Request, block_size: int, end: int | None = None
) -> None:
    """Append the missing keys of the first `end` full blocks of known tokens; of all if None."""
    tokens, num_keys = known_tokens(request), len(keys)
    num_full = len(tokens) // block_size if end is None else min(end, len(tokens) // block_size)
    first = num_keys // GROUP * GROUP
    root = b"" if first else root_key(request)
    parent = keys[-1] if keys else root
    blocks, place = pieces_of(tokens, block_size, num_keys, num_full), 0
    digest, append = xxh3_128_digest, keys.append
    if num_full - first >= GROUP:
        last = keys[first - 1] if first else root
        for group in pieces_of(tokens, GROUP * block_size, first // GROUP, num_full // GROUP):
            end = first + GROUP - 1 - num_keys
            for block in blocks[place:end]:
                parent = digest(parent + block)
                append(parent)
            parent = last = digest(last + group)
            append(parent)
            first, place = first + GROUP, end + 1
    for block in blocks[place:]:
        parent = digest(parent + block)
        append(parent)


def known_tokens(request: Request) -> array[int]:
    """Prompt and output; not a copy if there is no output yet."""
    return request.tokens if request.num_generated else request.prompt


def root_key(request: Request) -> bytes:
    """The parent of a request's first key."""
    return xxh3_128_digest(request.params.salt.encode())


def pieces_of(tokens: array[int], size: int, start: int, end: int) -> list[bytes]:
    """The pieces [start, end) of `size` tokens each."""
    pieces: list[bytes] = np.frombuffer(
        tokens[start * size : end * size], f"V{size * tokens.itemsize}"
    ).tolist()
    return pieces


class KeyJournal:
    """The difference between the keys of an index now and at the last drain.

    It starts as cleared, with all present keys added: the first drain is a complete copy. It never
    holds more keys than the index had at the last drain and has now.
    """

    def __init__(self, present: Iterable[bytes]) -> None:
        self._is_present = dict.fromkeys(present, True)  # only keys that have changed
        self._is_cleared = True

    @property
    def has_changes(self) -> bool:
        return self._is_cleared or bool(self._is_present)

    def record(self, key: bytes, is_present: bool) -> None:
        """A key became present or vanished; what undoes an earlier change removes both."""
        if self._is_present.pop(key, None) is None:
            self._is_present[key] = is_present

    def clear(self) -> None:
        """All keys vanished at once."""
        self._is_present.clear()
        self._is_cleared = True

    def drain(self) -> tuple[list[bytes], list[bytes], bool]:
        """Keys added, keys removed, and whether all earlier keys vanished before these changes."""
        changed, is_cleared = self._is_present, self._is_cleared
        self._is_present, self._is_cleared = {}, False
        added = [key for key, is_present in changed.items() if is_present]
        removed = [key for key, is_present in changed.items() if not is_present]
        return added, removed, is_cleared


class PrefixIndex:
    """Maps keys to blocks and back. Several blocks may have one key; any of them serves a match."""

    def __init__(self, num_blocks: int, journal: KeyJournal | None = None) -> None:
        self.journal = journal
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}

    def add(self, blocks: list[int], keys: list[bytes]) -> None:
        """Record the content of blocks; block tables never change when content is equal."""
        key_of, first_with, journal = self.key_of, self.block_of.setdefault, self.journal
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is None:
                key_of[block] = key
                if first_with(key, block) != block:
                    self._duplicates.setdefault(key, []).append(block)
                elif journal is not None:
                    journal.record(key, True)

    def forget(self, blocks: list[int]) -> None:
        """Remove blocks whose content is about to change; a duplicate takes over its key."""
        key_of, block_of, duplicates = self.key_of, self.block_of, self._duplicates
        journal = self.journal
        for block in blocks:
            key = key_of[block]
            key_of[block] = None
            if key is None:
                continue
            if duplicates and key in duplicates:
                self._forget_duplicate(key, block)
            else:
                del block_of[key]
                if journal is not None:
                    journal.record(key, False)

    def _forget_duplicate(self, key: bytes, block: int) -> None:
        duplicates = self._duplicates[key]
        if self.block_of[key] == block:
            self.block_of[key] = duplicates.pop()
        else:
            duplicates.remove(block)
        if not duplicates:
            del self._duplicates[key]

    def start_journal(self) -> KeyJournal:
        """Record changes from now on; a journal that was there is replaced."""
        self.journal = KeyJournal(self.block_of)
        return self.journal

    def match(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are present."""
        return num_leading(keys, self.block_of)


def num_leading(keys: Sequence[bytes], present: Container[bytes]) -> int:
    """The number of leading keys in a collection that is closed under prefixes."""
    if keys and keys[0] not in present:  # as for most prompts that share nothing
        return 0
    return bisect_left(keys, True, key=lambda key: key not in present)
