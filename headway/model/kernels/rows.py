"""The device state of the running requests' rows: reading the next inputs, recording tokens.

`start` reads the inputs of each decoding row and advances its length by one; `finish` records the
sampled tokens. Between two decode steps nothing comes from the host. Knows no plan and no request.

Legend: R rows of the state, W blocks in a row of the tables, n rows of a batch.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

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


@launched
@triton.jit
def _start(
    seats_n, tables, lengths, limits, last, tokens_n, positions_n, slots_n, table_width,
    BLOCK_SIZE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    begin(CHAINED)
    row = tl.program_id(0)
    seat = tl.load(seats_n + row).to(tl.int64)
    length, limit = tl.load(lengths + seat), tl.load(limits + seat)
    position = tl.maximum(tl.minimum(length, limit - 1), 0)
    block = tl.load(tables + seat * table_width + position // BLOCK_SIZE).to(tl.int64)
    slot = tl.where(length < limit, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(tokens_n + row, tl.load(last + seat).to(tl.int64))
    tl.store(positions_n + row, position.to(tl.int64))
    tl.store(slots_n + row, slot)
    tl.store(lengths + seat, tl.minimum(length + 1, limit))


@launched
@triton.jit
def _finish(seats_n, sampled_n, last, num_generated, CHAINED: tl.constexpr):
    begin(CHAINED)
    seat = tl.load(seats_n + tl.program_id(0)).to(tl.int64)
    tl.store(last + seat, tl.load(sampled_n + tl.program_id(0)))
    tl.store(num_generated + seat, tl.load(num_generated + seat) + 1)


def start(
    seats_n: Tensor,
    seats: RowTensors,
    block_size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
) -> None:
    """Write token, position and slot (int64) of the next decode of each row in `seats_n`."""
    if len(seats_n):
        _start[(len(seats_n),)](
            seats_n, seats.tables, seats.lengths, seats.limits, seats.last, tokens_n, positions_n,
            slots_n, seats.tables.shape[1], block_size, **launch_options(1, 1),
        )  # fmt: skip


def finish(seats_n: Tensor, sampled_n: Tensor, seats: RowTensors) -> None:
    """Record the sampled tokens of the rows in `seats_n`."""
    if len(seats_n):
        _finish[(len(seats_n),)](
            seats_n, sampled_n, seats.last, seats.num_generated, **launch_options(1, 1)
        )
