"""The device state of the running requests' rows: reading the next inputs, recording tokens.

`start` reads the inputs of each decoding row and advances its length by one; `finish` records the
sampled tokens. Between two decode steps nothing comes from the host. Knows no plan and no request.

Legend: R rows of the state, W blocks in a row of the tables, n rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headway.model.kernels.launch import begin, launch_options, launched


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """The state of every row; all int32."""

    tables: Tensor  # [R, W]
    lengths: Tensor  # [R]: tokens in the cache
    limits: Tensor  # [R]: maximum of `lengths`; a row at its limit stores nothing
    last: Tensor  # [R]: last sampled token, the next input
    num_generated: Tensor  # [R]
    window_tables: Tensor | None = None  # [R, W]: of sliding-window layers


@launched
@triton.jit
def _start(
    row_ids_n, tables, window_tables, lengths, limits, last, tokens_n, positions_n, slots_n,
    window_slots_n, table_width,
    BLOCK_SIZE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    begin(CHAINED)
    row = tl.program_id(0)
    row_id = tl.load(row_ids_n + row).to(tl.int64)
    length, limit = tl.load(lengths + row_id), tl.load(limits + row_id)
    position = tl.maximum(tl.minimum(length, limit - 1), 0)
    block = tl.load(tables + row_id * table_width + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(length < limit, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    if window_tables is not None:
        place = row_id * table_width + position // BLOCK_SIZE
        block = tl.load(window_tables + place).to(tl.int64)
        window_slot = tl.where(length < limit, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(window_slots_n + row, window_slot)
    tl.store(tokens_n + row, tl.load(last + row_id).to(tl.int64))
    tl.store(positions_n + row, position.to(tl.int64))
    tl.store(slots_n + row, slot)
    tl.store(lengths + row_id, tl.minimum(length + 1, limit))


@launched
@triton.jit
def _finish(row_ids_n, sampled_n, last, num_generated, CHAINED: tl.constexpr):
    begin(CHAINED)
    row_id = tl.load(row_ids_n + tl.program_id(0)).to(tl.int64)
    tl.store(last + row_id, tl.load(sampled_n + tl.program_id(0)))
    tl.store(num_generated + row_id, tl.load(num_generated + row_id) + 1)


def start(
    row_ids_n: Tensor,
    state: RowTensors,
    block_size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    window_slots_n: Tensor | None = None,
) -> None:
    """Write token, position and slot (int64) of the next decode of each row in `row_ids_n`.

    With sliding-window layers also the slot in their blocks.
    """
    if len(row_ids_n):
        _start[(len(row_ids_n),)](
            row_ids_n, state.tables, state.window_tables, state.lengths, state.limits, state.last,
            tokens_n, positions_n, slots_n, window_slots_n, state.tables.shape[1], block_size, **launch_options(1, 1),
        )  # fmt: skip


def finish(row_ids_n: Tensor, sampled_n: Tensor, state: RowTensors) -> None:
    """Record the sampled tokens of the rows in `row_ids_n`."""
    if len(row_ids_n):
        _finish[(len(row_ids_n),)](
            row_ids_n, sampled_n, state.last, state.num_generated, **launch_options(1, 1)
        )
