"""The later version of nano-vLLM, which the preset follows, and how the preset differs from it.

As first documented, with three changes that the preset has too: the first prompt of a batch may be
cut, only the uncached length is charged, and hits that are held need no free block. Blocks are
published when the step that computes them is over, outputs included. The last block of a prompt is
never looked up, so that there is a token to compute.
"""

from __future__ import annotations

from tests.scheduler.reference import differences
from tests.scheduler.reference.blocks import Blocks, PrefixBlocks, Sequence
from tests.scheduler.reference.headway_blocks import (
    BlankBlocksFirst,
    BlocksAfterPreemptions,
    EqualBlocksKept,
    OutputPublishedAtEnd,
)
from tests.scheduler.reference.listing import Batch, Listing
from tests.scheduler.reference.nano_vllm import NanoVLLM


class LaterBlocks(PrefixBlocks):
    def hits(self, seq: Sequence) -> list[int]:
        return super().hits(seq)[: self.num_looked_up(seq)]

    def num_looked_up(self, seq: Sequence) -> int:
        return self.num_needed(seq) - 1

    def allocate(self, seq: Sequence) -> None:
        self.hold(seq)

    def append(self, seq: Sequence) -> None:
        Blocks.append(self, seq)

    def publish_decoded(self, seq: Sequence) -> None:
        """Publish the block that the latest token fills."""
        self.publish_computed(seq, seq.num_computed - 1)


class LaterNanoVLLM(
    differences.SplitFirst, differences.UncachedLength, differences.UsedHits, NanoVLLM
):
    blocks_type = LaterBlocks

    def postprocess(self, batch: Batch, tokens: dict[str, int]) -> list[Sequence]:
        assert isinstance(self.blocks, LaterBlocks)
        for seq, num_tokens in batch.prefill:
            self.blocks.publish_computed(seq, seq.num_computed - num_tokens)
        for seq in batch.decode:
            self.blocks.publish_decoded(seq)
        return super().postprocess(batch, tokens)


# Differences


class AllBlocksLookedUp(LaterBlocks):
    def num_looked_up(self, seq: Sequence) -> int:
        return self.num_needed(seq)


class LastBlockHit(differences.FullHit):
    """A prompt whose last block is cached too computes its last token only."""

    blocks_change = AllBlocksLookedUp


class BlankAfterPreemptions(BlankBlocksFirst, BlocksAfterPreemptions):
    pass


class BlankFirst(differences.PreemptionsFirst):
    """Blank blocks are reused before cached ones, those of the step's victims included."""

    blocks_change = BlankAfterPreemptions


class EqualKept(Listing):
    blocks_change = EqualBlocksKept


class OutputAtEnd(Listing):
    blocks_change = OutputPublishedAtEnd


LATER_NANO_VLLM: dict[str, type] = {
    "running limit": differences.RunningLimit, "prefill streak": differences.PrefillStreak,
    "block size 1": differences.EveryBlockSize,
    "last block": LastBlockHit, "same step": differences.PublishedWhenPlanned, "blank blocks": BlankFirst,
    "equal blocks": EqualKept, "output blocks": OutputAtEnd, "order of ends": differences.StoppedFirst,
}  # fmt: skip
