"""The requests past their prompt, which advance together by one token per step.

All lengths are stored relative to one shared counter, `tick`, so a step does not touch each request. Arrays
indexed by row tell which of them need a new block and which reach their limit. Sampled tokens are
buffered, one line per tick, and move to a request's output when it leaves or when they are read.
Knows nothing of pools, queues or policies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.plan import Rows
from headway.request import NOT_DECODING, Request, SharedProgress

NUM_LINES = 64  # of the buffer; when it is full, all tokens move to their requests


class Members(NamedTuple):
    """Members at one time, and numbers for each of them in the same order."""

    requests: list[Request]
    rows: Rows
    phases: Rows  # the tick, modulo the block size, at which it needs a new block
    last_ticks: Rows  # the tick that samples its last token
    next_end: int  # the earliest of `last_ticks`

    def where(self, mask: npt.NDArray[np.bool_]) -> list[Request]:
        requests = self.requests
        return [requests[place] for place in mask.nonzero()[0].tolist()]


class DecodeBatch(SharedProgress):
    """All decoding requests."""

    __slots__ = (
        "_base", "_base_sum", "_batch", "_block_size", "_buffer", "_first_line", "_last_tick",
        "_num_delivered", "left_in_flight", "members",
    )  # fmt: skip

    def __init__(self, block_size: int, max_num_seqs: int) -> None:
        super().__init__()
        self._block_size = block_size
        self.members: dict[Request, None] = {}
        self.left_in_flight: set[Request] = set()  # left since the plan in flight was made
        self._batch: Members | None = None  # None: the members have changed
        self._base = np.zeros(max_num_seqs, dtype=np.intp)  # by row: num_computed less the tick
        self._base_sum = 0  # over the members
        self._last_tick = np.zeros(max_num_seqs, dtype=np.intp)  # by row: samples the last token
        self._buffer = np.zeros((NUM_LINES, max_num_seqs), dtype=np.intc)
        self._first_line = self._num_delivered = 0  # ticks of the first line and of the next one

    @property
    def batch(self) -> Members:
        """The members; a plan may keep the lists, as they are never changed in place."""
        if self._batch is None:
            rows = np.array([r.row for r in self.members], dtype=np.intp)
            phases, last_ticks = -self._base[rows] % self._block_size, self._last_tick[rows]
            next_end = int(np.minimum.reduce(last_ticks)) if len(rows) else -1
            self._batch = Members(list(self.members), rows, phases, last_ticks, next_end)
        return self._batch

    @property
    def context(self) -> int:
        """Cached tokens of all members together."""
        return self._base_sum + self.tick * len(self.members)

    def due(self) -> list[Request]:
        """Members that need a new block for their next token."""
        batch = self.batch
        return batch.where(batch.phases == self.tick % self._block_size)

    def join(self, request: Request) -> None:
        """From now on `num_computed` of the request grows with the tick."""
        self.members[request], self._batch = None, None
        request.computed_base -= self.tick
        request.progress, request.flushed_tick = self, self.tick
        self._base[request.row] = request.computed_base
        self._base_sum += request.computed_base
        # The last token is sampled but never computed, hence the 1.
        self._last_tick[request.row] = request.limit - 1 - request.computed_base

    def leave(self, request: Request) -> None:
        """The request stops advancing; its token in flight is delivered to it alone."""
        self.flush(request)
        del self.members[request]
        self._batch = None
        self._base_sum -= request.computed_base
        request.computed_base += self.tick
        request.progress = NOT_DECODING
        self.left_in_flight.add(request)

    def advance(self) -> list[Request]:
        """One token for each member; returns those that thereby reach their limit, which leave."""
        self.tick += 1
        batch = self.batch
        if batch.next_end != self.tick:
            return []
        ended = batch.where(batch.last_ticks == self.tick)
        for request in ended:
            self.leave(request)
        return ended

    def expects_next(self, request: Request) -> bool:
        """True if the next line has a token for the request.

        False for a request that left the batch and rejoined after that line was planned.
        """
        return request in self.members and request.flushed_tick <= self._num_delivered

    def deliver(self, rows: Rows, tokens: npt.ArrayLike) -> None:
        """Buffer the tokens of the next tick; nothing reads those of rows that have left."""
        self._buffer[self._num_delivered - self._first_line, rows] = tokens
        self._num_delivered += 1
        if self._num_delivered - self._first_line == NUM_LINES:
            self._flush_all()

    def num_buffered(self, request: Request) -> int:
        return max(0, self._num_delivered - request.flushed_tick)

    def flush(self, request: Request) -> None:
        num_tokens = self.num_buffered(request)
        if num_tokens:
            end = self._num_delivered - self._first_line
            tokens = self._buffer[end - num_tokens : end, request.row]
            request.flushed_tokens.frombytes(tokens.tobytes())
            request.flushed_tick = self._num_delivered

    def _flush_all(self) -> None:
        by_row, itemsize = self._buffer.T.tobytes(), self._buffer.itemsize
        for request in self.members:
            num_tokens = self._num_delivered - request.flushed_tick
            if num_tokens > 0:
                end = (request.row + 1) * NUM_LINES * itemsize
                request.flushed_tokens.frombytes(by_row[end - num_tokens * itemsize : end])
                request.flushed_tick = self._num_delivered
        self._first_line = self._num_delivered
