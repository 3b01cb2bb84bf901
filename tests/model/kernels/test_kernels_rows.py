"""The row-state kernels equal their references, step by step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels import rows
from headway.model.kernels.rows import RowTensors
from tests.model.kernels.reference import rows as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS, WIDTH = 7, 5
SPARE = NUM_ROWS - 1  # the row of padding: it has no tokens and a limit of 0
BOTH = pytest.mark.parametrize("kernels", [rows, reference], ids=["kernel", "reference"])


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """The output of `start`, on the CPU."""

    tokens_n: Tensor
    positions_n: Tensor
    slots_n: Tensor
    window_slots_n: Tensor


def state_with(
    lengths: list[int], limits: list[int], first_block: int = 0, *, has_windows: bool = True
) -> RowTensors:
    """Rows of these lengths and limits, then empty ones; blocks are in random order."""
    chance = torch.Generator().manual_seed(len(lengths))
    tables, windows = (
        torch.randperm(NUM_ROWS * WIDTH, generator=chance).view(NUM_ROWS, WIDTH) + first_block
        for _ in range(2)
    )
    missing = [0] * (NUM_ROWS - len(lengths))
    columns = [
        torch.tensor(lengths + missing),
        torch.tensor(limits + missing),
        torch.randint(5000, (NUM_ROWS,), generator=chance),
        torch.randint(100, (NUM_ROWS,), generator=chance),
    ]
    made = [tables, *columns, *([windows] if has_windows else [])]
    return RowTensors(*(column.to(DEVICE, torch.int32) for column in made))


def copied(state: RowTensors) -> RowTensors:
    tensors = (getattr(state, field.name) for field in fields(state))
    return RowTensors(*(None if tensor is None else tensor.clone() for tensor in tensors))


def started(kernels: ModuleType, numbers: list[int], state: RowTensors, size: int) -> Inputs:
    """One step; outputs that are not written hold an impossible value."""
    row_ids_n = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    columns = torch.full((4, len(numbers)), -777, dtype=torch.int64, device=DEVICE)
    has_windows = state.window_tables is not None
    kernels.start(row_ids_n, state, size, *columns[: 3 + has_windows])
    return Inputs(
        **{field.name: column for field, column in zip(fields(Inputs), columns.cpu(), strict=True)}
    )


def finished(
    kernels: ModuleType, numbers: list[int], sampled: list[int], state: RowTensors
) -> None:
    row_ids_n, sampled_n = torch.tensor([numbers, sampled], dtype=torch.int32, device=DEVICE)
    kernels.finish(row_ids_n, sampled_n, state)


def assert_equal(one: RowTensors, other: RowTensors, rows: slice = slice(None)) -> None:
    for field in fields(one):
        name, found, right = field.name, getattr(one, field.name), getattr(other, field.name)
        assert (found is None and right is None) or torch.equal(found[rows], right[rows]), name


@pytest.mark.parametrize(("block_size", "has_windows"), [(1, True), (3, False), (16, True)])
def test_kernels_and_references_take_the_same_steps(block_size: int, has_windows: bool) -> None:
    most = WIDTH * block_size
    lengths, limits = [0, 1, most // 2, most - 1, most, 2], [most, most, most, most, most, 3]
    own = state_with(lengths, limits, has_windows=has_windows)
    other = copied(own)
    numbers = [4, 0, 3, 2, SPARE, 1, 5, SPARE]
    for step in range(4):
        found, right = (
            started(kernels, numbers, state, block_size)
            for kernels, state in ((rows, own), (reference, other))
        )
        for field in fields(found):
            assert torch.equal(getattr(found, field.name), getattr(right, field.name)), field.name
        # All padding rows write their sampled token to the same place, in any order.
        sampled = [100 * step + row for row in numbers]
        for kernels, state in ((rows, own), (reference, other)):
            finished(kernels, numbers, sampled, state)
        assert_equal(own, other, slice(SPARE))


@BOTH
def test_a_row_advances_through_its_blocks_to_its_limit(kernels: ModuleType) -> None:
    state = state_with([2, 0], [9, 4])
    found = [started(kernels, [0], state, 4) for _ in range(9)]
    assert [int(step.positions_n) for step in found] == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert state.window_tables is not None
    for tables, slots in ((state.tables, "slots_n"), (state.window_tables, "window_slots_n")):
        table = tables[0].tolist()
        places = [table[p // 4] * 4 + p % 4 for p in range(2, 9)]
        assert [int(getattr(step, slots)) for step in found] == [*places, -1, -1]
    assert state.lengths.tolist()[:2] == [9, 0]


@BOTH
def test_the_sampled_token_is_the_next_input(kernels: ModuleType) -> None:
    state = state_with([3, 5, 1], [8, 8, 8])
    before = copied(state)
    finished(kernels, [2, 0], [41, 43], state)
    assert started(kernels, [0, 2], state, 4).tokens_n.tolist() == [43, 41]
    counted = state.num_generated - before.num_generated
    assert counted.tolist() == [1, 0, 1, 0, 0, 0, 0]
    assert state.last[1] == before.last[1]


@BOTH
def test_padding_rows_share_a_row_that_stores_nothing(kernels: ModuleType) -> None:
    state = state_with([3], [8])
    before = copied(state)
    numbers = [SPARE, 0, SPARE, SPARE]
    for _ in range(3):
        found = started(kernels, numbers, state, 4)
        finished(kernels, numbers, [7, 8, 9, 10], state)
        assert found.positions_n[[0, 2, 3]].tolist() == [0, 0, 0]
        assert found.slots_n[[0, 2, 3]].tolist() == [-1, -1, -1]
        assert found.window_slots_n[[0, 2, 3]].tolist() == [-1, -1, -1]
    assert state.lengths[SPARE] == 0 and state.last[SPARE] in (7, 9, 10)
    assert state.lengths[0] == 6 and state.num_generated[0] == before.num_generated[0] + 3
    assert_equal(state, before, slice(1, SPARE))


@BOTH
def test_slots_may_exceed_32_bits(kernels: ModuleType) -> None:
    state = state_with([700], [1000], first_block=2**24)
    slot = int(started(kernels, [0], state, 256).slots_n)
    assert slot == int(state.tables[0, 2]) * 256 + 700 - 512 > 2**31


@BOTH
def test_no_rows_launch_nothing(kernels: ModuleType) -> None:
    state = state_with([3], [8])
    before = copied(state)
    assert len(started(kernels, [], state, 4).tokens_n) == 0
    finished(kernels, [], [], state)
    assert_equal(state, before)
