"""How presets differ from the listings they are named after: one class for each difference.

A class changes a listing in one respect. Any of them can be combined with `build`; with all
of its differences a listing makes the same batches as the preset, step by step. docs/policies.md
lists them under the same names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.scheduler.reference.blocks import PrefixBlocks, Sequence
from tests.scheduler.reference.headway_blocks import BlocksAfterPreemptions, HeadwayBlocks
from tests.scheduler.reference.listing import Batch, Listing
from tests.scheduler.reference.minivllm import MiniVLLM
from tests.scheduler.reference.nano_vllm import NanoVLLM

MAX_PREFILL_STEPS = 16


@cache
def build(listing: type[Listing], differences: tuple[type, ...]) -> Any:
    """The listing with these differences, of which some change its blocks."""
    changes = tuple(
        vars(each)["blocks_change"] for each in differences if "blocks_change" in vars(each)
    )
    namespace = {}
    if changes:
        namespace["blocks_type"] = type("ChangedBlocks", (*changes, listing.blocks_type), {})
    return type(f"Changed{listing.__name__}", (*differences, listing), namespace)


# Of every listing


class EveryBlockSize(Listing):
    """With blocks of one token, every decode needs a block; `len % 1 == 1` is never true."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.blocks.remainder = 1 % self.limits.block_size


class StoppedFirst(Listing):
    """Of sequences that end together, stopped ones free their blocks first."""

    def order_of_ends(self, finished: list[Sequence], batch: Batch) -> list[Sequence]:
        """Stopped prompts, stopped decodes, then decodes and prompts that reach their length."""
        prompts = {seq.id for seq, _ in batch.prefill}

        def order(seq: Sequence) -> tuple[bool, bool]:
            is_stopped = seq.token_ids[-1] == self.limits.eos and not seq.ignore_eos
            return not is_stopped, (seq.id in prompts) != is_stopped

        return sorted(finished, key=order)


class PreemptionsFirst(Listing):
    """Decodes get their blocks after all preemptions of the step."""

    blocks_change = BlocksAfterPreemptions

    def schedule(self) -> Batch:
        batch = super().schedule()
        assert isinstance(self.blocks, BlocksAfterPreemptions)
        self.blocks.take_promised()
        return batch


class PublishedWhenPlanned(Listing):
    """The blocks of a prompt can be found by later prompts of the same step."""

    def compute(self, seq: Sequence, num_tokens: int) -> int:
        start = seq.num_computed
        super().compute(seq, num_tokens)
        assert isinstance(self.blocks, PrefixBlocks)
        self.blocks.publish_computed(seq, start)
        return num_tokens


class CacheContent(StoppedFirst, PreemptionsFirst, PublishedWhenPlanned):
    """All of these, and HeadwayBlocks."""

    blocks_type = HeadwayBlocks


class UsedHits(Listing):
    """Cached blocks that another sequence holds need no free block."""

    def num_to_allocate(self, seq: Sequence) -> int:
        return super().num_to_allocate(seq) - self.blocks.num_shared(seq)


class FullHit(Listing):
    """A completely cached prompt computes its last token, from which the next is sampled."""

    def length_to_fit(self, seq: Sequence) -> int:
        return max(1, super().length_to_fit(seq))

    def allocate(self, seq: Sequence) -> None:
        super().allocate(seq)
        seq.num_computed = min(seq.num_computed, len(seq) - 1)


# Of nano-vLLM and miniVLLM


class RunningLimit(NanoVLLM):
    """max_num_seqs limits the running sequences, not only a batch."""

    def has_place(self, num_in_batch: int) -> bool:
        has_started = bool(self.waiting[0].block_table)
        return has_started or len(self.running) < self.limits.max_num_seqs


class PrefillStreak(NanoVLLM):
    """Decodes get a step after 16 prompt steps."""

    streak = 0

    def schedule(self) -> Batch:
        batch = super().schedule()
        self.streak = self.streak + 1 if batch.prefill else 0
        return batch

    def prefill(self) -> list[tuple[Sequence, int]]:
        if self.running and self.streak >= MAX_PREFILL_STEPS:
            return []
        return super().prefill()


class SplitFirst(NanoVLLM):
    """The first prompt of a batch may be cut; it stays in front of waiting, with its blocks."""

    def fits_budget(self, seq: Sequence, num_batched: int) -> bool:
        return not num_batched or super().fits_budget(seq, num_batched)

    def length_to_fit(self, seq: Sequence) -> int:
        return len(seq) - seq.num_computed if seq.block_table else super().length_to_fit(seq)

    def can_allocate(self, seq: Sequence) -> bool:
        return bool(seq.block_table) or super().can_allocate(seq)

    def start(self, seq: Sequence, num_batched: int) -> int:
        if not seq.block_table:
            self.allocate(seq)
        num_left = self.limits.max_num_batched_tokens - num_batched
        num_tokens = self.compute(seq, min(len(seq) - seq.num_computed, num_left))
        if seq.num_computed == len(seq):
            self.running.append(self.waiting.popleft())
        return num_tokens

    def take_last(self, seq: Sequence) -> Sequence:
        if self.waiting and self.waiting[0].block_table:  # admitted last
            return self.waiting.popleft()
        return super().take_last(seq)


class UncachedLength(NanoVLLM):
    """Only the uncached length must fit into the token budget."""

    def length_to_fit(self, seq: Sequence) -> int:
        return len(seq) - self.blocks.num_cached(seq)


class NoPreemptionWithoutBudget(MiniVLLM):
    """A decode that waits for the next step because the budget is used up preempts nothing."""

    def can_append(self, seq: Sequence, num_in_batch: int) -> bool:
        return not self.may_decode(num_in_batch) or super().can_append(seq, num_in_batch)


SHARED: dict[str, type] = {
    "block size 1": EveryBlockSize, "full hit": FullHit, "shared blocks": UsedHits,
    "cache content": CacheContent,
}  # fmt: skip
# The first class is the outermost: it may change what the later ones do.
NANO_VLLM: dict[str, type] = {
    "first prompt cut": SplitFirst, **SHARED, "uncached length": UncachedLength,
    "running limit": RunningLimit, "prefill streak": PrefillStreak,
}  # fmt: skip
MINIVLLM: dict[str, type] = {
    **SHARED, "running limit": RunningLimit, "prefill streak": PrefillStreak,
    "budget before blocks": NoPreemptionWithoutBudget,
}  # fmt: skip
