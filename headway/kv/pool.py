"""A pool of blocks with reference counts. The cost of a block is the same however many there are.

A block nobody holds is either blank or cached: cached ones keep their content, stay matchable, and
are taken only when no blank one is left, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from headway.kv.prefix_index import PrefixIndex


class BlockPool:
    """Blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.refs = [0] * num_blocks
        self._blank = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """Hand out blocks for new content; the caller has checked that there are enough."""
        num_blank = min(count, len(self._blank))
        taken = [self._blank.popleft() for _ in range(num_blank)]
        for _ in range(count - num_blank):
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
            taken.append(block)
        refs = self.refs
        for block in taken:
            refs[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more holder of blocks with known content, held by somebody or by nobody."""
        refs, cached = self.refs, self._cached
        for block in blocks:
            held = refs[block]
            if not held:
                del cached[block]
            refs[block] = held + 1

    def drop(self, block: int) -> None:
        """One holder fewer; the last one frees the block."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.index.key_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None
        assert self.refs[block] >= 0, f"block {block} was dropped more often than held"

    def forget_all(self) -> None:
        """Empty the cache: no content is known any more, whoever holds it."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self.index = PrefixIndex(self.num_blocks)
