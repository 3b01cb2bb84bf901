"""Which block holds which content: keys of prefixes, and an index from key to block.

A key names everything up to the end of a full block: it is a hash over the block's tokens and the
key before it, starting from the request's salt. Knows nothing of who uses a block or which are
free. The index is closed under prefixes: if a key is there, so are the keys before it (blocks are
given up tail first, and equal blocks are all registered), so the longest match is a binary search.
"""

from __future__ import annotations

from struct import iter_unpack

from xxhash import xxh3_128_digest

from headway.request import Request


def extend_keys(keys: list[bytes], request: Request, block_size: int) -> None:
    """Append the keys of all full blocks of known tokens that `keys` does not have yet."""
    tokens = request.tokens if request.num_generated else request.prompt
    data = tokens[len(keys) * block_size : len(tokens) // block_size * block_size].tobytes()
    parent = keys[-1] if keys else xxh3_128_digest(request.params.salt.encode())
    digest, append = xxh3_128_digest, keys.append
    for (block,) in iter_unpack(f"{block_size * tokens.itemsize}s", data):
        parent = digest(parent + block)
        append(parent)


class PrefixIndex:
    """Key to block and back. Equal blocks are kept as twins: any of them can serve a match."""

    def __init__(self, num_blocks: int) -> None:
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}

    def add(self, blocks: list[int], keys: list[bytes]) -> None:
        """Record what blocks hold; nobody's block table changes when another holds the same."""
        key_of, first_with = self.key_of, self.block_of.setdefault
        for block, key in zip(blocks, keys, strict=True):
            if key_of[block] is None:
                key_of[block] = key
                if first_with(key, block) != block:
                    self._twins.setdefault(key, []).append(block)

    def forget(self, block: int) -> None:
        """The block is about to hold something else; a twin takes over its key."""
        key = self.key_of[block]
        if key is None:
            return
        self.key_of[block] = None
        twins = self._twins.get(key)
        if twins is None:
            del self.block_of[key]
            return
        if self.block_of[key] == block:
            self.block_of[key] = twins.pop()
        else:
            twins.remove(block)
        if not twins:
            del self._twins[key]

    def match(self, keys: list[bytes]) -> int:
        """How many leading keys are present."""
        low, high, block_of = 0, len(keys), self.block_of
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in block_of:
                low = middle
            else:
                high = middle - 1
        return low
