"""How deep_dive and vllm differ from their listings; see differences.py."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from tests.scheduler.reference.blocks import PrefixBlocks, Sequence
from tests.scheduler.reference.course import Course, CourseText
from tests.scheduler.reference.differences import CacheContent, EveryBlockSize, FullHit, UsedHits
from tests.scheduler.reference.headway_blocks import HeadwayBlocks
from tests.scheduler.reference.listing import Batch, Limits
from tests.scheduler.reference.three_queues import MIN_SWAP, StoredBlocks, ThreeQueues

MAX_DISCARDS = 8

# Of the course


class PrefixCache(FullHit, UsedHits, CacheContent, Course):
    """The listing has no prefix cache."""


class KeepsOutput(Course):
    """Generated tokens are kept; they are computed again together with the prompt."""

    def discard_output(self, seq: Sequence) -> None:
        pass


class EightDiscards(Course):
    """After eight preemptions a sequence keeps its output, so that every sequence ends."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.num_preemptions: Counter[str] = Counter()

    def discard_output(self, seq: Sequence) -> None:
        self.num_preemptions[seq.id] += 1
        if self.num_preemptions[seq.id] <= MAX_DISCARDS:
            super().discard_output(seq)


class NewestIsPreempted(Course):
    """The sequence admitted last is preempted, as in the text, not the one that found no block."""

    get_slot = CourseText.get_slot


class StepLimits(Course):
    """max_num_seqs, and a token budget; a prompt that exceeds it is cut and continues later."""

    tokens_left = 0

    def give_slots(self) -> list[Sequence]:
        batch = super().give_slots()
        self.tokens_left = self.limits.max_num_batched_tokens - len(batch)
        return batch

    def promote(self) -> list[tuple[Sequence, int]]:
        begun = [seq for seq in self.running if seq.num_computed < seq.prefill_end]
        parts = [(seq, self.compute(seq, len(seq) - seq.num_computed)) for seq in begun]
        return [(seq, num) for seq, num in parts if num] + super().promote()

    def can_promote(self, seq: Sequence) -> bool:
        if not self.tokens_left or len(self.running) >= self.limits.max_num_seqs:
            return False
        return super().can_promote(seq)

    def compute(self, seq: Sequence, num_tokens: int) -> int:
        num_tokens = min(num_tokens, self.tokens_left)
        self.tokens_left -= num_tokens
        return super().compute(seq, num_tokens)


class NoAdmissionAfterPreemption(Course):
    """A step that preempted promotes nothing, so the victim does not return at once."""

    def can_promote(self, seq: Sequence) -> bool:
        return not self.preempted and super().can_promote(seq)


