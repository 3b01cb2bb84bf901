"""A job: a request to come, with the length its output will really have.

Knows what a job is made of and how it becomes a request; nothing of files or distributions. A
prompt is kept as runs of token ids and becomes tokens only when its job becomes a request, so a
long workload stays small in memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from headway.executor.simulated import Script
from headway.request import NO_TOKENS, Params, Request

EOS = 0  # ends a job whose output is shorter than its max_tokens
ENDS = frozenset({EOS})
FIRST_TOKEN = 1 << 20  # made-up ids start above every real vocabulary
LAST_TOKEN = (1 << 31) - 1
MAX_TOKENS = 1 << 27  # of one prompt or output; more is taken for a mistake
Pieces = tuple["range | array[int]", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to come. Times are seconds from the start of its workload."""

    id: str
    arrival: float = 0.0
    pieces: Pieces  # of the prompt, in order; none is empty
    num_output: int  # tokens it really generates; the last is EOS unless they are max_tokens
    max_tokens: int  # at least num_output
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    n: int = 1

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.pieces))

    def prompt(self) -> array[int]:
        """The prompt's tokens, made anew by every call."""
        tokens = array("i")
        for piece in self.pieces:
            tokens.extend(piece)
        return tokens

    def params(self, start: float = 0.0) -> Params:
        """What its user asks for, where the workload begins at `start` on the engine's clock."""
        last = self.pieces[-1][-1]  # a token that few others have; as filler it must not end it
        return Params(
            max_tokens=self.max_tokens, client=self.client, priority=self.priority, n=self.n,
            deadline=None if self.deadline is None else start + self.deadline,
            eos_ids=ENDS if self.num_output < self.max_tokens else NO_TOKENS,
            sampling=Script(self.num_output, filler=last if last != EOS else 1, end=EOS),
        )  # fmt: skip

    def request(self, start: float = 0.0) -> Request:
        """The request it becomes; of n samples, the first."""
        return Request(self.id, self.prompt(), self.params(start), arrival=start + self.arrival)


class TokenSpace:
    """Hands out runs of token ids, each once, from FIRST_TOKEN up.

    After two thousand million ids it begins again, one id further every time round: a run may then
    hold ids of an old one, but would have to start with the same one to pass for its prefix.
    """

    def __init__(self) -> None:
        self._next = FIRST_TOKEN
        self._lap = 0
        self._shared: dict[object, list[range]] = {}

    def take(self, count: int) -> range:
        """A run of `count` ids that nobody else has; `count` is at most MAX_TOKENS."""
        if self._next + count > LAST_TOKEN:
            self._lap += 1
            self._next = FIRST_TOKEN + self._lap
        self._next += count
        return range(self._next - count, self._next)

    def skip(self, end: int) -> None:
        """Hand out no id below `end` from now on: they came from elsewhere."""
        self._next = max(self._next, end)

    def shared(self, name: object, count: int) -> list[range]:
        """The first `count` ids of what goes by this name, the same for everyone who asks."""
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
    """The same tokens with adjacent runs made one and empty ones left out."""
    joined: list[range | array[int]] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, range) and isinstance(last, range) and last.stop == piece.start:
            joined[-1] = range(last.start, piece.stop)
        elif piece:
            joined.append(piece)
    return tuple(joined)
