"""The prefix cache of Headway, in place of the block manager of the listings."""

from __future__ import annotations

from tests.scheduler.reference.blocks import PrefixBlocks, Sequence


class HeadwayBlocks(PrefixBlocks):
    """Blank blocks are reused before cached ones, and all blocks of equal content are known.

    A block is published when the prompt tokens in it are computed, or when its sequence frees it.
    Decodes get their blocks when all of them are chosen, so after all preemptions.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.equal: dict[int, list[int]] = {}  # blocks by content; the first one is found
        self.promised: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return len(self.free_ids) - len(self.promised)

    def hits(self, seq: Sequence) -> list[int]:
        self.take_promised()  # prompts come after decodes, so they find what the decodes left
        found = []
        for key in self.hashes(seq):
            if key not in self.equal:
                break
            found.append(self.equal[key][0])
        return found

    def allocate(self, seq: Sequence) -> None:
        self.hold(seq)

    def append(self, seq: Sequence) -> None:
        if self.needs_block(seq):
            self.promised.append(seq)

    def take_promised(self) -> None:
        promised, self.promised = self.promised, []
        for seq in promised:
            seq.block_table.append(self.take())

    def publish_computed(self, seq: Sequence, start: int = 0) -> None:
        """Publish the full blocks of computed tokens, from token `start` on."""
        first, end = start // self.block_size, seq.num_computed // self.block_size
        keys = self.hashes(seq)
        for place in range(first, end):
            self.publish(seq.block_table[place], keys[place])

    def publish(self, block: int, key: int) -> None:
        if block not in self.hash_of:
            self.hash_of[block] = key
            self.equal.setdefault(key, []).append(block)

    def free(self, seq: Sequence) -> None:
        self.publish_computed(seq)
        super().free(seq)

    def take(self) -> int:
        block = self.free_ids.popleft()
        key = self.hash_of.pop(block, None)
        if key is not None:
            self.forget(block, key)
        self.ref_count[block] = 1
        return block

    def forget(self, block: int, key: int) -> None:
        """The latest block of equal content takes the place of the one that is found."""
        equal = self.equal[key]
        if equal[0] == block and len(equal) > 1:
            equal[0] = equal.pop()
        else:
            equal.remove(block)
        if not equal:
            del self.equal[key]

    def release(self, block: int) -> None:
        self.ref_count[block] -= 1
        if self.ref_count[block]:
            return
        if block in self.hash_of:
            self.free_ids.append(block)
        else:
            self.free_ids.appendleft(block)