class WholeBlocksReserved(CourseText):
    """The output left is reserved in whole blocks; a sequence is promoted if none runs."""

    def can_promote(self, seq: Sequence) -> bool:
        if not self.running:
            return Course.can_promote(self, seq)
        batch, size = [*self.running, seq], self.blocks.block_size
        num_reserved = sum(-(-self.num_left(s) // size) for s in batch)
        return self.num_to_allocate(seq) + num_reserved <= self.blocks.num_free

    def num_left(self, seq: Sequence) -> int:
        """Tokens to store beyond the known ones; the last one sampled is never stored."""
        return seq.num_prompt + seq.max_tokens - 1 - len(seq)


# Of the blog


class WaitsForRoom(ThreeQueues):
    """A swap-in or a prompt preempts nothing; only decodes preempt."""

    def make_room(self, seq: Sequence, num_kept_free: int) -> bool:
        return self.blocks.num_free >= self.num_to_allocate(seq) + num_kept_free


class ArrivalOrder(ThreeQueues):
    """Swapped and waiting sequences return by arrival, and none passes one that does not fit."""

    def swap_in(self) -> None:
        self.swapped = deque(sorted(self.swapped, key=lambda seq: seq.arrival))
        super().swap_in()

    def can_admit(self) -> bool:
        waiting, self.waiting = self.waiting, self.waiting + self.swapped
        can_admit = super().can_admit()
        self.waiting = waiting
        return can_admit and len(self.running) < self.limits.max_num_seqs

    def first_waiting(self) -> Sequence:
        return min(self.waiting + self.swapped, key=lambda seq: seq.arrival)

    def length_to_fit(self, seq: Sequence) -> int:
        return len(seq) - seq.num_computed if seq in self.swapped else super().length_to_fit(seq)

    def admit(self, seq: Sequence) -> None:
        if seq in self.swapped:
            self.restore(seq)
        else:
            super().admit(seq)


class RoomForDecodes(ThreeQueues):
    """A swap-in leaves the decodes their tokens and blocks, and has its own token in the batch."""

    num_due = 0

    def swap_in(self) -> None:
        decoding = [seq for seq in self.running if seq.is_decoding]
        num_tokens = min(len(decoding), self.tokens_left)
        self.num_due = sum(self.blocks.needs_block(seq) for seq in decoding)
        self.tokens_left -= num_tokens
        super().swap_in()
        self.tokens_left += num_tokens

    def can_swap_in(self) -> bool:
        return self.tokens_left > 0 and super().can_swap_in()

    def num_kept_at_swap_in(self) -> int:
        return super().num_kept_at_swap_in() + self.num_due

    def restore(self, seq: Sequence) -> None:
        super().restore(seq)
        self.chunk(seq)

    def chunk(self, seq: Sequence) -> None:
        if all(seq is not planned for planned, _ in self.batch.prefill):
            super().chunk(seq)


class OneWatermark(ThreeQueues):
    """The watermark is for swap-ins too, and for nothing while nothing runs."""

    def num_kept_at_swap_in(self) -> int:
        return super().num_kept_at_swap_in() + self.num_kept_free()

    def num_kept_free(self) -> int:
        return super().num_kept_free() if self.running else 0


class BackOff(ThreeQueues):
    """Recent preemptions raise the watermark; they do not stop admissions altogether."""

    pressure = 0.0

    def schedule(self) -> Batch:
        self.recent.clear()
        batch = super().schedule()
        self.pressure *= 0.97
        return batch

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        self.pressure += 1

    def num_kept_free(self) -> int:
        more = int(self.watermark * self.limits.num_blocks * self.pressure)
        return super().num_kept_free() + more


class NoPromptAfterPreemption(ThreeQueues):
    """A step that preempted admits no prompt."""

    def can_admit(self) -> bool:
        return not self.preempted and super().can_admit()


class PrivateBlocksCopied(ThreeQueues):
    """Leading blocks that other sequences hold are not copied, and cost nothing to compute.

    Host blocks become free at the end of the step that copies them back.
    """

    num_leaving_host = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.first_copied: dict[str, int] = {}

    def schedule(self) -> Batch:
        self.num_leaving_host = 0
        return super().schedule()

    def num_to_copy(self, seq: Sequence) -> int:
        assert isinstance(self.blocks, PrefixBlocks)
        size, held = self.limits.block_size, [self.blocks.ref_count[b] for b in seq.block_table]
        if min(held.count(1) * size, seq.num_computed) < MIN_SWAP:
            return 0
        num_used = -(-seq.num_computed // size)
        num_shared = next((place for place, num in enumerate(held) if num == 1), len(held))
        self.first_copied[seq.id] = num_shared
        return max(0, num_used - num_shared)

    def num_on_host(self) -> int:
        return super().num_on_host() + self.num_leaving_host

    def restore(self, seq: Sequence) -> None:
        num_hit = self.blocks.num_cached(seq)
        if num_hit < self.first_copied[seq.id] * self.limits.block_size:  # a gap: of no use
            seq.num_computed = 0
        seq.num_computed = min(max(seq.num_computed, num_hit), len(seq) - 1)
        self.num_leaving_host += self.on_host[seq.id]
        super().restore(seq)


class StoredHeadwayBlocks(HeadwayBlocks):
    needs_block = StoredBlocks.needs_block


class ThreeQueuesCacheContent(CacheContent, ThreeQueues):
    """As for the other listings."""

    blocks_type = StoredHeadwayBlocks

    def restore(self, seq: Sequence) -> None:
        super().restore(seq)
        assert isinstance(self.blocks, PrefixBlocks)
        self.blocks.publish_computed(seq)


DEEP_DIVE_LISTING: dict[str, type] = {
    "step limits": StepLimits, "newest preempted": NewestIsPreempted,
    "no admission after preemption": NoAdmissionAfterPreemption,
    "prefix cache": PrefixCache, "block size 1": EveryBlockSize,
}  # fmt: skip
DEEP_DIVE_LISTING_KEPT: dict[str, type] = {**DEEP_DIVE_LISTING, "output kept": KeepsOutput}
DEEP_DIVE_LISTING["eight discards"] = EightDiscards
DEEP_DIVE_TEXT: dict[str, type] = {
    "step limits": StepLimits, "whole blocks reserved": WholeBlocksReserved,
    "prefix cache": PrefixCache, "block size 1": EveryBlockSize,
}  # fmt: skip
VLLM: dict[str, type] = {
    "waits for room": WaitsForRoom, "room for decodes": RoomForDecodes,
    "one watermark": OneWatermark, "back-off": BackOff, "arrival order": ArrivalOrder,
    "no admission after preemption": NoPromptAfterPreemption,
    "cache content": ThreeQueuesCacheContent, "private blocks": PrivateBlocksCopied,
    "full hit": FullHit, "shared blocks": UsedHits,
}  # fmt: skip
