"""The executor's row table: block table, length and last token of every running request.

Only a plan's admissions and new blocks change it. A step therefore costs as much as these changes
plus a few array operations over the rows that take part. Decodes of the same rows, step after step,
use the same arrays again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from headway.model.batch import ForwardBatch
from headway.plan import Chunk, Draft, Plan, Rows
from headway.request import Request


@dataclass(slots=True, eq=False)
class LatestDecodes:
    """The latest batch, if it had no chunks. Its tensors share memory with these arrays."""

    batch: ForwardBatch
    rows: Rows
    columns: tuple[np.ndarray, ...]  # tokens, positions and slots
    ends: np.ndarray
    tables: np.ndarray
    last_positions: np.ndarray  # that each row may have
    num_left: int  # steps for which the tables are wide enough
    is_outdated: bool = False  # a row has a new block


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
        self._latest: LatestDecodes | None = None

    def add_request(self, request: Request) -> None:
        row, blocks = request.row, request.kv.blocks
        self._latest = None
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.limits[row] = request.limit - 1

    def grow(self, plan: Plan) -> None:
        for request, block in plan.new_blocks:
            self.grow_one(request.row, block)
        for request, first, blocks in plan.window_blocks:
            self.set_window_blocks(request.row, first, blocks)

    def set_window_blocks(self, row: int, first: int, blocks: tuple[int, ...]) -> None:
        self.window_tables[row, first : first + len(blocks)] = blocks

    def grow_one(self, row: int, block: int) -> None:
        self.tables[row, self.num_blocks[row]] = block
        self.num_blocks[row] += 1
        if self._latest is not None:
            self._latest.is_outdated = True

    def batch(
        self, rows: Rows, chunks: Sequence[Chunk], drafts: Sequence[Draft] = ()
    ) -> ForwardBatch:
        """Build the batch: decodes first, one token each, then the drafts, then the chunks.

        A row at its limit still decodes with the others, but its key and value are not stored.
        Returns the same object again, with other values, for the same rows without chunks.
        """
        latest = self._latest
        if (
            latest is not None
            and latest.rows is rows
            and latest.num_left
            and not (chunks or drafts)
        ):
            self._update(latest)
            return latest.batch
        columns, num_rows = self._decodes(rows), len(rows)
        starts, sampled = np.arange(num_rows + 1, dtype=np.int32), np.arange(num_rows)
        ends, row_ids = (columns[1] + 1).astype(np.int32), rows
        spans: list[Draft | Chunk] = [*drafts, *chunks]
        if spans:
            pieces = [*map(self._draft, drafts), *map(self._chunk, chunks)]
            columns = tuple(map(np.concatenate, zip(columns, *pieces, strict=True)))
            lengths = np.array([span.end - span.start for span in spans])
            starts = _joined(starts, num_rows + np.cumsum(lengths))
            ends = _joined(ends, [span.end for span in spans])
            row_ids = _joined(rows, [span.request.row for span in spans])
            sampled = np.arange(starts[num_rows + len(drafts)])  # decodes, and all of the drafts
            is_last = np.array([chunk.is_last for chunk in chunks], dtype=bool)
            sampled = _joined(sampled, starts[num_rows + len(drafts) + 1 :][is_last] - 1)
        tokens, positions, slots = map(torch.from_numpy, columns)
        longest = int(ends.max(initial=1))
        width = -(-longest // self.block_size)
        tables = self.tables[row_ids, :width]
        batch = ForwardBatch(
            tokens_t=tokens,
            positions_t=positions,
            slots_t=slots,
            tables_sw=torch.from_numpy(tables),
            starts_s=torch.from_numpy(starts),
            ends_s=torch.from_numpy(ends),
            sampled_n=torch.from_numpy(sampled),
        )
        if self.window is not None:
            batch.windowed = self._windowed(batch, row_ids, np.repeat(row_ids, np.diff(starts)))
        self._latest = None
        if not spans and self.window is None:
            last_positions, num_left = self.limits[rows] - 1, width * self.block_size - longest
            self._latest = LatestDecodes(
                batch, rows, columns, ends, tables, last_positions, num_left
            )
        return batch

    def _update(self, latest: LatestDecodes) -> None:
        """Write the values of the next step into the arrays of the latest one."""
        rows, size, (tokens, positions, slots) = latest.rows, self.block_size, latest.columns
        self.last.take(rows, out=tokens)
        lengths = self.lengths[rows]
        np.minimum(lengths, latest.last_positions, out=positions)
        blocks, offsets = np.divmod(positions, size)
        np.multiply(self.tables[rows, blocks], size, out=slots, dtype=np.int64)
        slots += offsets
        slots[lengths > latest.last_positions] = -1
        np.add(positions, 1, out=latest.ends, dtype=np.int32, casting="unsafe")
        latest.num_left -= 1
        if latest.is_outdated:
            latest.tables[:] = self.tables[rows, : latest.tables.shape[1]]
            latest.is_outdated = False

    def _decodes(self, rows: Rows) -> tuple[np.ndarray, ...]:
        """Token, position and slot of each row's next token."""
        size, lengths, limits = self.block_size, self.lengths[rows], self.limits[rows]
        positions = np.minimum(lengths, limits - 1)
        slots = self.tables[rows, positions // size].astype(np.int64) * size + positions % size
        slots[lengths >= limits] = -1
        return self.last[rows], positions, slots

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
        request = chunk.request
        positions, slots = self._places(request.row, chunk.start, chunk.end)
        slots[: chunk.store_from - chunk.start] = -1  # the shared block holds these already
        tokens = np.array(request.tokens[chunk.start : chunk.end], dtype=np.int64)
        return tokens, positions, slots

    def _draft(self, draft: Draft) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        request = draft.request
        last = (request.output or request.prompt)[-1]
        tokens = np.array([last, *draft.tokens], dtype=np.int64)
        return tokens, *self._places(request.row, draft.start, draft.end)

    def _places(self, row: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions [start, end) and their slots."""
        positions = np.arange(start, end, dtype=np.int64)
        slots = self.tables[row, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        return positions, slots

    def branch(self) -> RowTable:
        """A table with the same blocks, whose lengths and last tokens change on their own.

        Its batches have nothing for sliding-window layers.
        """
        own = copy(self)
        own.window, own._latest = None, None
        own.lengths, own.last = self.lengths.copy(), self.last.copy()
        return own

    def accept(self, draft: Draft, tokens: list[int]) -> None:
        """Keep what was computed before the last of these tokens, which is the next input."""
        row = draft.request.row
        self.lengths[row], self.last[row] = draft.start + len(tokens), tokens[-1]
        self.num_blocks[row] = -(-self.lengths[row] // self.block_size)

    def advance(self, rows: Rows, sampled: np.ndarray) -> None:
        """Advance every decode by one token, except rows that are at their limit."""
        self.advance_lengths(rows)
        self.last[rows] = sampled

    def advance_lengths(self, rows: Rows) -> None:
        self.lengths[rows] = np.minimum(self.lengths[rows] + 1, self.limits[rows])


def _joined(first: np.ndarray, second: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([first, np.asarray(second, dtype=first.dtype)])
