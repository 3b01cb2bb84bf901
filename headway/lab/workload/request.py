"""A request of a workload: when it arrives, its prompt, and how many tokens it generates.

Knows nothing of files or distributions. A prompt is stored as runs of token ids and expanded only
when the request is submitted, so a long workload needs little memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from headway.executor.simulated import Acceptance, Script
from headway.request import NO_TOKENS, Request, RequestParams

EOS = 0  # ends a request whose output is shorter than its max_tokens
ENDS = frozenset({EOS})
FIRST_TOKEN = 1 << 20  # generated ids start above every real vocabulary
LAST_TOKEN = (1 << 31) - 1
MAX_TOKENS = 1 << 27  # of one prompt or output; a larger number is treated as a mistake
Pieces = tuple["range | array[int]", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request to submit. Times are seconds from the start of the workload."""

    id: str
    arrival: float = 0.0
    pieces: Pieces  # runs of the prompt's token ids, in order; none is empty
    num_output: int  # generated tokens; the last one is EOS if there are fewer than max_tokens
    max_tokens: int  # at least num_output
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    n: int = 1
    accept: Acceptance | None = None  # of drafts of its tokens; None: all are wrong

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.pieces))

    def prompt(self) -> array[int]:
        """The token ids of the prompt, built by every call."""
        tokens = array("i")
        for piece in self.pieces:
            if isinstance(piece, range):  # numpy expands a range much faster than array does
                numbers = np.arange(piece.start, piece.stop, piece.step, dtype=np.intc)
                tokens.frombytes(numbers.tobytes())
            else:
                tokens.extend(piece)
        return tokens

    def params(self, start: float = 0.0) -> RequestParams:
        """Its parameters, for a workload that starts at `start` on the engine's clock."""
        last = self.pieces[-1][-1]  # rarely shared, so a good filler; EOS would end the output
        return RequestParams(
            max_tokens=self.max_tokens, client=self.client, priority=self.priority, n=self.n,
            deadline=None if self.deadline is None else start + self.deadline,
            eos_ids=ENDS if self.num_output < self.max_tokens else NO_TOKENS,
            sampling=Script(
                self.num_output, filler=last if last != EOS else 1, end=EOS, accept=self.accept
            ),
        )  # fmt: skip

    def request(self, start: float = 0.0) -> Request:
        """The scheduler's request; with n above 1, its first sample."""
        return Request(self.id, self.prompt(), self.params(start), arrival=start + self.arrival)


class TokenSpace:
    """Allocates runs of unique token ids, from FIRST_TOKEN up.

    After about two billion ids it starts again, one id further each time. A run may then contain
    ids of an old run, but it never starts with the same id, so it cannot match as a prefix.
    """

    def __init__(self) -> None:
        self._next = FIRST_TOKEN
        self._lap = 0
        self._shared: dict[object, list[range]] = {}

    def take(self, count: int) -> range:
        """A run of `count` unused ids; `count` is at most MAX_TOKENS."""
        if self._next + count > LAST_TOKEN:
            self._lap += 1
            self._next = FIRST_TOKEN + self._lap
        self._next += count
        return range(self._next - count, self._next)

    def skip(self, end: int) -> None:
        """Allocate no id below `end` from now on, because a file uses them."""
        self._next = max(self._next, end)

    def shared(self, name: object, count: int) -> list[range]:
        """The first `count` ids of the shared run `name`; every call returns the same ids."""
        known = self._shared.setdefault(name, [])
        left = count - sum(map(len, known))
        if left > 0:
            known.append(self.take(left))
        cut, left = [], count
        for run in known:
            cut.append(run[:left])
            left -= len(cut[-1])
        return [run for run in cut if run]


def join(pieces: list[range | array[int]]) -> Pieces:
    """The same tokens, with adjacent runs merged and empty ones removed."""
    joined: list[range | array[int]] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, range) and isinstance(last, range) and last.stop == piece.start:
            joined[-1] = range(last.start, piece.stop)
        elif piece:
            joined.append(piece)
    return tuple(joined)
