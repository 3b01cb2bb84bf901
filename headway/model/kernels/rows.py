"""The seats of running requests on the device: their next inputs, and what becomes of them.

`start` reads what each decoding seat needs and moves it on by one; `finish` notes what was sampled.
Between two decode steps nothing comes from the host. Knows no plan and no request.

Legend: R seats, W blocks of a table, n rows of a batch.
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
    """What is known of every seat; int32."""

    tables: Tensor  # [R, W]
    lengths: Tensor  # [R]: tokens in the cache
    limits: Tensor  # [R]: of `lengths`; a seat at its limit stores nothing any more
    last: Tensor  # [R]: sampled, and the next input
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
    """Write token, position and slot (int64) of the next decode of each of `seats_n`."""
    if len(seats_n):
        _start[(len(seats_n),)](
            seats_n, seats.tables, seats.lengths, seats.limits, seats.last, tokens_n, positions_n,
            slots_n, seats.tables.shape[1], block_size, **launch_options(1, 1),
        )  # fmt: skip


def finish(seats_n: Tensor, sampled_n: Tensor, seats: RowTensors) -> None:
    """Take note of the tokens that were sampled for `seats_n`."""
    if len(seats_n):
        _finish[(len(seats_n),)](
            seats_n, sampled_n, seats.last, seats.num_generated, **launch_options(1, 1)
        )
