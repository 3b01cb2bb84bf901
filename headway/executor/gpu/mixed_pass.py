"""Runs one pass over decodes and prompt chunks.

The host launches hundreds of kernels per pass, so in a small pass the device would wait for the
host. A small pass is therefore padded to a rounded size. When the same size comes again, it is
captured as a CUDA graph, which takes no longer than launching it; from then on it is one launch.
Until a capture is worth its cost, a very small pass runs in the graph of a larger one. A large pass
keeps the device busy while the host launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.executor.gpu.graphs import Graphs
from headway.executor.gpu.row_state import DeviceRowState, upload
from headway.executor.row_table import RowTable
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.model.devices import is_out_of_memory
from headway.model.kernels.rows import start
from headway.model.kernels.splits import MANY, SPLIT_COUNTS, choose_num_splits
from headway.plan import Chunk, Rows

MAX_CAPTURED_TOKENS = 8192  # of a captured pass
MAX_GRAPHS = 192
# Sizes are rounded up to multiples of these, because a few more rows take hardly longer. A pass
# with few decodes is rounded less: their attention is split further, and they may be long.
MIN_DECODES, MIN_TOKENS, FEW_DECODES = 32, 64, 8
# For one layer: seconds that the host takes to launch or capture its kernels, and the device's
# operations per second by bytes per number. Approximate figures of an H200 and its host.
CAPTURE_SECONDS, FLOPS = 0.7e-3, {2: 4e14, 4: 4e13}


class PassSize(NamedTuple):
    """The size of a pass; it decides which kernels run."""

    decodes: int
    tokens: int  # prompt tokens
    chunks: int
    num_splits: int = 1  # see ForwardBatch.num_splits

    @property
    def num_rows(self) -> int:
        return self.decodes + self.tokens

    def holds(self, other: PassSize) -> bool:
        """Whether a pass of the other size can run in this one, with more padding.

        The number of decodes must be equal: it decides how attention is split.
        """
        is_alike = (self.decodes, self.num_splits) == (other.decodes, other.num_splits)
        return is_alike and self.tokens >= other.tokens > 0 and self.chunks >= other.chunks


class PassInputs(NamedTuple):
    """The inputs of a pass that the host sends. Decodes come first."""

    longs: Tensor  # int64 [3, T]: tokens, positions, slots
    ints: Tensor  # int32 [3, S + 1]: row ids; starts of the chunks; ends of the chunks

    @staticmethod
    def allocate(size: PassSize, device: torch.device) -> PassInputs:
        longs = torch.zeros((3, size.decodes + size.tokens), dtype=torch.int64, device=device)
        width = size.decodes + size.chunks + 1
        return PassInputs(longs, torch.zeros((3, width), dtype=torch.int32, device=device))

    def view_for(self, size: PassSize) -> PassInputs:
        """The part of the buffers that a pass of this size reads."""
        num_tokens, num_sequences = size.decodes + size.tokens, size.decodes + size.chunks
        return PassInputs(self.longs[:, :num_tokens], self.ints[:, : num_sequences + 1])


class PassOutput(NamedTuple):
    """Hidden states of a pass: decodes, padding, then chunks."""

    hidden: Tensor
    sampled_n: Tensor  # rows to sample: decodes, then last chunks
    first: int  # row of the first chunk


class MixedPass:
    """Runs mixed passes, and keeps the graphs of sizes that came more than once."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: Tensor,
        rows: RowTable,
        state: DeviceRowState,
        max_num_batched_tokens: int,
    ) -> None:
        self.decoder, self._blocks, self._rows, self._state = decoder, blocks, rows, state
        num_rows = len(rows.lengths)
        self._max_tokens = min(max_num_batched_tokens, MAX_CAPTURED_TOKENS)
        self._largest = round_up_size(PassSize(num_rows, self._max_tokens, num_rows))
        self._inputs = PassInputs.allocate(self._largest, blocks.device)
        max_rows = max_captured_rows(num_rows, max_num_batched_tokens)
        self._hidden = decoder.norm.new_empty((max_rows, decoder.config.hidden_size))
        self.graphs = Graphs(self._step, blocks.device, MAX_GRAPHS)
        self._seen: set[PassSize] = set()
        self._is_out_of_memory = False  # no memory is left for more graphs
        self._capture_cost = capture_cost_in_rows(decoder)
        self._padding_cost: Counter[PassSize] = Counter()  # padding rows computed, by size

    def warm_up(self) -> None:
        """Run passes of padding only, so that their kernels are loaded.

        The largest pass is captured, so that later captures find enough memory in the pool.
        """
        if self.decoder.backend.supports_padding:
            self.try_sizes()
            with self._tolerate_no_memory():
                self.graphs.capture(self._largest)
                self.graphs.run(self._largest)

    def try_sizes(self) -> None:
        """Run a pass of padding for each combination of kernels; the largest comes last."""
        if not self.decoder.backend.supports_padding:
            return
        num_rows, num_heads = len(self._rows.lengths), self.decoder.max_kv_heads
        for decodes in sorted({round_up_decodes(count) for count in range(num_rows + 1)}):
            for num_splits in SPLIT_COUNTS if decodes * num_heads >= MANY else SPLIT_COUNTS[:1]:
                self._try(PassSize(decodes, MIN_TOKENS, 1, num_splits))
                if decodes:
                    self._try(PassSize(decodes, 0, 0, num_splits))
        self._try(self._largest)

    def _try(self, size: PassSize) -> None:
        self._send(np.zeros(0, dtype=np.intp), [], size, self._inputs.view_for(size))
        self._step(*size)

    def run(self, rows: Rows, chunks: list[Chunk]) -> PassOutput:
        """Run all decodes and chunks, and advance the rows' lengths on the device."""
        num_tokens = sum(each.end - each.start for each in chunks)
        size = PassSize(len(rows), num_tokens, len(chunks))
        fits = size.decodes + size.tokens <= self._max_tokens
        is_small = fits and self.decoder.backend.supports_padding
        if is_small:
            size = round_up_size(size)
        num_heads, lengths = self.decoder.max_kv_heads, self._rows.lengths[rows]
        size = size._replace(
            num_splits=choose_num_splits(size.decodes * num_heads, lengths, num_heads)
        )
        if is_small:
            size = self._choose_size(size)
        inputs = (
            self._inputs.view_for(size)
            if is_small
            else PassInputs.allocate(size, self._blocks.device)
        )
        sampled = self._send(rows, chunks, size, inputs)
        if not is_small:
            return PassOutput(self._forward(size, inputs), sampled, size.decodes)
        self._run(size)
        return PassOutput(self._hidden[: size.num_rows], sampled, size.decodes)

    def _choose_size(self, size: PassSize) -> PassSize:
        """Return the pass's own size, or that of a larger graph while padding costs less.

        Padding that a capture could hardly ever pay back is not counted.
        """
        if size in self.graphs:
            return size
        captured = [each for each in self.graphs if isinstance(each, PassSize) and each.holds(size)]
        larger = [each for each in captured if each.num_rows < self._capture_cost / 2]
        if not larger:
            return size
        smallest = min(larger, key=lambda each: each.num_rows)
        extra = smallest.num_rows - size.num_rows
        if extra > self._capture_cost / 64:
            self._padding_cost[size] += extra
        return (
            smallest
            if self._is_out_of_memory or self._padding_cost[size] < self._capture_cost
            else size
        )

    @contextmanager
    def in_own_graphs(self) -> Iterator[None]:
        """Run nothing in a larger graph meanwhile, so that measurements are exact."""
        cost, self._capture_cost = self._capture_cost, 0.0
        try:
            yield
        finally:
            self._capture_cost = cost

    def _run(self, size: PassSize) -> None:
        if size in self._seen and size not in self.graphs and not self._is_out_of_memory:
            with self._tolerate_no_memory():
                self.graphs.capture(size)
                self.graphs.run(size)
                del self._padding_cost[size]  # the graph may be evicted and the size may come again
                return
        self.graphs.run(size)
        self._seen.add(size)

    @contextmanager
    def _tolerate_no_memory(self) -> Iterator[None]:
        """Guard a capture: if it runs out of memory, go on without further captures.

        Ranks of a group cannot: all of them must choose the same sizes.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.decoder.shard is not None:
                raise
            self._is_out_of_memory = True

    def _send(self, rows: Rows, chunks: list[Chunk], size: PassSize, inputs: PassInputs) -> Tensor:
        """Send all inputs except those that decodes read from their rows; return rows to sample."""
        batch, spare = self._rows.batch(rows[:0], chunks), self._state.spare
        columns = (batch.tokens_t, batch.positions_t, batch.slots_t)
        longs = np.zeros((3, size.tokens), dtype=np.int64)
        longs[2] = -1  # padding is not stored
        for row, column in zip(longs, columns, strict=True):
            row[: len(column)] = column
        count, last = size.decodes, size.decodes + len(batch.tokens_t)
        ints = np.zeros(inputs.ints.shape, dtype=np.int32)
        ints[0], ints[1] = spare, last  # a padding chunk has no rows
        ints[0, : len(rows)] = rows
        ints[0, count : count + len(chunks)] = [chunk.request.row for chunk in chunks]
        ints[1, : len(chunks) + 1] = batch.starts_s.numpy() + count
        ints[2, : len(chunks)] = batch.ends_s
        inputs.ints.copy_(upload(ints, self._blocks.device))
        sampled = np.concatenate([np.arange(len(rows)), batch.sampled_n.numpy() + count])
        sent = upload(np.concatenate([longs.ravel(), sampled]), self._blocks.device)
        inputs.longs[:, count:] = sent[: longs.size].view(3, size.tokens)
        return sent[longs.size :]

    def _step(self, *numbers: int) -> None:
        size = PassSize(*numbers)
        hidden = self._forward(size, self._inputs.view_for(size))
        self._hidden[: len(hidden)] = hidden

    def _forward(self, size: PassSize, inputs: PassInputs) -> Tensor:
        tokens, positions, slots = inputs.longs
        row_ids_s, starts_s, ends_s = inputs.ints
        count, state = size.decodes, self._state.tensors
        start(
            row_ids_s[:count], state, self._rows.block_size,
            tokens[:count], positions[:count], slots[:count],
        )  # fmt: skip
        batch = ForwardBatch(
            tokens_t=tokens, positions_t=positions, slots_t=slots, tables_sw=state.tables,
            row_ids_s=row_ids_s[:-1], starts_s=starts_s[: size.chunks + 1],
            ends_s=ends_s[: size.chunks], sampled_n=starts_s, num_decodes=count,
            num_splits=size.num_splits, longest=size.tokens,
        )  # fmt: skip
        return self.decoder.forward(batch, self._blocks)


def capture_cost_in_rows(decoder: Decoder) -> float:
    """How many rows the device computes in the time of one capture."""
    width = decoder.norm.element_size()
    shard = decoder.shard  # ranks must agree, so they use the mean of all ranks
    num_params = shard.model.num_params / shard.size if shard else decoder.num_bytes / width
    row_flops = 2 * num_params
    return CAPTURE_SECONDS * decoder.config.num_layers * FLOPS[width] / row_flops


def max_captured_rows(num_rows: int, max_num_batched_tokens: int) -> int:
    """The maximum number of rows of a captured pass."""
    largest = round_up_size(PassSize(num_rows, min(max_num_batched_tokens, MAX_CAPTURED_TOKENS), 1))
    return largest.decodes + largest.tokens


def round_up_size(size: PassSize) -> PassSize:
    """Round a size up, so that few sizes occur. A padding chunk costs almost nothing."""
    return PassSize(
        round_up_decodes(size.decodes),
        round_up(size.tokens, MIN_TOKENS, 8),
        4 ** -(-(size.chunks - 1).bit_length() // 2) if size.chunks else 0,
        size.num_splits,
    )


def round_up_decodes(count: int) -> int:
    return round_up(count, FEW_DECODES if count <= FEW_DECODES else MIN_DECODES, 2)


def round_up(count: int, least: int, num_steps: int) -> int:
    """Round up to a multiple of `least`, or to one of `num_steps` sizes per power of 2."""
    power = 1 << max(count - 1, 0).bit_length()
    step = max(least, power // (2 * num_steps))
    return -(-count // step) * step
