"""Prefix keys, and an index from key to block.

A key names all tokens up to the end of a full block: it is a hash of the block's tokens and the
previous key, starting from the request's salt. The index is closed under prefixes: if it has a key,
it has all keys before it, because blocks are freed tail first and equal blocks are all registered.
So the longest match is found by binary search. Knows nothing of holders or free blocks.
"""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_128_digest

from headway.request import Request


def extend_keys(keys: list[bytes], request: Request, block_size: int) -> None:
    """Append the missing keys of all full blocks of known tokens."""
    tokens = request.tokens if request.num_generated else request.prompt
    full = tokens[len(keys) * block_size : len(tokens) // block_size * block_size]
    blocks: list[bytes] = np.frombuffer(full, f"V{block_size * full.itemsize}").tolist()
    parent = keys[-1] if keys else xxh3_128_digest(request.params.salt.encode())
    digest, append = xxh3_128_digest, keys.append
    for block in blocks:
        parent = digest(parent + block)
        append(parent)


class PrefixIndex:
    """Maps keys to blocks and back. Several blocks may have one key; any of them serves a match."""

    def __init__(self, num_blocks: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self._duplicates: dict[bytes, list[int]] = {}

    def add(self, blocks: list[int], keys: list[bytes]) -> None:
        """Record the content of blocks; block tables never change when content is equal."""
        key_of, first_with = self.key_of, self.block_of.setdefault
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is None:
                key_of[block] = key
                if first_with(key, block) != block:
                    self._duplicates.setdefault(key, []).append(block)

    def forget(self, blocks: list[int]) -> None:
        """Remove blocks whose content is about to change; a duplicate takes over its key."""
        key_of, block_of, duplicates = self.key_of, self.block_of, self._duplicates
        for block in blocks:
            key = key_of[block]
            key_of[block] = None
            if key is None:
                continue
            if duplicates and key in duplicates:
                self._forget_duplicate(key, block)
            else:
                del block_of[key]

    def _forget_duplicate(self, key: bytes, block: int) -> None:
        duplicates = self._duplicates[key]
        if self.block_of[key] == block:
            self.block_of[key] = duplicates.pop()
        else:
            duplicates.remove(block)
        if not duplicates:
            del self._duplicates[key]

    def match(self, keys: list[bytes]) -> int:
        """The number of leading keys that are present."""
        low, high, block_of = 0, len(keys), self.block_of
        if high and keys[0] not in block_of:  # as for most prompts that share nothing
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in block_of:
                low = middle
            else:
                high = middle - 1
        return low
