"""The requests past their prompt, advancing together one token at a time.

One shared tick stands for all their lengths. Two calendars say whom a step concerns: who crosses
into a new block (one in block_size) and who reaches its length. Sampled tokens are kept as whole
columns, one per tick, and written to a request when it leaves or is read. So a steady step touches
nobody but those few. Knows nothing of pools, queues or policies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headway.request import STANDING, Pace, Request

Put = Callable[[int], None]
Rows = npt.NDArray[np.intp]
NUM_KEPT = 64  # columns kept before all are written


class DecodeBatch(Pace):
    """Everybody who decodes."""

    __slots__ = (
        "_batch", "_block_size", "_context", "_crossing", "_ends", "_first", "_is_lent", "_kept",
        "_num_delivered", "_rows", "members", "strayed",
    )  # fmt: skip

    def __init__(self, block_size: int, max_num_seqs: int) -> None:
        super().__init__()
        self._block_size = block_size
        self.members: dict[Request, int] = {}  # with their place in the batch
        self.strayed: set[Request] = set()  # left since the plan in flight was made
        self._batch: list[Request] = []
        self._rows: Rows = np.zeros(max_num_seqs, dtype=np.intp)
        self._is_lent = False  # a plan holds batch and rows: copy before changing them
        self._crossing: list[dict[Request, Put]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Request, None]] = {}
        self._context = 0  # sum of `base` over the members
        self._kept = np.zeros((NUM_KEPT, max_num_seqs), dtype=np.intc)
        self._first = self._num_delivered = 0  # ticks: of the first column kept, of the next

    @property
    def context(self) -> int:
        """Tokens in the cache of all members together."""
        return self._context + self.tick * len(self.members)

    @property
    def due(self) -> dict[Request, Put]:
        """Who needs a new block for its next token, with blocks.append to take it."""
        return self._crossing[self.tick % self._block_size]

    def lend(self) -> tuple[list[Request], Rows]:
        """The members and their rows, for a plan to keep."""
        self._is_lent = True
        return self._batch, self._rows[: len(self._batch)]

    def join(self, request: Request) -> None:
        """From now on `num_computed` of the request rises with the tick."""
        self._own()
        place = self.members[request] = len(self._batch)
        self._batch.append(request)
        self._rows[place] = request.row
        request.base -= self.tick
        request.pace, request.written_to = self, self.tick
        self._context += request.base
        self._crossing[-request.base % self._block_size][request] = request.kv.blocks.append
        self._ends.setdefault(self._end_of(request), {})[request] = None

    def leave(self, request: Request) -> None:
        """Stop advancing; `num_computed` stays what it is, tokens in flight find their way."""
        self._own()
        self.write(request)
        place, last = self.members.pop(request), self._batch.pop()
        if last is not request:
            self._batch[place], self.members[last] = last, place
            self._rows[place] = last.row
        del self._crossing[-request.base % self._block_size][request]
        end = self._end_of(request)
        del self._ends[end][request]
        if not self._ends[end]:
            del self._ends[end]
        self._context -= request.base
        request.base += self.tick
        request.pace = STANDING
        self.strayed.add(request)

    def advance(self) -> list[Request]:
        """One token for every member; those who thereby reach their length leave."""
        self.tick += 1
        ended = list(self._ends.get(self.tick, ()))
        for request in ended:
            self.leave(request)
        return ended

    def awaits(self, request: Request) -> bool:
        """Whether the next column delivered is kept for it; one who left and came back may not."""
        return request in self.members and request.written_to <= self._num_delivered

    def deliver(self, rows: Rows, column: npt.ArrayLike) -> None:
        """Keep what the next tick sampled; the rows of those who left take it too, unread."""
        self._kept[self._num_delivered - self._first, rows] = column
        self._num_delivered += 1
        if self._num_delivered - self._first == NUM_KEPT:
            self._write_all()

    def num_kept(self, request: Request) -> int:
        return max(0, self._num_delivered - request.written_to)

    def write(self, request: Request) -> None:
        num = self.num_kept(request)
        if num:
            end = self._num_delivered - self._first
            request.written.frombytes(self._kept[end - num : end, request.row].tobytes())
            request.written_to = self._num_delivered

    def _write_all(self) -> None:
        columns = np.ascontiguousarray(self._kept.T).data.cast("B")
        stride = NUM_KEPT * self._kept.itemsize
        for request in self._batch:
            num = self._num_delivered - request.written_to
            if num > 0:
                end = (request.row + 1) * stride
                request.written.frombytes(columns[end - num * self._kept.itemsize : end])
                request.written_to = self._num_delivered
        self._first = self._num_delivered

    def _own(self) -> None:
        if self._is_lent:
            self._batch, self._rows = self._batch.copy(), self._rows.copy()
            self._is_lent = False

    def _end_of(self, request: Request) -> int:
        """The tick that samples the last token: it is never computed, hence the 1."""
        return request.limit - 1 - request.base
