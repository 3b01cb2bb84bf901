"""What the four listings share: the queues, the limits, a batch, and the end of a sequence."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.scheduler.reference.blocks import Blocks, PrefixBlocks, Sequence


class Limits(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    eos: int = 0


class Batch(NamedTuple):
    """One step: prompts with the number of tokens computed of each, and decodes."""

    prefill: list[tuple[Sequence, int]]
    decode: list[Sequence]


class Listing:
    """A scheduler with a waiting and a running queue."""

    blocks_type: type[Blocks] = PrefixBlocks

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = self.blocks_type(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_added = 0
        self.preempted: list[tuple[Sequence, str]] = []  # by the latest step, and how

    def add(self, seq: Sequence) -> None:
        seq.arrival = self.num_added
        self.num_added += 1
        self.waiting.append(seq)

    def step(self) -> Batch:
        """Schedule one batch."""
        self.preempted = []
        batch = self.schedule()
        for seq in batch.decode:
            seq.num_computed += 1
        return batch

    def schedule(self) -> Batch:
        raise NotImplementedError

    def can_allocate(self, seq: Sequence) -> bool:
        return self.blocks.num_free >= self.num_to_allocate(seq)

    def num_to_allocate(self, seq: Sequence) -> int:
        """Free blocks that must be there: one for each block of the sequence, cached or not."""
        return self.blocks.num_needed(seq)

    def length_to_fit(self, seq: Sequence) -> int:
        """Tokens that must be left of the budget: the full length, cached or not."""
        return len(seq)

    def allocate(self, seq: Sequence) -> None:
        """Give the sequence its blocks; cached tokens count as computed."""
        self.blocks.allocate(seq)
        seq.prefill_end = len(seq)

    def compute(self, seq: Sequence, num_tokens: int) -> int:
        """Schedule the next tokens of a prompt; returns their number."""
        seq.num_computed += num_tokens
        return num_tokens

    def preempt(self, seq: Sequence) -> None:
        """Free all blocks; back to the front of the queue. Generated tokens are kept."""
        self.blocks.free(seq)
        self.waiting.appendleft(seq)
        self.preempted.append((seq, "recompute"))

    def postprocess(self, batch: Batch, tokens: dict[str, int]) -> list[Sequence]:
        """Append the sampled tokens; returns what has finished, with its blocks freed."""
        finished = []
        for seq in [seq for seq, _ in batch.prefill] + batch.decode:
            if seq.num_computed < len(seq):  # the rest of a cut prompt comes in a later step
                continue
            seq.token_ids.append(tokens[seq.id])
            if self.is_finished(seq):
                finished.append(seq)
        for seq in self.order_of_ends(finished, batch):
            self.finish(seq)
        return finished

    def order_of_ends(self, finished: list[Sequence], batch: Batch) -> list[Sequence]:
        return finished

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.free(seq)

    def is_finished(self, seq: Sequence) -> bool:
        if seq.token_ids[-1] == self.limits.eos and not seq.ignore_eos:
            return True
        return seq.num_generated >= seq.max_tokens
