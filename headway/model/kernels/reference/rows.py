"""The seats' kernels in plain torch; see kernels/rows.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # the kernels' own file needs Triton
    from headway.model.kernels.rows import RowTensors


def start(
    seats_n: Tensor,
    seats: RowTensors,
    block_size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
) -> None:
    """Write token, position and slot (int64) of the next decode of each of `seats_n`."""
    at = seats_n.long()
    lengths, limits = seats.lengths[at], seats.limits[at]
    positions = lengths.minimum(limits - 1).clamp(min=0).long()
    blocks = seats.tables[at].gather(1, (positions // block_size)[:, None])[:, 0].long()
    tokens_n.copy_(seats.last[at])
    positions_n.copy_(positions)
    slots_n.copy_(blocks * block_size + positions % block_size)
    slots_n[lengths >= limits] = -1
    seats.lengths[at] = (lengths + 1).minimum(limits)


def finish(seats_n: Tensor, sampled_n: Tensor, seats: RowTensors) -> None:
    """Take note of the tokens that were sampled for `seats_n`."""
    at = seats_n.long()
    seats.last[at] = sampled_n.to(seats.last.dtype)
    seats.num_generated[at] += 1
