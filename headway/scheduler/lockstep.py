"""The requests past their prompt, advancing together one token at a time.

One shared tick stands for all their lengths. Two calendars say whom a step concerns: who crosses
into a new block (one in block_size) and who reaches its length. A steady step touches nobody else.
Knows nothing of pools, queues or policies.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.request import STANDING, Pace, Request

Put = Callable[[int], None]


class Lockstep(Pace):
    """Everybody who decodes, in the order of joining."""

    __slots__ = ("_block_size", "_context", "_crossing", "_ends", "members")

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self.members: dict[Request, Put] = {}  # with tokens.append, to take sampled tokens
        self._crossing: list[dict[Request, Put]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Request, None]] = {}
        self._context = 0  # sum of `base` over the members

    @property
    def context(self) -> int:
        """Tokens in the cache of all members together."""
        return self._context + self.tick * len(self.members)

    @property
    def due(self) -> dict[Request, Put]:
        """Who needs a new block for its next token, with blocks.append to take it."""
        return self._crossing[self.tick % self._block_size]

    def join(self, request: Request) -> None:
        """From now on `num_computed` of the request rises with the tick."""
        request.base -= self.tick
        request.pace = self
        self._context += request.base
        self.members[request] = request.tokens.append
        self._crossing[-request.base % self._block_size][request] = request.held.blocks.append
        self._ends.setdefault(self._end_of(request), {})[request] = None

    def leave(self, request: Request) -> None:
        """Stop advancing; `num_computed` stays what it is."""
        del self.members[request]
        del self._crossing[-request.base % self._block_size][request]
        end = self._end_of(request)
        del self._ends[end][request]
        if not self._ends[end]:
            del self._ends[end]
        self._context -= request.base
        request.base += self.tick
        request.pace = STANDING

    def advance(self) -> list[Request]:
        """One token for every member; those who thereby reach their length leave."""
        self.tick += 1
        ended = list(self._ends.get(self.tick, ()))
        for request in ended:
            self.leave(request)
        return ended

    def _end_of(self, request: Request) -> int:
        """The tick that samples the last token: it is never computed, hence the 1."""
        return request.limit - 1 - request.base
