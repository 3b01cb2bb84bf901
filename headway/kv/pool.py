"""A pool of KV blocks with reference counts; every operation takes constant time per block.

A block without holders is blank or cached. Cached blocks keep their content and can be matched.
They are handed out only when no blank block is left, least recently used first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headway.kv.prefix_index import PrefixIndex


class BlockPool:
    """Blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self.refs = [0] * num_blocks
        self._blank = deque(range(num_blocks))
        # Cached blocks, least recently used first. A block that is held again leaves a stale entry,
        # which is skipped when its turn comes: much faster than to remove it.
        self._cached: deque[int] = deque()
        self._num_stale = [0] * num_blocks  # entries of each block to skip
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + self._num_cached

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks for new content; the caller has checked that they are free."""
        next_blank, refs, num_blank = self._blank.popleft, self.refs, len(self._blank)
        taken = [next_blank() for _ in range(min(count, num_blank))] if num_blank else []
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            refs[block] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        """The `count` cached blocks that were used least recently, without their content."""
        next_cached, num_stale = self._cached.popleft, self._num_stale
        if len(self._cached) == self._num_cached:  # no entry is stale
            evicted = [next_cached() for _ in range(count)]
        else:
            evicted = []
        while len(evicted) < count:
            block = next_cached()
            if num_stale[block]:
                num_stale[block] -= 1
            else:
                evicted.append(block)
        self._num_cached -= count
        self.index.forget(evicted)
        return evicted

    def share(self, blocks: list[int]) -> None:
        """Add a holder to blocks with known content, whether held or cached."""
        refs = self.refs
        for block in blocks:
            if not refs[block]:
                self._num_cached -= 1
                self._num_stale[block] += 1
            refs[block] += 1
        if len(self._cached) > self._num_cached + self.num_blocks:
            self._cached = deque(self._without_stale())

    def _without_stale(self) -> list[int]:
        """The cached blocks in their order; no entry is stale any more."""
        num_stale, live = self._num_stale, []
        for block in self._cached:
            if num_stale[block]:
                num_stale[block] -= 1
            else:
                live.append(block)
        return live

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block, in this order; the last one frees the block."""
        refs, key_of, cached = self.refs, self.index.key_of, self._cached
        num_before = len(cached)
        for block in blocks:
            num_holders = refs[block]
            if num_holders == 1:
                refs[block] = 0
                if key_of[block] is None:
                    self._blank.append(block)
                else:
                    cached.append(block)
            else:
                assert num_holders, f"block {block} was dropped more often than held"
                refs[block] = num_holders - 1
        self._num_cached += len(cached) - num_before

    def forget_all(self) -> None:
        """Empty the cache: the content of all blocks becomes unknown, held ones included."""
        self._blank.extend(self._without_stale())
        self._cached.clear()
        self._num_cached = 0
        journal = self.index.journal
        if journal is not None:
            journal.clear()
        self.index = PrefixIndex(self.num_blocks, journal)
