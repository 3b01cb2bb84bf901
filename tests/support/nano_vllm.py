"""nano-vLLM's scheduler and block manager, as a simple model to compare Headway with.

Knows nothing of Headway. Has two deques, a list of tokens per sequence, and Python work for every
sequence at every step. It differs from nano-vLLM on purpose: max_num_seqs limits the running
sequences and not only the batch; room is made before blocks are allocated; generated tokens become
matchable when a sequence frees its blocks; decodes run after a streak of prefill batches; blank
blocks are reused before blocks with known content.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from xxhash import xxh64

MAX_PREFILL_BATCHES = 16  # consecutive, while a sequence waits to decode


class Sequence:
    """Tokens, and the blocks with their keys and values."""

    def __init__(
        self, id: str, prompt: list[int], max_tokens: int, ignore_eos: bool = False
    ) -> None:
        self.id = id
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos
        self.block_table: list[int] = []
        self.num_cached_tokens = 0  # computed by this sequence or by one with the same prefix
        self.num_scheduled_tokens = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1  # of all tokens up to its end; -1 while it is not full
        self.token_ids: list[int] = []


def compute_hash(token_ids: list[int], prefix: int) -> int:
    digest = xxh64()
    if prefix != -1:
        digest.update(prefix.to_bytes(8, "little"))
    digest.update(np.array(token_ids).tobytes())
    return digest.intdigest()


class BlockManager:
    """Reference counts, a free list, and a map from content to blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_block_ids = deque(
            range(num_blocks)
        )  # blank blocks on the left, latest freed on the right
        self.used_block_ids: set[int] = set()
        self.hash_to_block_ids: dict[int, list[int]] = {}  # the first one is used

    def cached_blocks(self, seq: Sequence) -> list[int]:
        """The blocks of the longest cached prefix."""
        hits: list[int] = []
        size, prefix = self.block_size, -1
        for start in range(0, len(seq) // size * size, size):
            token_ids = seq.token_ids[start : start + size]
            prefix = compute_hash(token_ids, prefix)
            found = self.hash_to_block_ids.get(prefix)
            if not found or self.blocks[found[0]].token_ids != token_ids:
                break
            hits.append(found[0])
        return hits

    def can_allocate(self, seq: Sequence, hits: list[int]) -> bool:
        num_blocks = -(-len(seq) // self.block_size)
        in_use = sum(block_id in self.used_block_ids for block_id in hits)
        return len(self.free_block_ids) >= num_blocks - in_use

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        for block_id in hits:
            if block_id not in self.used_block_ids:
                self.free_block_ids.remove(block_id)
                self.used_block_ids.add(block_id)
            self.blocks[block_id].ref_count += 1
            seq.block_table.append(block_id)
        while len(seq.block_table) * self.block_size < len(seq):
            seq.block_table.append(self._take())
        # A completely cached prompt still computes its last token.
        seq.num_cached_tokens = min(len(hits) * self.block_size, len(seq) - 1)

    def needs_block(self, seq: Sequence) -> bool:
        """One past a block boundary; `len % block_size == 1`, but correct for size 1 too."""
        return (len(seq) - 1) % self.block_size == 0

    def may_append(self, seq: Sequence) -> None:
        """Allocate a slot for the next token; a block that becomes full gets its hash."""
        if self.needs_block(seq):
            seq.block_table.append(self._take())
        if len(seq) % self.block_size == 0:
            self._hash(seq, len(seq) // self.block_size - 1)

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Hash blocks [start, end) and make them matchable."""
        for i in range(start, end):
            self._hash(seq, i)
            block_ids = self.hash_to_block_ids.setdefault(self.blocks[seq.block_table[i]].hash, [])
            if seq.block_table[i] not in block_ids:
                block_ids.append(seq.block_table[i])

    def deallocate(self, seq: Sequence, num_computed: int) -> None:
        self.publish(seq, 0, num_computed // self.block_size)
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                if block.hash == -1:
                    self.free_block_ids.appendleft(block_id)
                else:
                    self.free_block_ids.append(block_id)
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    def _take(self) -> int:
        block_id = self.free_block_ids.popleft()
        block = self.blocks[block_id]
        assert block.ref_count == 0
        if block.hash != -1:
            self._forget(block)
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id

    def _hash(self, seq: Sequence, i: int) -> None:
        block = self.blocks[seq.block_table[i]]
        if block.hash == -1:
            prefix = self.blocks[seq.block_table[i - 1]].hash if i else -1
            block.token_ids = seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
            block.hash = compute_hash(block.token_ids, prefix)

    def _forget(self, block: Block) -> None:
        """Forget the content of a block; the latest block of equal content takes its place."""
        block_ids = self.hash_to_block_ids[block.hash]
        if block_ids[0] == block.block_id and len(block_ids) > 1:
            block_ids[0] = block_ids.pop()
        else:
            block_ids.remove(block.block_id)
        if not block_ids:
            del self.hash_to_block_ids[block.hash]
        block.hash, block.token_ids = -1, []


class Scheduler:
    """One batch per step, all prefill or all decode."""

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int, block_size: int,
        eos: int = -1,
    ) -> None:  # fmt: skip
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos = eos
        self.block_manager = BlockManager(num_blocks, block_size)
        self.waiting: deque[Sequence] = deque()  # a split prompt stays in front, with its blocks
        self.running: deque[Sequence] = deque()
        self.batch: list[Sequence] = []
        self.preempted: list[Sequence] = []  # by the latest schedule()
        self.prefill_streak = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The batch, and whether it is a prefill."""
        self.batch, self.preempted = [], []
        if not self.running or self.prefill_streak < MAX_PREFILL_BATCHES:
            self._prefill()
        if self.batch:
            self.prefill_streak += 1
            return self.batch, True
        self._decode()
        self.prefill_streak = 0
        return self.batch, False

    def _prefill(self) -> None:
        manager, num_left = self.block_manager, self.max_num_batched_tokens
        while self.waiting and num_left:
            seq = self.waiting[0]
            hits: list[int] = []
            num_tokens = len(seq) - seq.num_cached_tokens
            if not seq.block_table:
                if len(self.running) >= self.max_num_seqs:
                    break
                hits = manager.cached_blocks(seq)
                if not manager.can_allocate(seq, hits):
                    break
                num_tokens = max(1, len(seq) - len(hits) * manager.block_size)
            if num_tokens > num_left and self.batch:  # only the first may be split
                break
            if not seq.block_table:
                manager.allocate(seq, hits)
            seq.num_scheduled_tokens = min(num_tokens, num_left)
            num_left -= seq.num_scheduled_tokens
            start = seq.num_cached_tokens
            seq.num_cached_tokens += seq.num_scheduled_tokens
            manager.publish(
                seq, start // manager.block_size, seq.num_cached_tokens // manager.block_size
            )
            self.batch.append(seq)
            if seq.num_cached_tokens == len(seq):
                self.running.append(self.waiting.popleft())

    def _decode(self) -> None:
        manager, num_promised = self.block_manager, 0
        while self.running:
            seq = self.running.popleft()
            num_needed = num_promised + manager.needs_block(seq)
            while num_needed > len(manager.free_block_ids):
                if self.waiting and self.waiting[0].block_table:  # a split prompt is the newest
                    self.preempt(self.waiting.popleft())
                elif self.running:
                    self.preempt(self.running.pop())
                else:
                    self.preempt(seq)
                    break
            else:
                num_promised = num_needed
                seq.num_scheduled_tokens = 1
                self.batch.append(seq)
        for seq in self.batch:
            manager.may_append(seq)
            seq.num_cached_tokens += 1
        self.running.extend(self.batch)

    def preempt(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq, seq.num_cached_tokens)
        self.waiting.appendleft(seq)
        self.preempted.append(seq)

    def postprocess(self, token_ids: list[int]) -> list[Sequence]:
        """Append a token to each sequence (not to split prompts); returns finished sequences."""
        stopped: list[Sequence] = []
        at_length: list[Sequence] = []
        for seq, token_id in zip(self.batch, token_ids, strict=True):
            if seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(token_id)
            if token_id == self.eos and not seq.ignore_eos:
                stopped.append(seq)
            elif seq.num_completion_tokens == seq.max_tokens:
                at_length.append(seq)
        finished = stopped + at_length
        for seq in finished:
            self.block_manager.deallocate(seq, seq.num_cached_tokens)
            self.running.remove(seq)
        return finished
