"""The rows' state on the device, in one buffer of 32-bit words that the host updates by patches.

It holds the block tables, lengths, last token and sampling settings of every row. The host sends
one (word, value) pair for each change since the last plan; a steady decode sends nothing. One
extra row belongs to no request: padding rows of a batch use it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.executor.sampling.draw import SamplingSettings
from headway.model.batch import ForwardBatch
from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.model.kernels.rows import RowTensors, start

COLUMNS = ("lengths", "limits", "last", "num_generated", "temperature", "top_k", "top_p", "min_p")
Words = npt.NDArray[np.int32]


class DeviceRowState:
    """The buffer, and tensors that are views of it."""

    def __init__(
        self, num_rows: int, table_width: int, device: torch.device, window_width: int = 0
    ) -> None:
        """`window_width` is that of the table of sliding-window layers; 0 without such layers."""
        self.spare = num_rows  # the row that padding uses; its keys and values are not stored
        self.num_rows, self.width = num_rows + 1, table_width
        # Seeds come first: they have 64 bits.
        self._starts = {name: place * self.num_rows for place, name in enumerate(COLUMNS, start=2)}
        self._table = (2 + len(COLUMNS)) * self.num_rows
        self._window_table = self._table + self.num_rows * table_width
        num_words = self._window_table + self.num_rows * window_width
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._places: list[npt.NDArray[np.int64]] = []
        self._values: list[Words] = []
        column = {name: self.words[at : at + self.num_rows] for name, at in self._starts.items()}
        floats = {name: column[name].view(torch.float32) for name in COLUMNS[4:] if name != "top_k"}
        windows = self.words[self._window_table :].view(self.num_rows, window_width)
        self.tensors = RowTensors(
            tables=self.words[self._table : self._window_table].view(self.num_rows, table_width),
            window_tables=windows if window_width else None,
            **{name: column[name] for name in COLUMNS[:4]},
        )
        self.sampling = SamplingTensors(
            seed=self.words[: 2 * self.num_rows].view(torch.int64),
            top_k=column["top_k"],
            num_generated=column["num_generated"],
            **floats,
        )

    def set_length(self, row: int, length: int) -> None:
        self._put(self._starts["lengths"] + row, [length])

    def set_next(self, row: int, length: int, token: int, num_generated: int) -> None:
        """What a row has after drafts: its tokens in the cache, and the next input."""
        self.set_length(row, length)
        self._put(self._starts["last"] + row, [token])
        self._put(self._starts["num_generated"] + row, [num_generated])

    def set_blocks(self, row: int, first: int, blocks: list[int]) -> None:
        self._put(self._table + row * self.width + first, blocks)

    def set_window_blocks(self, row: int, first: int, blocks: tuple[int, ...]) -> None:
        self._put(self._window_table + row * self.width + first, list(blocks))

    def set_limit(self, row: int, limit: int) -> None:
        self._put(self._starts["limits"] + row, [limit])

    def set_sampling(self, row: int, settings: SamplingSettings) -> None:
        """`settings` is the row's entry in the sampler's settings."""
        self._put(2 * row, np.array([settings["seed"]], dtype=np.uint64).view(np.int32))
        for name, kind in (("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"),
                           ("num_generated", "i4")):  # fmt: skip
            value = np.array([settings[name]]).astype(kind).view(np.int32)
            self._put(self._starts[name] + row, value)

    def _put(self, first: int, values: list[int] | Words) -> None:
        if len(values):
            self._places.append(np.arange(first, first + len(values), dtype=np.int64))
            self._values.append(np.asarray(values, dtype=np.int32))

    def drop(self) -> None:
        """Discard changes that were not sent."""
        self._places, self._values = [], []

    def send(self) -> None:
        """Apply the changes since the last call, after all work that was launched before."""
        if not self._places:
            return
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        self._places, self._values = [], []
        if len(np.unique(places)) < len(places):  # keep only the latest value of a word
            last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]
            places, values = places[last], values[last]
        device = self.words.device
        self.words.scatter_(0, upload(places, device), upload(values, device))


def decode_batch(
    row_ids: Tensor, columns: Tensor, state: RowTensors, block_size: int, num_splits: int
) -> ForwardBatch:
    """The next decode of these rows, read into `columns`: tokens, positions, slots.

    A fourth column has the slots of sliding-window layers. Advances the lengths of the rows.
    """
    start(row_ids, state, block_size, *columns)
    tokens, positions, slots = columns[:3]
    return ForwardBatch(
        tokens_t=tokens, positions_t=positions, slots_t=slots, row_ids_s=row_ids,
        tables_sw=state.tables, starts_s=tokens, ends_s=tokens, sampled_n=tokens,
        num_decodes=len(row_ids), num_splits=num_splits,
    )  # fmt: skip


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
