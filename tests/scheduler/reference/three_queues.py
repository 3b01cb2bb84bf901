"""The blog's vLLM scheduler: waiting, running and swapped, served in the order of promises.

The texts leave two numbers open. Here no prompt is admitted while the last `WINDOW` steps had more
than `MAX_PREEMPTIONS`, and a swap is cheaper than computing again from `MIN_SWAP` tokens on.
"""

from __future__ import annotations

from collections import deque

from tests.scheduler.reference.blocks import PrefixBlocks, Sequence
from tests.scheduler.reference.listing import Batch, Limits, Listing

WINDOW = 32  # steps
MAX_PREEMPTIONS = 4
MIN_SWAP = 10


class StoredBlocks(PrefixBlocks):
    def needs_block(self, seq: Sequence) -> bool:
        """A sequence that was swapped in already has a block for its next token."""
        return len(seq.block_table) * self.block_size < len(seq)


class ThreeQueues(Listing):
    blocks_type = StoredBlocks

    def __init__(self, limits: Limits, is_chunked: bool = False, watermark: float = 0.01) -> None:
        super().__init__(limits)
        self.is_chunked = is_chunked
        self.watermark = watermark
        self.swapped: deque[Sequence] = deque()
        self.on_host: dict[str, int] = {}  # blocks of each swapped sequence
        self.recent = deque([0] * WINDOW, WINDOW)  # preemptions of the latest steps
        self.tokens_left = self.places_left = 0
        self.batch = Batch([], [])

    def schedule(self) -> Batch:
        self.batch = Batch([], [])
        self.tokens_left = self.limits.max_num_batched_tokens
        self.places_left = self.limits.max_num_seqs
        self.swap_in()
        self.decode()
        self.prefill()
        self.recent.append(len(self.preempted))
        return self.batch

    # Swapped sequences first

    def swap_in(self) -> None:
        for seq in list(self.swapped):
            if not self.can_swap_in() or not self.make_room(seq, self.num_kept_at_swap_in()):
                break
            self.restore(seq)

    def can_swap_in(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def num_kept_at_swap_in(self) -> int:
        return 0

    def restore(self, seq: Sequence) -> None:
        """Allocate and copy back; it decodes, or continues its prompt, where it stopped."""
        num_computed, prefill_end = seq.num_computed, seq.prefill_end
        self.swapped.remove(seq)
        self.allocate(seq)
        seq.num_computed, seq.prefill_end = num_computed, prefill_end
        del self.on_host[seq.id]
        self.running.append(seq)

    # Then one token for each running sequence

    def decode(self) -> None:
        for seq in [s for s in self.running if s.is_decoding]:
            if not self.tokens_left or not self.places_left:
                break
            while seq in self.running and not self.blocks.can_append(seq):
                self.preempt(self.running[-1])
            if seq in self.running:
                self.blocks.append(seq)
                self.use(1)
                self.batch.decode.append(seq)

    def use(self, num_tokens: int) -> None:
        self.tokens_left -= num_tokens
        self.places_left -= 1

    # Then prompts with the rest of the budget

    def prefill(self) -> None:
        for seq in [s for s in self.running if s.num_computed < s.prefill_end]:
            self.chunk(seq)
        while self.can_admit():
            seq = self.first_waiting()
            if self.length_to_fit(seq) > self.tokens_left and not self.is_chunked:
                break
            if not self.make_room(seq, self.num_kept_free()):
                break
            self.admit(seq)
            self.chunk(seq)

    def can_admit(self) -> bool:
        """No new prompts above a rate of preemptions, until memory is stable."""
        has_budget = self.tokens_left > 0 and self.places_left > 0
        return bool(self.waiting) and has_budget and sum(self.recent) <= MAX_PREEMPTIONS

    def first_waiting(self) -> Sequence:
        return self.waiting[0]

    def length_to_fit(self, seq: Sequence) -> int:
        """Find the longest cached prefix and prefill only the rest."""
        return len(seq) - self.blocks.num_cached(seq)

    def num_kept_free(self) -> int:
        return int(self.watermark * self.limits.num_blocks)

    def admit(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self.allocate(seq)
        self.running.append(seq)

    def chunk(self, seq: Sequence) -> None:
        num_tokens = min(len(seq) - seq.num_computed, self.tokens_left)
        if num_tokens and self.places_left:
            self.use(num_tokens)
            self.batch.prefill.append((seq, self.compute(seq, num_tokens)))

    # Preemption, newest first

    def make_room(self, seq: Sequence, num_kept_free: int) -> bool:
        """Preempt until the sequence can be allocated; False if it still cannot."""
        while self.blocks.num_free < self.num_to_allocate(seq) + num_kept_free:
            if not self.running:
                return False
            self.preempt(self.running[-1])
        return True

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.batch.prefill[:] = [(s, num) for s, num in self.batch.prefill if s is not seq]
        self.batch.decode[:] = [s for s in self.batch.decode if s is not seq]
        num_copied = self.num_to_copy(seq)
        if num_copied and num_copied <= self.limits.num_host_blocks - self.num_on_host():
            self.swap_out(seq, num_copied)
        else:
            super().preempt(seq)

    def num_to_copy(self, seq: Sequence) -> int:
        """Blocks to copy to the host; 0 if computing again is cheaper."""
        return -(-seq.num_computed // self.limits.block_size) if seq.num_computed >= MIN_SWAP else 0

    def num_on_host(self) -> int:
        return sum(self.on_host.values())

    def swap_out(self, seq: Sequence, num_copied: int) -> None:
        num_computed = seq.num_computed
        self.blocks.free(seq)
        seq.num_computed = num_computed
        self.on_host[seq.id] = num_copied
        self.swapped.append(seq)
        self.preempted.append((seq, "swap"))
