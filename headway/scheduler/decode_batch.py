"""The requests past their prompt, which advance together by one token per step.

All lengths are stored relative to one shared counter, `tick`, so a step does not touch each request. Two
tables by tick list the requests that need a new block and those that reach their limit. Sampled
tokens are buffered, one line per tick, and move to a request's output when it leaves or is read.
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
    """Members at one time, and their rows in the same order."""

    requests: list[Request]
    rows: Rows


class DecodeBatch(SharedProgress):
    """All decoding requests."""

    __slots__ = (
        "_base_sum", "_batch", "_block_size", "_buffer", "_due", "_ending", "_first_line",
        "_num_delivered", "left_in_flight", "members",
    )  # fmt: skip

    def __init__(self, block_size: int, max_num_seqs: int) -> None:
        super().__init__()
        self._block_size = block_size
        self.members: dict[Request, int] = {}  # with their rows
        self.left_in_flight: set[Request] = set()  # left since the plan in flight was made
        self._batch: Members | None = None  # None: the members have changed
        self._base_sum = 0  # over the members: num_computed less the tick
        # Members that need a new block, by tick modulo the block size, and those that sample their
        # last token, by tick; both in the order of the members.
        self._due: list[dict[Request, None]] = [{} for _ in range(block_size)]
        self._ending: dict[int, dict[Request, None]] = {}
        self._buffer = np.zeros((NUM_LINES, max_num_seqs), dtype=np.intc)
        self._first_line = self._num_delivered = 0  # ticks of the first line and of the next one

    @property
    def batch(self) -> Members:
        """The members; a plan may keep the lists, as they are never changed in place."""
        if self._batch is None:
            rows = np.fromiter(self.members.values(), np.intp, len(self.members))
            self._batch = Members(list(self.members), rows)
        return self._batch

    @property
    def context(self) -> int:
        """Cached tokens of all members together."""
        return self._base_sum + self.tick * len(self.members)

    def due(self) -> list[Request]:
        """Members that need a new block for their next token."""
        return list(self._due[self.tick % self._block_size])

    def join(self, request: Request) -> None:
        """From now on `num_computed` of the request grows with the tick."""
        self.members[request], self._batch = request.row, None
        request.computed_base -= self.tick
        request.progress, request.flushed_tick = self, self.tick
        self._base_sum += request.computed_base
        self._due[-request.computed_base % self._block_size][request] = None
        self._ending.setdefault(_last_tick(request), {})[request] = None

    def leave(self, request: Request) -> None:
        """The request stops advancing; its token in flight is delivered to it alone."""
        self.flush(request)
        del self.members[request]
        self._batch = None
        self._base_sum -= request.computed_base
        del self._due[-request.computed_base % self._block_size][request]
        ending = self._ending[_last_tick(request)]
        del ending[request]
        if not ending:
            del self._ending[_last_tick(request)]
        request.computed_base += self.tick
        request.progress = NOT_DECODING
        self.left_in_flight.add(request)

    def advance(self) -> list[Request]:
        """One token for each member; returns those that thereby reach their limit, which leave."""
        self.tick += 1
        ended = list(self._ending.get(self.tick, ()))
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
        line = self._buffer[self._num_delivered - self._first_line]
        line[rows] = tokens  # in one index with the line's number it would take longer
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


def _last_tick(member: Request) -> int:
    """The tick that samples its last token, which is never computed, hence the 1."""
    return member.limit - 1 - member.computed_base
