"""Reference of kernels/rows.py in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from headway.model.kernels.rows import RowTensors


def start(
    row_ids_n: Tensor,
    state: RowTensors,
    block_size: int,
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    window_slots_n: Tensor | None = None,
) -> None:
    """Write token, position and slots (int64) of the next decode of each row in `row_ids_n`."""
    at = row_ids_n.long()
    lengths, limits = state.lengths[at], state.limits[at]
    positions = lengths.minimum(limits - 1).clamp(min=0).long()
    tokens_n.copy_(state.last[at])
    positions_n.copy_(positions)
    for tables, out_n in ((state.tables, slots_n), (state.window_tables, window_slots_n)):
        if tables is not None and out_n is not None:
            blocks = tables[at].gather(1, (positions // block_size)[:, None])[:, 0].long()
            out_n.copy_(blocks * block_size + positions % block_size)
            out_n[lengths >= limits] = -1
    state.lengths[at] = (lengths + 1).minimum(limits)


def finish(row_ids_n: Tensor, sampled_n: Tensor, state: RowTensors) -> None:
    """Record the sampled tokens of the rows in `row_ids_n`."""
    at = row_ids_n.long()
    state.last[at] = sampled_n.to(state.last.dtype)
    state.num_generated[at] += 1
