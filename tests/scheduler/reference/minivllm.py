"""miniVLLM: as nano-vLLM, but full lengths are charged and decodes have a token budget."""

from __future__ import annotations

from tests.scheduler.reference.blocks import Sequence
from tests.scheduler.reference.nano_vllm import NanoVLLM


class MiniVLLM(NanoVLLM):
    def prefill(self) -> list[tuple[Sequence, int]]:
        batch: list[tuple[Sequence, int]] = []
        num_batched = 0
        while self.waiting and self.has_place(len(batch)):
            seq = self.waiting[0]
            if not self.can_allocate(seq) or not self.fits_budget(seq, num_batched):
                break
            num_batched += len(seq)
            batch.append((seq, self.start(seq, num_batched)))
        return batch

    def decode(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.running:
            seq = self.running.popleft()
            if not self.can_append(seq, len(batch)):
                self.running.appendleft(seq)
                victim = self.running.pop()  # the tail, or itself
                self.preempt(victim)
                if victim is seq:
                    break
            elif not self.may_decode(len(batch)):
                self.running.appendleft(seq)
                break
            else:
                self.blocks.append(seq)
                batch.append(seq)
        self.running.extendleft(reversed(batch))
        return batch

    def can_append(self, seq: Sequence, num_in_batch: int) -> bool:
        return self.blocks.can_append(seq)

    def may_decode(self, num_in_batch: int) -> bool:
        """Whether the limits allow one more; a decode is one token and one sequence."""
        limits = self.limits
        return num_in_batch < min(limits.max_num_batched_tokens, limits.max_num_seqs)

    def is_finished(self, seq: Sequence) -> bool:
        if super().is_finished(seq):
            return True
        return seq.max_model_length is not None and len(seq) >= seq.max_model_length
