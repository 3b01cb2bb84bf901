"""Sequences and blocks of the reference models. Knows nothing of Headway.

`Blocks` counts blocks and finds no prefixes. `PrefixBlocks` is the block manager that the texts
describe: content-hashed full blocks with reference counts; a freed block keeps its hash until it
is reused. The texts do not say which free block is reused first: here the one freed first.
"""

from __future__ import annotations

from collections import deque


class Sequence:
    """Tokens, and the blocks with their keys and values."""

    def __init__(
        self, id: str, prompt: list[int], max_tokens: int, ignore_eos: bool = False,
        max_model_length: int | None = None,
    ) -> None:  # fmt: skip
        self.id = id
        self.token_ids = list(prompt)
        self.num_prompt = len(prompt)
        self.max_tokens = max_tokens
        self.ignore_eos = ignore_eos
        self.max_model_length = max_model_length
        self.arrival = 0  # its number in the order of arrival
        self.block_table: list[int] = []
        self.keys: list[int] = []  # hashes of its full blocks, as far as they are computed
        self.num_computed = 0  # tokens in the cache, or scheduled to be
        self.prefill_end = 0  # tokens to compute before it decodes

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Past its prompt, and its latest token is not computed yet."""
        return self.prefill_end <= self.num_computed < len(self)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt


class Blocks:
    """A pool of blocks; every sequence has its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.remainder = 1  # of the length by the block size, when a decode needs a block
        self.free_ids = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def num_needed(self, seq: Sequence) -> int:
        """All blocks of the sequence."""
        return -(-len(seq) // self.block_size)

    def num_cached(self, seq: Sequence) -> int:
        """Tokens of the longest cached prefix."""
        return 0

    def num_shared(self, seq: Sequence) -> int:
        """Blocks of the cached prefix that other sequences hold."""
        return 0

    def allocate(self, seq: Sequence) -> None:
        seq.num_computed = 0
        seq.block_table = [self.take() for _ in range(self.num_needed(seq))]

    def needs_block(self, seq: Sequence) -> bool:
        return len(seq) % self.block_size == self.remainder

    def can_append(self, seq: Sequence) -> bool:
        return self.num_free >= self.needs_block(seq)

    def append(self, seq: Sequence) -> None:
        """Give the sequence a slot for the token that it computes next."""
        if self.needs_block(seq):
            seq.block_table.append(self.take())

    def free(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            self.release(block)
        seq.block_table = []
        seq.num_computed = 0

    def take(self) -> int:
        return self.free_ids.popleft()

    def release(self, block: int) -> None:
        self.free_ids.append(block)


class PrefixBlocks(Blocks):
    """Full blocks are found again by their content and everything before it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.ref_count = [0] * num_blocks
        self.hash_of: dict[int, int] = {}
        self.block_with: dict[int, int] = {}

    def hashes(self, seq: Sequence) -> list[int]:
        """Of the full blocks, each chained to the one before."""
        size, keys = self.block_size, seq.keys
        del keys[len(seq) // size :]
        for start in range(len(keys) * size, len(seq) // size * size, size):
            chain = keys[-1] if keys else 0
            keys.append(hash((chain, *seq.token_ids[start : start + size])))
        return keys

    def hits(self, seq: Sequence) -> list[int]:
        """The blocks of the longest cached prefix."""
        found = []
        for key in self.hashes(seq):
            block = self.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: int) -> int | None:
        """Of blocks of equal content only the latest is known."""
        return self.block_with.get(key)

    def num_cached(self, seq: Sequence) -> int:
        return len(self.hits(seq)) * self.block_size

    def num_shared(self, seq: Sequence) -> int:
        return sum(self.ref_count[block] > 0 for block in self.hits(seq))

    def allocate(self, seq: Sequence) -> None:
        self.hold(seq)
        self.publish_blocks(seq, 0, len(seq) // self.block_size)

    def hold(self, seq: Sequence) -> None:
        """Share the blocks of the cached prefix, and take new ones for the rest."""
        hits = self.hits(seq)
        for block in hits:
            if not self.ref_count[block]:
                self.free_ids.remove(block)
            self.ref_count[block] += 1
        num_new = self.num_needed(seq) - len(hits)
        seq.block_table = hits + [self.take() for _ in range(num_new)]
        seq.num_computed = len(hits) * self.block_size

    def append(self, seq: Sequence) -> None:
        super().append(seq)
        if len(seq) % self.block_size == 0:  # the last block is full once this token is computed
            end = len(seq) // self.block_size
            self.publish_blocks(seq, end - 1, end)

    def publish_blocks(self, seq: Sequence, first: int, end: int) -> None:
        """Let the blocks [first, end) of a sequence be found, unless they already are."""
        keys = self.hashes(seq)
        for block, key in zip(seq.block_table[first:end], keys[first:end], strict=False):
            if block not in self.hash_of:
                self.hash_of[block] = key
                self.publish(block, key)

    def publish_computed(self, seq: Sequence, start: int = 0) -> None:
        """Publish the full blocks of computed tokens, from token `start` on."""
        self.publish_blocks(seq, start // self.block_size, seq.num_computed // self.block_size)

    def publish(self, block: int, key: int) -> None:
        self.block_with[key] = block

    def take(self) -> int:
        block = super().take()
        key = self.hash_of.pop(block, None)
        if key is not None:
            self.forget(block, key)
        self.ref_count[block] = 1
        return block

    def forget(self, block: int, key: int) -> None:
        if self.block_with.get(key) == block:
            del self.block_with[key]

    def release(self, block: int) -> None:
        self.ref_count[block] -= 1
        if not self.ref_count[block]:
            super().release(block)
