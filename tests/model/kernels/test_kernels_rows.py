"""Laws of the seats' kernels: they and their twins say the same, step by step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels import rows
from headway.model.kernels.rows import RowTensors
from tests.model.kernels.reference import rows as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SEATS, WIDTH = 7, 5
SPARE = NUM_SEATS - 1  # rows that only fill a batch up sit here: it has no tokens and no room
BOTH = pytest.mark.parametrize("kernels", [rows, twin], ids=["kernel", "twin"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What `start` writes, on the CPU."""

    tokens_n: Tensor
    positions_n: Tensor
    slots_n: Tensor


def seats_with(lengths: list[int], limits: list[int], first_block: int = 0) -> RowTensors:
    """SamplingSettings of these lengths and limits, then empty ones; blocks are in no order."""
    chance = torch.Generator().manual_seed(len(lengths))
    tables = torch.randperm(NUM_SEATS * WIDTH, generator=chance) + first_block
    missing = [0] * (NUM_SEATS - len(lengths))
    columns = [
        torch.tensor(lengths + missing),
        torch.tensor(limits + missing),
        torch.randint(5000, (NUM_SEATS,), generator=chance),
        torch.randint(100, (NUM_SEATS,), generator=chance),
    ]
    made = [tables.view(NUM_SEATS, WIDTH), *columns]
    return RowTensors(*(column.to(DEVICE, torch.int32) for column in made))


def copied(seats: RowTensors) -> RowTensors:
    return RowTensors(*(getattr(seats, field.name).clone() for field in fields(seats)))


def started(kernels: ModuleType, numbers: list[int], seats: RowTensors, size: int) -> Inputs:
    """One step; what nobody wrote is far from anything right."""
    row_ids_n = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    columns = torch.full((3, len(numbers)), -777, dtype=torch.int64, device=DEVICE)
    kernels.start(row_ids_n, seats, size, *columns)
    tokens_n, positions_n, slots_n = columns.cpu()
    return Inputs(tokens_n=tokens_n, positions_n=positions_n, slots_n=slots_n)


def finished(
    kernels: ModuleType, numbers: list[int], sampled: list[int], seats: RowTensors
) -> None:
    row_ids_n, sampled_n = torch.tensor([numbers, sampled], dtype=torch.int32, device=DEVICE)
    kernels.finish(row_ids_n, sampled_n, seats)


def assert_equal(one: RowTensors, other: RowTensors, rows: slice = slice(None)) -> None:
    for field in fields(one):
        name = field.name
        assert torch.equal(getattr(one, name)[rows], getattr(other, name)[rows]), name


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_kernels_and_twins_take_the_same_steps(block_size: int) -> None:
    most = WIDTH * block_size
    seats = seats_with([0, 1, most // 2, most - 1, most, 2], [most, most, most, most, most, 3])
    other = copied(seats)
    numbers = [4, 0, 3, 2, SPARE, 1, 5, SPARE]
    for step in range(4):
        found, right = (
            started(kernels, numbers, state, block_size)
            for kernels, state in ((rows, seats), (twin, other))
        )
        for field in fields(found):
            assert torch.equal(getattr(found, field.name), getattr(right, field.name)), field.name
        # What filling rows sample is written by all of them to one place, in any order.
        sampled = [100 * step + seat for seat in numbers]
        for kernels, state in ((rows, seats), (twin, other)):
            finished(kernels, numbers, sampled, state)
        assert_equal(seats, other, slice(SPARE))


@BOTH
def test_a_seat_walks_through_its_blocks_up_to_its_limit_and_stays_there(
    kernels: ModuleType,
) -> None:
    seats = seats_with([2, 0], [9, 4])
    found = [started(kernels, [0], seats, 4) for _ in range(9)]
    table = seats.tables[0].tolist()
    places = [table[p // 4] * 4 + p % 4 for p in range(2, 9)]
    assert [int(step.positions_n) for step in found] == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert [int(step.slots_n) for step in found] == [*places, -1, -1]
    assert seats.lengths.tolist()[:2] == [9, 0]


@BOTH
def test_the_token_that_was_sampled_is_the_next_input(kernels: ModuleType) -> None:
    seats = seats_with([3, 5, 1], [8, 8, 8])
    before = copied(seats)
    finished(kernels, [2, 0], [41, 43], seats)
    assert started(kernels, [0, 2], seats, 4).tokens_n.tolist() == [43, 41]
    counted = seats.num_generated - before.num_generated
    assert counted.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert seats.last[1] == before.last[1]


@BOTH
def test_rows_that_fill_a_batch_up_share_a_seat_that_stores_nothing(kernels: ModuleType) -> None:
    seats = seats_with([3], [8])
    before = copied(seats)
    numbers = [SPARE, 0, SPARE, SPARE]
    for _ in range(3):
        found = started(kernels, numbers, seats, 4)
        finished(kernels, numbers, [7, 8, 9, 10], seats)
        assert found.positions_n[[0, 2, 3]].tolist() == [0, 0, 0]
        assert found.slots_n[[0, 2, 3]].tolist() == [-1, -1, -1]
    assert seats.lengths[SPARE] == 0 and seats.last[SPARE] in (7, 9, 10)
    assert seats.lengths[0] == 6 and seats.num_generated[0] == before.num_generated[0] + 3
    assert_equal(seats, before, slice(1, SPARE))


@BOTH
def test_slots_may_pass_what_32_bits_count(kernels: ModuleType) -> None:
    seats = seats_with([700], [1000], first_block=2**24)
    slot = int(started(kernels, [0], seats, 256).slots_n)
    assert slot == int(seats.tables[0, 2]) * 256 + 700 - 512 > 2**31


@BOTH
def test_no_rows_are_no_work(kernels: ModuleType) -> None:
    seats = seats_with([3], [8])
    before = copied(seats)
    assert len(started(kernels, [], seats, 4).tokens_n) == 0
    finished(kernels, [], [], seats)
    assert_equal(seats, before)
