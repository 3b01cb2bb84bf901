"""The course's scheduler: five actions per step, one batch of prompts and decodes.

The listing has no token budget, no limit of running sequences and no prefix cache. Where listing
and text disagree, `Course` is the listing and `CourseText` the text: it preempts the sequence that
was admitted last, and admits conservatively.
"""

from __future__ import annotations

from tests.scheduler.reference.blocks import Blocks, Sequence
from tests.scheduler.reference.listing import Batch, Limits, Listing


class Course(Listing):
    blocks_type = Blocks

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.finished: list[Sequence] = []

    def schedule(self) -> Batch:
        self.free_finished()
        decode = self.give_slots()
        prefill = self.promote()
        return Batch(prefill, decode)

    def free_finished(self) -> None:
        for seq in self.finished:
            self.running.remove(seq)
            self.blocks.free(seq)
        self.finished = []

    def give_slots(self) -> list[Sequence]:
        batch: list[Sequence] = []
        for seq in [s for s in self.running if s.is_decoding]:
            if seq in self.running and self.get_slot(seq):
                batch.append(seq)
        return batch

    def get_slot(self, seq: Sequence) -> bool:
        """A slot for the next token, or preempt the sequence that needs it."""
        if not self.blocks.can_append(seq):
            self.preempt(seq)
            return False
        self.blocks.append(seq)
        return True

    def promote(self) -> list[tuple[Sequence, int]]:
        batch = []
        while self.waiting and self.can_promote(self.waiting[0]):
            seq = self.waiting.popleft()
            self.allocate(seq)
            self.running.append(seq)
            batch.append((seq, self.compute(seq, len(seq) - seq.num_computed)))
        return batch

    def can_promote(self, seq: Sequence) -> bool:
        return self.can_allocate(seq)

    def preempt(self, seq: Sequence) -> None:
        """Generated tokens are discarded and generated again."""
        self.running.remove(seq)
        super().preempt(seq)
        self.discard_output(seq)

    def discard_output(self, seq: Sequence) -> None:
        del seq.token_ids[seq.num_prompt :]

    def finish(self, seq: Sequence) -> None:
        self.finished.append(seq)


class CourseText(Course):
    def get_slot(self, seq: Sequence) -> bool:
        """A slot for the next token; preempts the most recent sequence until there is one."""
        while not self.blocks.can_append(seq):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        self.blocks.append(seq)
        return True

    def can_promote(self, seq: Sequence) -> bool:
        """Leave the blocks that the batch is expected to need until all of it has ended.

        The text does not say what is expected: here all the output that is allowed.
        """
        batch = [*self.running, seq]
        num_held = sum(len(s.block_table) for s in self.running)
        num_in_total = sum(self.blocks_at_end(s) for s in batch)
        return self.blocks.num_free + num_held >= num_in_total

    def blocks_at_end(self, seq: Sequence) -> int:
        """The last token is sampled, but its keys and values are never stored."""
        return -(-(seq.num_prompt + seq.max_tokens - 1) // self.blocks.block_size)
