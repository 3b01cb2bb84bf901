"""A pool of KV blocks with reference counts; every operation takes constant time per block.

A block without holders is blank or cached. Cached blocks keep their content and can be matched.
They are handed out only when no blank block is left, least recently used first.
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
        """Hand out `count` blocks for new content; the caller has checked that they are free."""
        num_blank = min(count, len(self._blank))
        taken = [self._blank.popleft() for _ in range(num_blank)]
        for _ in range(count - num_blank):
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
            taken.append(block)
        for block in taken:
            self.refs[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add a holder to blocks with known content, whether held or cached."""
        refs, cached = self.refs, self._cached
        for block in blocks:
            if not refs[block]:
                del cached[block]
            refs[block] += 1

    def drop(self, block: int) -> None:
        """Remove a holder; the last one frees the block."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.index.key_of[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None
        assert self.refs[block] >= 0, f"block {block} was dropped more often than held"

    def forget_all(self) -> None:
        """Empty the cache: the content of all blocks becomes unknown, held ones included."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self.index = PrefixIndex(self.num_blocks)
