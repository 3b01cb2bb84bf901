"""The executor's row table: block table, length and last token of every running request.

Only a plan's admissions and new blocks change it. A step therefore costs as much as these changes
plus a few array operations over the rows that take part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headway.model.batch import ForwardBatch
from headway.plan import Chunk, Plan, Rows
from headway.request import Request


class RowTable:
    """Arrays indexed by row; block indices and positions start at 0."""

    def __init__(
        self, num_rows: int, block_size: int, max_model_len: int, window: int | None = None
    ) -> None:
        """`window` is that of the model's sliding-window layers; None if it has no such layers."""
        self.block_size, self.window = block_size, window
        width = -(-max_model_len // block_size)
        self.tables = np.zeros((num_rows, width), dtype=np.int32)
        # Entries before the window of a row are outdated; nothing reads them.
        self.window_tables = np.zeros((num_rows, width if window else 0), dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # tokens computed
        self.limits = np.zeros(num_rows, dtype=np.int64)  # maximum of `lengths`
        self.last = np.zeros(num_rows, dtype=np.int64)  # last sampled token, the next input

    def add_request(self, request: Request) -> None:
        row, blocks = request.row, request.kv.blocks
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.limits[row] = request.limit - 1

    def grow(self, plan: Plan) -> None:
        for request, block in plan.new_blocks:
            self.grow_one(request.row, block)
        for request, first, blocks in plan.window_blocks:
            self.window_tables[request.row, first : first + len(blocks)] = blocks

    def grow_one(self, row: int, block: int) -> None:
        self.tables[row, self.num_blocks[row]] = block
        self.num_blocks[row] += 1

    def batch(self, rows: Rows, chunks: list[Chunk]) -> ForwardBatch:
        """Build the batch: decodes first, one token each, then the chunks.

        A row at its limit still decodes with the others, but its key and value are not stored.
        """
        size, lengths = self.block_size, self.lengths[rows]
        positions = np.minimum(lengths, self.limits[rows] - 1)
        slots = self.tables[rows, positions // size].astype(np.int64) * size + positions % size
        slots[lengths >= self.limits[rows]] = -1
        parts = [(self.last[rows], positions, slots)] + [self._chunk(chunk) for chunk in chunks]
        tokens, all_positions, all_slots = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        counts = [1] * len(rows) + [chunk.end - chunk.start for chunk in chunks]
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        ends = _joined(positions + 1, [chunk.end for chunk in chunks], np.int32)
        row_ids = _joined(rows, [chunk.request.row for chunk in chunks], np.intp)
        width = -(-int(ends.max(initial=1)) // size)
        is_sampled = [True] * len(rows) + [chunk.is_last for chunk in chunks]
        batch = ForwardBatch(
            tokens_t=torch.from_numpy(tokens),
            positions_t=torch.from_numpy(all_positions),
            slots_t=torch.from_numpy(all_slots),
            tables_sw=torch.from_numpy(self.tables[row_ids, :width]),
            starts_s=torch.from_numpy(starts),
            ends_s=torch.from_numpy(ends),
            sampled_n=torch.from_numpy(
                starts[1:][np.array(is_sampled, dtype=bool)].astype(np.int64) - 1
            ),
        )
        if self.window is not None:
            batch.windowed = self._windowed(batch, row_ids, np.repeat(row_ids, counts))
        return batch

    def _windowed(
        self, batch: ForwardBatch, row_ids: np.ndarray, row_of_token: np.ndarray
    ) -> ForwardBatch:
        """The batch with slots and tables of the sliding-window layers."""
        positions, width = batch.positions_t.numpy(), batch.tables_sw.shape[1]
        size = self.block_size
        slots = self.window_tables[row_of_token, positions // size].astype(np.int64) * size
        slots += positions % size
        slots[batch.slots_t.numpy() < 0] = -1
        return replace(
            batch,
            slots_t=torch.from_numpy(slots),
            tables_sw=torch.from_numpy(self.window_tables[row_ids, :width]),
            window=self.window,
        )

    def _chunk(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        request, size = chunk.request, self.block_size
        positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
        slots = self.tables[request.row, positions // size].astype(np.int64) * size
        slots += positions % size
        slots[: chunk.store_from - chunk.start] = -1  # the shared block holds these already
        tokens = np.array(request.tokens[chunk.start : chunk.end], dtype=np.int64)
        return tokens, positions, slots

    def advance(self, rows: Rows, sampled: np.ndarray) -> None:
        """Advance every decode by one token, except rows that are at their limit."""
        self.advance_lengths(rows)
        self.last[rows] = sampled

    def advance_lengths(self, rows: Rows) -> None:
        self.lengths[rows] = np.minimum(self.lengths[rows] + 1, self.limits[rows])


def _joined(first: np.ndarray, second: list[int], kind: type) -> np.ndarray:
    return np.concatenate([first, np.array(second, dtype=kind)]).astype(kind, copy=False)
