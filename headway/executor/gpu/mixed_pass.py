"""Runs one pass over decodes and prompt chunks.

The host launches hundreds of kernels per pass, so in a small pass the device would wait for the
host. A small pass is therefore padded to one of a fixed set of sizes, each captured as a CUDA graph
at warm-up: it is then one launch. A large pass keeps the device busy while the host launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.executor.draft_model import DraftModel
from headway.executor.gpu.graphs import Graphs
from headway.executor.gpu.row_state import DeviceRowState, upload
from headway.executor.row_table import RowTable
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.model.devices import is_out_of_memory
from headway.model.kernels.attention.splits import choose_num_splits, mixed_num_splits, split_counts
from headway.model.kernels.rows import RowTensors, start
from headway.plan import Chunk, Draft, Rows

MAX_CAPTURED_TOKENS = 8192  # of a captured pass
MAX_CAPTURED_CHUNKS = 256
MIN_CHUNK = 4  # padded passes have room for one chunk per 4 tokens
# Sizes are rounded up to multiples of these, because a few more rows take hardly longer. A pass
# with few decodes is rounded less: their attention is split further, and they may be long.
MIN_DECODES, MIN_TOKENS, FEW_DECODES = 32, 64, 8
ALIGNED = 16  # rows of the inputs start at multiples of 16 numbers: Triton compiles one kernel only
# For one layer: seconds that the host takes to launch its kernels, on a busy host; and operations
# per second of the device by bytes per number. Approximate figures of an H200 and its host.
LAUNCH_SECONDS, FLOPS = 1e-3, {2: 6e14, 4: 4e13}


class PassSize(NamedTuple):
    """The size of a pass; it decides which kernels run."""

    decodes: int
    tokens: int  # prompt tokens
    chunks: int
    num_splits: int = 1  # see ForwardBatch.num_splits


class PassInputs(NamedTuple):
    """The inputs of a pass that the host sends. Decodes come first."""

    # int64 [3, T]: tokens, positions, slots; [4, T] with slots of sliding-window layers
    longs: Tensor
    ints: Tensor  # int32 [3, S + 1]: row ids; starts of the chunks; ends of the chunks

    @staticmethod
    def allocate(size: PassSize, device: torch.device, num_columns: int = 3) -> PassInputs:
        num_tokens, width = size.decodes + size.tokens, size.decodes + size.chunks + 1
        longs = torch.zeros((num_columns, _aligned(num_tokens)), dtype=torch.int64, device=device)
        ints = torch.zeros((3, _aligned(width)), dtype=torch.int32, device=device)
        return PassInputs(longs[:, :num_tokens], ints[:, :width])

    def view_for(self, size: PassSize) -> PassInputs:
        """The part of the buffers that a pass of this size reads."""
        num_tokens, num_sequences = size.decodes + size.tokens, size.decodes + size.chunks
        return PassInputs(self.longs[:, :num_tokens], self.ints[:, : num_sequences + 1])


class MixedPass:
    """Runs mixed passes, the small ones in graphs."""

    def __init__(
        self,
        decoder: Decoder,
        both_blocks: tuple[Tensor, Tensor | None],
        rows: RowTable,
        state: DeviceRowState,
        max_num_batched_tokens: int,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`both_blocks` are the KV blocks, and those of sliding-window layers.

        A `draft_model` computes every pass too.
        """
        self._draft_model = draft_model
        self.decoder, self._rows, self._state = decoder, rows, state
        blocks, self._window_blocks = self._blocks, _ = both_blocks
        self._num_columns = 3 if self._window_blocks is None else 4
        num_rows = len(rows.lengths)
        self._max_tokens = max_captured_tokens(decoder, max_num_batched_tokens)
        self._largest = PassSize(
            round_up_decodes(num_rows, True), *round_up_chunks(self._max_tokens, 1)
        )
        self._inputs = self._allocate(self._largest)
        max_rows = self._largest.decodes + self._largest.tokens
        self._hidden = decoder.norm.new_empty((max_rows, decoder.config.hidden_size))
        self.graphs = Graphs(self._step, blocks.device)

    @property
    def sizes(self) -> list[PassSize]:
        """All sizes of small passes, largest first."""
        num_heads = self.decoder.max_kv_heads
        return captured_sizes(len(self._rows.lengths), self._max_tokens, num_heads)

    def try_sizes(self) -> None:
        """Run a pass of padding of each size, so that its kernels are compiled and loaded."""
        if self.decoder.backend.supports_padding:
            for size in self.sizes:
                self._send(np.zeros(0, dtype=np.intp), (), (), size, self._inputs.view_for(size))
                self._step(*size)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture all sizes, which must have run before; stop if no memory is left for graphs.

        Every graph runs once, because the driver allocates some of its memory then. A rank of a
        group cannot stop, because the others would wait for it.
        """
        if not (self.decoder.backend.supports_padding and self.graphs.is_enabled):
            return
        sizes = self.sizes
        try:
            for num_done, size in enumerate(sizes, start=1):
                self.graphs.capture(size)
                self.graphs.run(size)
                progress(num_done, len(sizes))
        except RuntimeError as error:
            if self.decoder.shard is not None or not is_out_of_memory(error):
                raise

    def run(
        self, rows: Rows, chunks: Sequence[Chunk], drafts: Sequence[Draft] = ()
    ) -> tuple[Tensor, Tensor, int]:
        """Run all decodes, drafts and chunks, and advance the decodes' lengths on the device.

        Returns the hidden states (decodes, padding, drafts, then chunks), the rows to sample
        (decodes, all of the drafts, then last chunks), and the row of the first draft or chunk.
        """
        size, is_small = self._size(rows, [*drafts, *chunks])
        if not is_small:
            inputs = self._allocate(size)
            sampled = self._send(rows, chunks, drafts, size, inputs)
            return self._forward(size, inputs), sampled, size.decodes
        sampled = self._send(rows, chunks, drafts, size, self._inputs.view_for(size))
        self.graphs.run(size)
        return self._hidden[: size.decodes + size.tokens], sampled, size.decodes

    def _allocate(self, size: PassSize) -> PassInputs:
        return PassInputs.allocate(size, self._blocks.device, self._num_columns)

    def _size(self, rows: Rows, spans: Sequence[Chunk | Draft]) -> tuple[PassSize, bool]:
        """The size to run, and whether it is one of the captured ones."""
        num_tokens = sum(each.end - each.start for each in spans)
        num_decodes, num_chunks, is_small = len(rows), len(spans), False
        if self.decoder.backend.supports_padding:
            rounded = round_up_chunks(num_tokens, num_chunks)
            is_small = rounded[0] <= self._largest.tokens and num_chunks <= MAX_CAPTURED_CHUNKS
            num_decodes = round_up_decodes(num_decodes, is_small and num_chunks > 0)
            if is_small:
                num_tokens, num_chunks = rounded
        num_heads = self.decoder.max_kv_heads
        num_programs = num_decodes * num_heads
        if num_tokens:
            num_splits = mixed_num_splits(num_programs)
        else:
            num_splits = choose_num_splits(num_programs, self._rows.lengths[rows], num_heads)
        return PassSize(num_decodes, num_tokens, num_chunks, num_splits), is_small

    def _send(
        self, rows: Rows, chunks: Sequence[Chunk], drafts: Sequence[Draft], size: PassSize,
        inputs: PassInputs,
    ) -> Tensor:  # fmt: skip
        """Send all inputs except those that decodes read from their rows; return rows to sample."""
        batch, spare = self._rows.batch(rows[:0], chunks, drafts), self._state.spare
        spans: list[Chunk | Draft] = [*drafts, *chunks]
        columns = [batch.tokens_t, batch.positions_t, batch.slots_t]
        if batch.windowed is not None:
            columns.append(batch.windowed.slots_t)
        longs = np.zeros((len(columns), size.tokens), dtype=np.int64)
        longs[2:] = -1  # padding is not stored
        for row, column in zip(longs, columns, strict=True):
            row[: len(column)] = column
        count, last = size.decodes, size.decodes + len(batch.tokens_t)
        ints = np.zeros(inputs.ints.shape, dtype=np.int32)
        ints[0], ints[1] = spare, last  # a padding chunk has no rows
        ints[0, : len(rows)] = rows
        ints[0, count : count + len(spans)] = [span.request.row for span in spans]
        ints[1, : len(spans) + 1] = batch.starts_s.numpy() + count
        ints[2, : len(spans)] = batch.ends_s
        inputs.ints.copy_(upload(ints, self._blocks.device))
        sampled = np.concatenate([np.arange(len(rows)), batch.sampled_n.numpy() + count])
        sent = upload(np.concatenate([longs.ravel(), sampled]), self._blocks.device)
        inputs.longs[:, count:] = sent[: longs.size].view(longs.shape)
        return sent[longs.size :]

    def _step(self, *numbers: int) -> None:
        size = PassSize(*numbers)
        hidden = self._forward(size, self._inputs.view_for(size))
        self._hidden[: len(hidden)] = hidden

    def _forward(self, size: PassSize, inputs: PassInputs) -> Tensor:
        tokens, positions, slots, *window_slots = inputs.longs
        row_ids_s, starts_s, ends_s = inputs.ints
        count, state = size.decodes, self._state.tensors
        start(row_ids_s[:count], state, self._rows.block_size, *inputs.longs[:, :count])
        batch = ForwardBatch(
            tokens_t=tokens, positions_t=positions, slots_t=slots, tables_sw=state.tables,
            row_ids_s=row_ids_s[:-1], starts_s=starts_s[: size.chunks + 1],
            ends_s=ends_s[: size.chunks], sampled_n=starts_s, num_decodes=count,
            num_splits=size.num_splits, longest=size.tokens,
        )  # fmt: skip
        add_windowed(batch, window_slots, state, self._rows.window)
        if self._draft_model is not None:
            self._draft_model.compute(batch)
        return self.decoder.forward(batch, self._blocks, window_blocks=self._window_blocks)


def add_windowed(
    batch: ForwardBatch, slots_t: list[Tensor], state: RowTensors, window: int | None
) -> None:
    """Describe the batch for sliding-window layers too, if the model has any: then one tensor of
    slots is given."""
    if state.window_tables is not None:
        (slots,) = slots_t
        tables = state.window_tables
        batch.windowed = replace(batch, slots_t=slots, tables_sw=tables, window=window)


def max_captured_tokens(decoder: Decoder, max_num_batched_tokens: int) -> int:
    """Prompt tokens above which the device computes for longer than the host launches."""
    width = decoder.norm.element_size()
    shard = decoder.shard  # ranks must agree, so they use the mean of all ranks
    model, size = (shard.model, shard.size) if shard else (decoder.config, 1)
    num_params = model.num_params / size if shard else decoder.num_bytes / width
    num_unused = model.num_params - model.num_used()  # of experts that a token does not choose
    row_seconds = 2 * (num_params - num_unused / size) / FLOPS[width]
    enough = int(LAUNCH_SECONDS * decoder.config.num_layers / row_seconds)
    return min(max_num_batched_tokens, MAX_CAPTURED_TOKENS, max(enough, MIN_TOKENS))


def captured_sizes(num_rows: int, max_tokens: int, num_kv_heads: int) -> list[PassSize]:
    """The sizes of all small passes: few, because each takes 10 to 20 ms to capture."""
    mixed = [
        PassSize(decodes, *each, mixed_num_splits(decodes * num_kv_heads))
        for decodes in {round_up_decodes(count, True) for count in range(num_rows + 1)}
        for each in {round_up_chunks(count, 1) for count in range(1, max_tokens + 1)}
    ]
    alone = [
        PassSize(decodes, 0, 0, num_splits)
        for decodes in {round_up_decodes(count, False) for count in range(1, num_rows + 1)}
        for num_splits in split_counts(decodes * num_kv_heads)
    ]
    return sorted(mixed + alone, key=lambda size: (size.decodes + size.tokens, size), reverse=True)


def round_up_decodes(count: int, is_coarse: bool) -> int:
    """Decodes of the smallest padded pass; coarse sizes are for captured passes with chunks."""
    least = FEW_DECODES if count <= FEW_DECODES else MIN_DECODES
    return round_up(count, least, 1 if is_coarse else 2)


def round_up_chunks(num_tokens: int, num_chunks: int) -> tuple[int, int]:
    """Tokens and chunks of the smallest padded pass; a padding chunk costs almost nothing."""
    if not num_chunks:
        return 0, 0
    tokens = round_up(max(num_tokens, MIN_CHUNK * num_chunks), MIN_TOKENS, 4)
    return tokens, min(tokens // MIN_CHUNK, MAX_CAPTURED_CHUNKS)


def round_up(count: int, least: int, num_steps: int) -> int:
    """Round up to a multiple of `least`, or to one of `num_steps` sizes per power of 2."""
    power = 1 << max(count - 1, 0).bit_length()
    step = max(least, power // (2 * num_steps))
    return -(-count // step) * step


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
