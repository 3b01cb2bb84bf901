"""What a step meant for the requests in it: waits, first tokens, times between tokens, ends.

Follows the reports of one engine. Keeps a few numbers for every open request and forgets them when
it ends. Those who decode in decode_batch share one time between tokens, so a steady step touches none
of them singly. Knows no metric's name and draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.plan import Plan, StepReport
from headway.request import Request

COMPLETED = ("stop", "length")
NEVER = -1.0


@dataclass(slots=True)
class Life:
    """When things happened to a request, in seconds on the engine's clock."""

    arrival: float
    seated: float = NEVER
    first_token: float = NEVER
    num_recomputed: int = 0


@dataclass(slots=True)
class StepStats:
    """What one step brought."""

    now: float
    num_prompt: int = 0  # tokens of prompts that were computed to their end
    num_output: int = 0
    num_recomputed: int = 0
    num_queried: int = 0  # prompt tokens looked up in the prefix cache
    num_hit: int = 0
    firsts: list[float] = field(default_factory=list)  # seconds from arrival to the first token
    gaps: list[tuple[float, int]] = field(default_factory=list)  # between tokens, how often
    ended: list[tuple[Request, Life]] = field(default_factory=list)


class Lives:
    """Everyone who is open, and who had a token when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.open: dict[Request, Life] = {}
        self._clock = clock
        self._last_decode = 0.0
        self._fresh: dict[Request, float] = {}  # decoding, but not in the latest decode step
        self._parked: dict[Request, float] = {}  # preempted after their first token

    def follow(self, report: StepReport) -> StepStats:
        """Take note of a step. Every step must come by, in order."""
        plan = report.plan
        happened = StepStats(report.result.ended or self._clock())
        for request in plan.events.added:
            self.open[request] = Life(request.arrival)
        for preemption in plan.events.preempted:
            self._park(preemption.request)
        for request in (
            *plan.events.aborted,
            *plan.events.aborted_in_flight,
        ):  # they took nothing of this step
            self._fresh.pop(request, None)
        if plan.admitted:
            self._admit(plan, happened)
        if plan.decodes:
            self._decode(plan, happened)
        for chunk in plan.chunks:
            self._compute(
                chunk.request, chunk.is_last and plan.tokens_kept.get(chunk.request, 1), happened
            )
        for request in report.finished:
            self._end(request, happened)
        return happened

    def _park(self, request: Request) -> None:
        life = self.open.get(request)
        if life and life.first_token >= 0:  # twice in a row: the first time counts
            self._parked.setdefault(request, self._fresh.pop(request, self._last_decode))

    def _admit(self, plan: Plan, happened: StepStats) -> None:
        for request, num_cached, _, is_resume in plan.admitted:
            life = self.open.get(request)
            if life and life.seated < 0:
                life.seated = plan.events.schedule_ended
            if not is_resume and request.params.reads_cache:
                happened.num_queried += request.num_prompt
                happened.num_hit += num_cached

    def _decode(self, plan: Plan, happened: StepStats) -> None:
        """One time between tokens for all who were in the latest decode step; others singly."""
        now, deferred = happened.now, set(plan.deferred)
        num_rows, num_tokens = _num_taken(plan)
        late = [request for request in self._fresh if request not in deferred]
        gaps = [(now - self._fresh.pop(request), 1) for request in late]
        gaps.append((now - self._last_decode, num_rows - len(late)))
        gaps.append((0.0, num_tokens - num_rows))  # the others of a multi-step come with the first
        happened.gaps += [gap for gap in gaps if gap[1] > 0]
        for request in deferred:
            if request not in self._parked and request in self.open:
                self._fresh.setdefault(request, self._last_decode)
        happened.num_output += num_tokens
        self._last_decode = now

    def _compute(self, request: Request, has_token: int, happened: StepStats) -> None:
        """Some of a prompt, or of what was preempted, was computed; at its end comes a token."""
        life = self.open.get(request)
        if life is None:
            return
        self._count_recomputed(request, life, happened)
        if not has_token:
            return
        if request.params.pooling is not None:  # its token is not shown: it ends in this step
            life.first_token = happened.now
            happened.num_prompt += request.num_prompt
            return
        happened.num_output += 1
        if life.first_token < 0:
            life.first_token = happened.now
            happened.num_prompt += request.num_prompt
            happened.firsts.append(happened.now - life.arrival)
        elif request in self._parked:
            happened.gaps.append((happened.now - self._parked.pop(request), 1))
        self._fresh[request] = happened.now

    def _count_recomputed(self, request: Request, life: Life, happened: StepStats) -> None:
        num_recomputed = request.history.num_recomputed
        happened.num_recomputed += num_recomputed - life.num_recomputed
        life.num_recomputed = num_recomputed

    def _end(self, request: Request, happened: StepStats) -> None:
        self._fresh.pop(request, None)
        self._parked.pop(request, None)
        if life := self.open.pop(request, None):
            self._count_recomputed(request, life, happened)
            happened.ended.append((request, life))


def _num_taken(plan: Plan) -> tuple[int, int]:
    """Decodes that took at least a token, and tokens that were taken."""
    cut, num_rows, num_steps = plan.tokens_kept, len(plan.decodes), plan.num_steps
    if not cut:
        return num_rows, num_rows * num_steps
    kept = [cut[request] for request in plan.decodes if request in cut]
    return num_rows - kept.count(0), num_rows * num_steps - sum(num_steps - k for k in kept)
