"""Makes drafts with the draft model on a GPU: decode steps of rows of their own, each in a graph.

A step reads its inputs on the device and leaves its tokens there, so the host waits once for all
drafts of a plan. The block tables are those of the rows' state; lengths and last tokens are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headway.config import Config
from headway.executor.draft_model import DraftModel
from headway.executor.gpu.graphs import Graphs, decode_sizes, padded_rows
from headway.executor.gpu.row_state import DeviceRowState, decode_batch, upload
from headway.executor.gpu.swap import Swapper
from headway.model.devices import is_out_of_memory
from headway.model.kernels.attention.splits import choose_num_splits
from headway.model.kernels.rows import RowTensors, finish
from headway.plan import Draft

Places = npt.NDArray[np.integer]


class DraftSteps:
    """The draft model, its blocks on the host, and the state of the rows that it drafts for."""

    def __init__(self, model: DraftModel, state: DeviceRowState, config: Config) -> None:
        self.model, self.device = model, model.blocks.device
        self.swapper = Swapper(model.blocks, config.num_host_blocks)
        self._block_size, self._spare = config.block_size, state.spare
        most = padded_rows(config.max_num_seqs)
        self.sizes = decode_sizes(config.max_num_seqs, model.decoder.max_kv_heads)
        tables = state.tensors.tables
        self._columns = torch.zeros((4, len(tables)), dtype=torch.int32, device=self.device)
        self._state = RowTensors(tables, *self._columns)
        self._inputs = torch.zeros((3, most), dtype=torch.int64, device=self.device)
        self._row_ids = torch.full((most,), self._spare, dtype=torch.int32, device=self.device)
        self._sampled = torch.zeros(most, dtype=torch.int32, device=self.device)
        self.graphs = Graphs(self.step, self.device)

    def step(self, num_rows: int, num_splits: int) -> None:
        """Compute the next token of every row."""
        row_ids, sampled = self._row_ids[:num_rows], self._sampled[:num_rows]
        columns, decoder = self._inputs[:, :num_rows], self.model.decoder
        batch = decode_batch(row_ids, columns, self._state, self._block_size, num_splits)
        hidden = decoder.forward(batch, self.model.blocks)
        sampled.copy_(decoder.logits(hidden).argmax(-1))
        finish(row_ids, sampled, self._state)

    def try_sizes(self) -> None:
        """Run a step of each size, so that its kernels are compiled and loaded."""
        for size in self.sizes:
            self.step(*size)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all sizes, with padding rows only; every graph runs once, see MixedPass.capture.

        Captures no more if no memory is left for graphs.
        """
        self._row_ids.fill_(self._spare)
        try:
            for done, size in enumerate(self.sizes, start=1):
                self.step(*size)
                if self.graphs.is_enabled:
                    self.graphs.capture(size)
                    self.graphs.run(size)
                progress(done, len(self.sizes))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.graphs.disable()

    def make(self, drafts: Sequence[Draft]) -> npt.NDArray[np.integer]:
        """A DraftMaker; see executor/draft_model.py."""
        starts = np.array([draft.start for draft in drafts])
        counts = np.array([draft.count for draft in drafts])
        self._send(drafts, starts, starts + counts)
        out = self._sampled.new_empty((counts[0], len(drafts)))
        for place, line in enumerate(out):
            num_rows = padded_rows(int(np.count_nonzero(counts > place)))
            heads = self.model.decoder.max_kv_heads
            splits = choose_num_splits(num_rows * heads, starts + place, heads)
            self.graphs.run((num_rows, splits))
            line.copy_(self._sampled[: len(drafts)])
        return out.cpu().numpy()

    def _send(self, drafts: Sequence[Draft], starts: Places, limits: Places) -> None:
        """Send the state of the rows. A row that is at its limit stores nothing."""
        row_ids = np.array([draft.request.row for draft in drafts], dtype=np.int32)
        columns = np.zeros(self._columns.shape, dtype=np.int32)
        last = [(draft.request.output or draft.request.prompt)[-1] for draft in drafts]
        columns[:3, row_ids] = starts, limits, last
        self._columns.copy_(upload(columns, self.device))
        self._row_ids.fill_(self._spare)
        self._row_ids[: len(drafts)].copy_(upload(row_ids, self.device))
