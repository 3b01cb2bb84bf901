"""The prefix cache of Headway in parts: each class changes one rule of the listings' block manager."""

from __future__ import annotations

from tests.scheduler.reference.blocks import PrefixBlocks, Sequence


class BlankBlocksFirst(PrefixBlocks):
    """Blocks without content are reused before cached ones."""

    def release(self, block: int) -> None:
        super().release(block)
        if not self.ref_count[block] and block not in self.hash_of:
            self.free_ids.appendleft(self.free_ids.pop())


class EqualBlocksKept(PrefixBlocks):
    """All blocks of equal content are known, and the first one is found."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.equal: dict[int, list[int]] = {}  # blocks by content

    def find(self, key: int) -> int | None:
        return self.equal[key][0] if key in self.equal else None

    def publish(self, block: int, key: int) -> None:
        self.equal.setdefault(key, []).append(block)

    def forget(self, block: int, key: int) -> None:
        """The latest block of equal content takes the place of the one that is found."""
        equal = self.equal[key]
        if equal[0] == block and len(equal) > 1:
            equal[0] = equal.pop()
        else:
            equal.remove(block)
        if not equal:
            del self.equal[key]


class OutputPublishedAtEnd(PrefixBlocks):
    """Blocks that decodes fill are published when their sequence frees them."""

    def publish_decoded(self, seq: Sequence) -> None:
        pass

    def free(self, seq: Sequence) -> None:
        self.publish_computed(seq)
        super().free(seq)


class BlocksAfterPreemptions(PrefixBlocks):
    """Decodes get their blocks when all of them are chosen, so after all preemptions."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.promised: list[Sequence] = []

    @property
    def num_free(self) -> int:
        return len(self.free_ids) - len(self.promised)

    def hits(self, seq: Sequence) -> list[int]:
        self.take_promised()  # prompts come after decodes, so they find what the decodes left
        return super().hits(seq)

    def append(self, seq: Sequence) -> None:
        if self.needs_block(seq):
            self.promised.append(seq)

    def take_promised(self) -> None:
        promised, self.promised = self.promised, []
        for seq in promised:
            seq.block_table.append(self.take())


class HeadwayBlocks(
    BlankBlocksFirst, EqualBlocksKept, OutputPublishedAtEnd, BlocksAfterPreemptions
):
    """All of these; a block of a prompt is published when the tokens in it are computed."""

    def allocate(self, seq: Sequence) -> None:
        self.hold(seq)
