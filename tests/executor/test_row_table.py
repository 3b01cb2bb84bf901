"""The inputs of a pass, built from the row table, and the rounded sizes of passes."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.executor.gpu.mixed_pass import captured_sizes, round_up, round_up_chunks
from headway.executor.row_table import RowTable
from headway.model.batch import ForwardBatch
from headway.plan import Chunk, Rows

NUM_ROWS, MAX_MODEL_LEN = 5, 40
FIELDS = (
    "tokens_t", "positions_t", "slots_t", "tables_sw", "starts_s", "ends_s", "sampled_n",
)  # fmt: skip


class World:
    """A table whose rows are admitted, computed and decoded at random."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.dice = random.Random(seed)
        self.table = RowTable(NUM_ROWS, block_size, MAX_MODEL_LEN)
        self.blocks = iter(range(1000))
        self.requests: dict[int, Any] = {}
        self.rows: Rows = np.zeros(0, dtype=np.intp)
        self.num_repeated = 0

    def admit(self) -> None:
        """A new request in some row; its prompt is computed at once, and it decodes from now on."""
        row, num_prompt = self.dice.randrange(NUM_ROWS), self.dice.randint(1, 20)
        blocks = [next(self.blocks) for _ in range(-(-num_prompt // self.table.block_size))]
        request: Any = SimpleNamespace(
            row=row, kv=SimpleNamespace(blocks=blocks), tokens=list(range(num_prompt)),
            limit=self.dice.randint(num_prompt + 1, MAX_MODEL_LEN),
        )  # fmt: skip
        self.requests[row] = request
        self.table.add_request(request)
        self.check([Chunk(request, 0, num_prompt, 0, is_last=True)])
        self.table.lengths[row] = num_prompt
        self.table.last[row] = self.dice.randrange(100)
        self.choose()

    def choose(self) -> None:
        """Some of the requests decode from now on."""
        chosen = self.dice.sample(sorted(self.requests), self.dice.randint(1, len(self.requests)))
        self.rows = np.array(chosen, dtype=np.intp)

    def decode(self) -> None:
        table = self.table
        for row in self.rows.tolist():
            if (
                min(table.lengths[row], table.limits[row] - 1) // table.block_size
                >= (table.num_blocks[row])
            ):
                table.grow_one(row, next(self.blocks))
        self.check([])
        table.advance(self.rows, np.array(self.dice.choices(range(100), k=len(self.rows))))

    def check(self, chunks: list[Chunk]) -> None:
        """The batch has the values of one that is built anew."""
        latest, self.table._latest = self.table._latest, None  # a deep copy of it takes long
        fresh, self.table._latest = copy.deepcopy(self.table), latest
        expected = fresh.batch(self.rows, chunks)
        found = self.table.batch(self.rows, chunks)
        assert values(found) == values(expected)
        self.num_repeated += latest is not None and latest.batch is found


def values(batch: ForwardBatch) -> list[Any]:
    assert batch.tables_sw.is_contiguous() and batch.tables_sw.shape[1] > 0
    return [getattr(batch, name).tolist() for name in FIELDS]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_batch_that_comes_again_has_the_values_of_a_new_one(block_size: int) -> None:
    num_repeated = 0
    for seed in range(20):
        world = World(seed, block_size)
        world.admit()
        for _ in range(60):
            action = world.dice.random()
            if action < 0.1:
                world.admit()
            elif action < 0.15:
                world.choose()
            else:
                world.decode()
        num_repeated += world.num_repeated
    assert num_repeated > 100 if block_size > 1 else num_repeated == 0


def test_a_batch_keeps_its_arrays_until_its_table_is_full() -> None:
    world = World(0, 16)
    world.admit()
    table, rows = world.table, world.rows
    table.limits[rows], table.lengths[rows] = MAX_MODEL_LEN, 16
    table.grow_one(int(rows[0]), 999)
    first = table.batch(rows, [])
    for position in range(17, 32):
        table.advance_lengths(rows)
        assert table.batch(rows, []) is first
        assert first.positions_t.tolist() == [position]
    table.advance_lengths(rows)
    assert table.batch(rows, []) is not first, "a third block"


def test_rounded_sizes_are_few_and_close() -> None:
    for least, num_steps, most, num_sizes in ((32, 1, 256, 4), (32, 2, 256, 6), (64, 4, 8192, 24)):
        sizes = [round_up(count, least, num_steps) for count in range(1, most + 1)]
        for count, size in enumerate(sizes, start=1):
            assert count <= size < count + max(least, 1 + count / num_steps)
            assert round_up(size, least, num_steps) == size
        assert sizes == sorted(sizes) and len(set(sizes)) == num_sizes


def test_a_padded_pass_has_room_for_all_chunks() -> None:
    assert round_up_chunks(0, 0) == (0, 0)
    for num_tokens in range(1, 1100, 7):
        for num_chunks in range(1, min(num_tokens, 256), 5):
            tokens, chunks = round_up_chunks(num_tokens, num_chunks)
            assert tokens >= num_tokens and chunks >= num_chunks
            assert (tokens, chunks) == round_up_chunks(tokens, 1), "one of the captured sizes"


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
def test_few_sizes_are_captured_largest_first(num_kv_heads: int) -> None:
    """Each takes 10 to 20 ms, and the engine is not ready before."""
    sizes = captured_sizes(256, 6500, num_kv_heads)
    assert len(sizes) == len(set(sizes)) <= 160
    rows = [size.decodes + size.tokens for size in sizes]
    assert rows == sorted(rows, reverse=True)
