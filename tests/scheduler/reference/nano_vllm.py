"""nano-vLLM as first documented: batches are all prefill or all decode, prefill first."""

from __future__ import annotations

from tests.scheduler.reference.blocks import Sequence
from tests.scheduler.reference.listing import Batch, Listing


class NanoVLLM(Listing):
    def schedule(self) -> Batch:
        prefill = self.prefill()
        return Batch(prefill, [] if prefill else self.decode())

    def prefill(self) -> list[tuple[Sequence, int]]:
        batch: list[tuple[Sequence, int]] = []
        num_batched = 0
        while self.waiting and self.has_place(len(batch)):
            seq = self.waiting[0]
            if not self.fits_budget(seq, num_batched) or not self.can_allocate(seq):
                break
            num_tokens = self.start(seq, num_batched)
            num_batched += num_tokens
            batch.append((seq, num_tokens))
        return batch

    def has_place(self, num_in_batch: int) -> bool:
        return num_in_batch < self.limits.max_num_seqs

    def fits_budget(self, seq: Sequence, num_batched: int) -> bool:
        return num_batched + self.length_to_fit(seq) <= self.limits.max_num_batched_tokens

    def start(self, seq: Sequence, num_batched: int) -> int:
        """Allocate and move to running; only the uncached length is charged."""
        self.allocate(seq)
        self.running.append(self.waiting.popleft())
        return self.compute(seq, len(seq) - seq.num_computed)

    def decode(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.running and len(batch) < self.limits.max_num_seqs:
            seq = self.running.popleft()
            while not self.blocks.can_append(seq):
                victim = self.take_last(seq)
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                self.blocks.append(seq)
                batch.append(seq)
        self.running.extendleft(reversed(batch))
        return batch

    def take_last(self, seq: Sequence) -> Sequence:
        """The last of running; if none is left, the sequence itself."""
        return self.running.pop() if self.running else seq
