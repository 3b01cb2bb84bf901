"""One pass over decodes and pieces of prompts.

For a small pass the device would wait for the host, which launches hundreds of kernels for it. So
its size is rounded up, with rows of nobody, and when the same size comes again it is captured,
which takes no longer than to launch it: from then on one launch does. Until it is worth a capture,
a very small pass runs in the graph of a larger one. A large pass keeps the device busy for as long
as the host needs.
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
from headway.model.batch import Batch
from headway.model.decoder import Decoder
from headway.model.devices import is_out_of_memory
from headway.model.kernels.rows import start
from headway.model.kernels.splits import MANY, SHARINGS, num_splits_of
from headway.plan import Chunk, Rows

MAX_TOKENS = 8192  # that are captured
MAX_GRAPHS = 192
# Sizes are rounded up to multiples of these: so few more rows take hardly longer. But attention of
# few decodes is shared by more programs, and they may be long.
MIN_DECODES, MIN_TOKENS, FEW_DECODES = 32, 64, 8
# Of one layer: seconds that it takes the host to launch or capture its kernels, and operations that
# a device does in a second, by bytes of a number; of an H200 and its host, and roughly.
CAPTURE, RATES = 0.7e-3, {2: 4e14, 4: 4e13}


class Size(NamedTuple):
    """What decides which kernels run."""

    decodes: int
    tokens: int  # of prompts
    chunks: int
    sharing: int = 1  # see Batch

    @property
    def num_rows(self) -> int:
        return self.decodes + self.tokens

    def holds(self, other: Size) -> bool:
        """Whether what has the other size could run in this one, with more rows of nobody.

        Not with more decodes: their number decides how attention is cut, and theirs may be long.
        """
        is_alike = (self.decodes, self.sharing) == (other.decodes, other.sharing)
        return is_alike and self.tokens >= other.tokens > 0 and self.chunks >= other.chunks


class Inputs(NamedTuple):
    """What a pass reads that the host must send. Decodes come first."""

    longs: Tensor  # int64 [3, T]: tokens, positions, slots
    ints: Tensor  # int32 [3, S + 1]: seats; of chunks, where they start and how long they are then

    @staticmethod
    def room(size: Size, device: torch.device) -> Inputs:
        longs = torch.zeros((3, size.decodes + size.tokens), dtype=torch.int64, device=device)
        width = size.decodes + size.chunks + 1
        return Inputs(longs, torch.zeros((3, width), dtype=torch.int32, device=device))

    def of(self, size: Size) -> Inputs:
        """The part that a pass of this size reads."""
        num_tokens, num_sequences = size.decodes + size.tokens, size.decodes + size.chunks
        return Inputs(self.longs[:, :num_tokens], self.ints[:, : num_sequences + 1])


class Found(NamedTuple):
    """Hidden states, in which prompts follow decodes and those who fill up."""

    hidden: Tensor
    sampled_n: Tensor  # rows whose logits are wanted: decodes, then chunks that are the last
    first: int  # row of the first chunk


class MixedPass:
    """Runs them, and keeps the graphs of those that came again."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: Tensor,
        rows: RowTable,
        seats: DeviceRowState,
        max_tokens: int,
    ) -> None:
        self.decoder, self._blocks, self._rows, self._seats = decoder, blocks, rows, seats
        num_seats, self._most_tokens = len(rows.lengths), min(max_tokens, MAX_TOKENS)
        self._largest = rounded_up(Size(num_seats, self._most_tokens, num_seats))
        self._room = Inputs.room(self._largest, blocks.device)
        width = decoder.config.hidden_size
        self._hidden = decoder.norm.new_empty((most_rows(num_seats, max_tokens), width))
        self.graphs = Graphs(self._step, blocks.device, MAX_GRAPHS)
        self._seen: set[Size] = set()
        self._is_full = False  # there is no memory for more graphs
        self._worth = worth_a_capture(decoder)
        self._lost: Counter[Size] = Counter()  # rows of nobody in larger graphs

    def warm_up(self) -> None:
        """Run passes of nobody, so that their kernels are there.

        The largest is captured: all that come later find room in what it was given.
        """
        if self.decoder.backend.fills_up:
            self.try_sizes()
            with self._room_for_graphs():
                self.graphs.capture(self._largest)
                self.graphs.run(self._largest)

    def try_sizes(self) -> None:
        """A pass of nobody for all kernels that will be needed; the largest is the last."""
        if not self.decoder.backend.fills_up:
            return
        num_seats, num_heads = len(self._rows.lengths), self.decoder.config.num_kv_heads
        for decodes in sorted({rounded_decodes(count) for count in range(num_seats + 1)}):
            for sharing in SHARINGS if decodes * num_heads >= MANY else SHARINGS[:1]:
                self._try(Size(decodes, MIN_TOKENS, 1, sharing))
                if decodes:
                    self._try(Size(decodes, 0, 0, sharing))
        self._try(self._largest)

    def _try(self, size: Size) -> None:
        self._send(np.zeros(0, dtype=np.intp), [], size, self._room.of(size))
        self._step(*size)

    def run(self, rows: Rows, chunks: list[Chunk]) -> Found:
        """All rows decode, all chunks are computed; lengths of seats move on."""
        num_tokens = sum(each.end - each.start for each in chunks)
        size = Size(len(rows), num_tokens, len(chunks))
        fits = size.decodes + size.tokens <= self._most_tokens
        is_small = fits and self.decoder.backend.fills_up
        if is_small:
            size = rounded_up(size)
        num_heads, lengths = self.decoder.config.num_kv_heads, self._rows.lengths[rows]
        size = size._replace(sharing=num_splits_of(size.decodes * num_heads, lengths, num_heads))
        if is_small:
            size = self._fitting(size)
        inputs = self._room.of(size) if is_small else Inputs.room(size, self._blocks.device)
        sampled = self._send(rows, chunks, size, inputs)
        if not is_small:
            return Found(self._forward(size, inputs), sampled, size.decodes)
        self._run(size)
        return Found(self._hidden[: size.num_rows], sampled, size.decodes)

    def _fitting(self, size: Size) -> Size:
        """Its own size, or that of a larger graph while less is lost by that than by a capture.

        So few rows that a capture would pay only after ages are not counted.
        """
        if size in self.graphs:
            return size
        captured = [each for each in self.graphs if isinstance(each, Size) and each.holds(size)]
        larger = [each for each in captured if each.num_rows < self._worth / 2]
        if not larger:
            return size
        least = min(larger, key=lambda each: each.num_rows)
        extra = least.num_rows - size.num_rows
        if extra > self._worth / 64:
            self._lost[size] += extra
        return least if self._is_full or self._lost[size] < self._worth else size

    @contextmanager
    def in_own_graphs(self) -> Iterator[None]:
        """Meanwhile nothing runs in a larger graph: for whoever measures."""
        worth, self._worth = self._worth, 0.0
        try:
            yield
        finally:
            self._worth = worth

    def _run(self, size: Size) -> None:
        if size in self._seen and size not in self.graphs and not self._is_full:
            with self._room_for_graphs():
                self.graphs.capture(size)
                self.graphs.run(size)
                del self._lost[size]  # it may be thrown away and come again
                return
        self.graphs.run(size)
        self._seen.add(size)

    @contextmanager
    def _room_for_graphs(self) -> Iterator[None]:
        """Around a capture: without memory for it, all goes on and nothing more is captured."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._is_full = True

    def _send(self, rows: Rows, chunks: list[Chunk], size: Size, inputs: Inputs) -> Tensor:
        """Fill the inputs but for what decodes read from their seats; the rows to be sampled."""
        batch, spare = self._rows.batch(rows[:0], chunks), self._seats.spare
        columns = (batch.tokens_t, batch.positions_t, batch.slots_t)
        longs = np.zeros((3, size.tokens), dtype=np.int64)
        longs[2] = -1  # rows of nobody are stored nowhere
        for row, column in zip(longs, columns, strict=True):
            row[: len(column)] = column
        count, last = size.decodes, size.decodes + len(batch.tokens_t)
        ints = np.zeros(inputs.ints.shape, dtype=np.int32)
        ints[0], ints[1] = spare, last  # a chunk of nobody has no rows
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
        size = Size(*numbers)
        hidden = self._forward(size, self._room.of(size))
        self._hidden[: len(hidden)] = hidden

    def _forward(self, size: Size, inputs: Inputs) -> Tensor:
        tokens, positions, slots = inputs.longs
        seats_s, starts_s, ends_s = inputs.ints
        count, seats = size.decodes, self._seats.tensors
        start(
            seats_s[:count], seats, self._rows.block_size,
            tokens[:count], positions[:count], slots[:count],
        )  # fmt: skip
        batch = Batch(
            tokens_t=tokens, positions_t=positions, slots_t=slots, tables_sw=seats.tables,
            seats_s=seats_s[:-1], starts_s=starts_s[: size.chunks + 1],
            ends_s=ends_s[: size.chunks], sampled_n=starts_s, num_decodes=count,
            sharing=size.sharing, longest=size.tokens,
        )  # fmt: skip
        return self.decoder.forward(batch, self._blocks)


def worth_a_capture(decoder: Decoder) -> float:
    """Rows that a device computes in the time of a capture."""
    width = decoder.norm.element_size()
    return CAPTURE * decoder.config.num_layers * RATES[width] / (2 * decoder.num_bytes / width)


def most_rows(num_seats: int, max_tokens: int) -> int:
    """Of a pass that is captured."""
    largest = rounded_up(Size(num_seats, min(max_tokens, MAX_TOKENS), 1))
    return largest.decodes + largest.tokens


def rounded_up(size: Size) -> Size:
    """A little larger, so that few sizes come often. A chunk of nobody costs next to nothing."""
    return Size(
        rounded_decodes(size.decodes),
        rounded(size.tokens, MIN_TOKENS, 8),
        4 ** -(-(size.chunks - 1).bit_length() // 2) if size.chunks else 0,
        size.sharing,
    )


def rounded_decodes(count: int) -> int:
    return rounded(count, FEW_DECODES if count <= FEW_DECODES else MIN_DECODES, 2)


def rounded(count: int, least: int, num_steps: int) -> int:
    """To a multiple of `least`, or to one of so many sizes between a power of 2 and the next."""
    power = 1 << max(count - 1, 0).bit_length()
    step = max(least, power // (2 * num_steps))
    return -(-count // step) * step
