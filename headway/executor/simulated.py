"""An executor that computes nothing: a cost function says how long a plan takes.

Time is virtual. A plan starts when the previous one has ended, and waiting for it advances the
clock. Each request follows a script: it samples its filler token, and its end token last. Which
drafts are right follows from the script too, and not from the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headway.plan import Column, Draft, Plan, StepResult
from headway.request import Request, SamplingOptions


class VirtualTime(Protocol):
    """The part of a virtual clock that the executor uses."""

    def now(self) -> float: ...
    def advance_to(self, time: float) -> None: ...


class Acceptance(Protocol):
    """How many of the drafts of a request are right; the same whenever it is asked."""

    @property
    def seed(self) -> int: ...
    def num_right(self, id: str, start: int, count: int) -> int:
        """How many of the `count` drafts after token `start` are right, up to the first wrong one."""
        ...


@dataclass(frozen=True, slots=True)
class Independent:
    """Each token is drafted correctly with the same probability, whatever the tokens before it."""

    share: float
    seed: int = 0

    def num_right(self, id: str, start: int, count: int) -> int:
        places = range(start + 1, start + 1 + count)
        wrong = (n for n, at in enumerate(places) if _drawn(self.seed, id, at) >= self.share)
        return next(wrong, count)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Weights of 0, 1, 2, ... drafts being right; any after the last of these are wrong."""

    weights: tuple[float, ...]
    seed: int = 0

    def num_right(self, id: str, start: int, count: int) -> int:
        drawn = _drawn(self.seed, id, start) * sum(self.weights)
        reached = accumulate(self.weights)
        length = next((n for n, at in enumerate(reached) if drawn < at), len(self.weights) - 1)
        return min(length, count)


def _drawn(seed: int, id: str, place: int) -> float:
    """A number in [0, 1) that depends on these alone."""
    digest = blake2b(f"{seed} {id} {place}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)


@dataclass(frozen=True, slots=True)
class Script(SamplingOptions):
    """The output of a simulated request, carried in `RequestParams.sampling`."""

    num_output: int  # tokens it generates unless a limit stops it earlier, including the end token
    filler: int
    end: int  # the last token
    accept: Acceptance | None = None  # None: all drafts are wrong


@dataclass(slots=True)
class SimulatedHandle:
    """A plan whose end time is known."""

    clock: VirtualTime
    result: StepResult

    def wait(self) -> StepResult:
        self.clock.advance_to(self.result.ended)
        return self.result


class SimulatedExecutor:
    """Needs `seconds(plan)` to run a plan and `host_seconds` of host time to launch it.

    `swap_in(plan)` says how much of the time the copies from the host take.
    """

    def __init__(
        self,
        clock: VirtualTime,
        seconds: Callable[[Plan], float],
        host_seconds: float = 0.0,
        swap_in: Callable[[Plan], float] = lambda _: 0.0,
    ) -> None:
        self._clock, self._seconds = clock, seconds
        self._host_seconds, self._swap_in = host_seconds, swap_in
        self._free_at = 0.0
        self._fillers = np.zeros(1, dtype=np.intc)  # by row
        self._column = 0  # index of the next decode step
        self._ends: dict[int, dict[Request, None]] = {}  # requests that end, by decode step
        self._end_of: dict[Request, int] = {}

    def launch(self, plan: Plan) -> SimulatedHandle:
        launched = self._clock.now() + self._host_seconds
        self._clock.advance_to(launched)
        started = max(launched, self._free_at)
        self._free_at = started + self._seconds(plan)
        columns: list[Column] = [self._sample_decodes(plan)] if plan.decodes else []
        while columns and len(columns) < plan.num_steps:
            columns.append(self._sample_decodes(plan))
        first_tokens = (
            [self._sample_first(c.request, c.end) for c in plan.chunks if c.is_last]
            if plan.chunks
            else []
        )
        swap_in = self._swap_in(plan) if plan.copies_in else 0.0
        result = StepResult(columns, first_tokens, started, self._free_at, swap_in)
        if plan.drafts:
            result.draft_tokens = [self._verify(draft) for draft in plan.drafts]
        return SimulatedHandle(self._clock, result)

    def _sample_decodes(self, plan: Plan) -> npt.NDArray[np.intc]:
        column = self._fillers[plan.rows]
        for request in plan.deferred:
            if request in self._end_of:
                self._end_in(self._end_of[request] + 1, request)
        now = self._column
        self._column += 1
        ending = self._ends.pop(now, None)
        if not ending:
            return column
        for request in ending:
            del self._end_of[request]
        for request, place in plan.places_of(ending).items():
            if not request.is_finished:
                column[place] = _script(request).end
        return column

    def _sample_first(self, request: Request, num_known: int) -> int:
        """Return the first sampled token, and schedule the step of the end token."""
        script, row = _script(request), request.row
        if row >= len(self._fillers):
            self._fillers = np.resize(self._fillers, 2 * row + 1)
        self._fillers[row] = script.filler
        self._cancel_end(request)  # a preempted request is scheduled again
        num_left = script.num_output - (num_known - request.num_prompt) - 1
        if num_left > 0 and _has_end(request, script):
            self._end_in(self._column + num_left - 1, request)
        return script.end if num_left == 0 else script.filler

    def _verify(self, draft: Draft) -> list[int]:
        """The drafts that are right and one token more; the decode step of the end token moves."""
        request, script = draft.request, _script(draft.request)
        accept = script.accept
        num_right = accept.num_right(request.id, draft.start, draft.count) if accept else 0
        tokens = [script.filler] * (num_right + 1)
        num_left = request.num_prompt + script.num_output - 1 - draft.start
        if num_left > 0 and _has_end(request, script):
            if num_left <= len(tokens):
                self._cancel_end(request)
                tokens[num_left - 1 :] = [script.end]
            else:  # the next decode step samples the token after these
                self._end_in(self._column + num_left - len(tokens) - 1, request)
        return tokens

    def _end_in(self, column: int, request: Request) -> None:
        self._cancel_end(request)
        self._ends.setdefault(column, {})[request] = None
        self._end_of[request] = column

    def _cancel_end(self, request: Request) -> None:
        column = self._end_of.pop(request, None)
        if column is not None:
            del self._ends[column][request]
            if not self._ends[column]:
                del self._ends[column]


def _has_end(request: Request, script: Script) -> bool:
    """Whether the end token comes before the limit of the request."""
    return script.num_output < request.limit - request.num_prompt


def _script(request: Request) -> Script:
    script = request.params.sampling
    assert isinstance(script, Script), f"{request} has no script: params.sampling must be a Script"
    return script
