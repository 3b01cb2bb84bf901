"""The request timeline: when each request changed phase, and the statistics of each step.

`Timeline` is the only state machine that follows requests through a run. It reads the events of a
live engine or of a journal file. Prometheus metrics, the live page, spans, run summaries and
Perfetto files all use its results.

Requests that were part of the previous decode step share one time between tokens. The cost of a
steady decode step therefore does not depend on the number of requests. A request's longest stall is
found when it leaves the batch (see shared_gaps.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    Reset,
    ended_by,
    preempted_by,
)
from headway.plan import NONE_DROPPED, Admission, Chunk, Plan, Preemption
from headway.record.shared_gaps import SharedGaps
from headway.request import Request

NEVER = -1.0


class Phase(NamedTuple):
    """One phase of a request and its start in seconds. The next phase ends it."""

    name: str  # queued, prefill, decode, preempted or swapped
    start: float


@dataclass(slots=True, eq=False)
class RequestTimeline:
    """What is known about one request; times are seconds on the engine's clock."""

    id: str
    arrival: float
    num_prompt: int
    client: str = ""
    deadline: float | None = None
    is_pooling: bool = False
    reads_cache: bool = True
    is_resumed: bool = False  # another engine gave its first token
    admitted: float = NEVER  # the first admission
    first_token: float = NEVER
    finished: float = NEVER
    finish_reason: str = ""
    num_output: int = 0  # set when the request finishes
    num_recomputed: int = 0
    most_computed: int = 0  # tokens, before a preemption; see History.max_num_computed
    longest_stall: float = 0.0  # its largest time between two tokens; see Timeline.update_stalls
    phases: list[Phase] = field(default_factory=list)

    def enter(self, phase: str, start: float) -> None:
        """Start a phase. With async scheduling a plan may be older than the previous phase."""
        self.phases.append(Phase(phase, max(start, self.phases[-1].start)))


@dataclass(slots=True)
class StepStats:
    """What an event changed; the whole step, if the event completes one."""

    now: float  # the end of the step
    num_computed: int = 0  # tokens of the forward passes
    num_prefill: int = 0  # those of them that chunks computed
    num_prompt: int = 0  # tokens of prompts whose computation ended
    num_output: int = 0  # tokens generated; embeddings give none
    num_recomputed: int = 0
    num_admitted: int = 0  # prompt tokens of requests admitted for the first time
    num_queried: int = 0  # those of them that were looked up in the prefix cache
    num_hit: int = 0  # prompt tokens found in the prefix cache
    first_tokens: list[float] = field(default_factory=list)  # seconds after the arrivals
    gaps: list[tuple[float, int]] = field(default_factory=list)  # seconds between tokens, count
    num_draft_steps: int = 0  # drafts of a request that were verified; it had not ended
    num_drafted: int = 0  # tokens of these drafts
    num_accepted: int = 0  # those of them that became output
    finished: list[tuple[Request, RequestTimeline]] = field(default_factory=list)


NOTHING = StepStats(0.0)  # what most events change


class Timeline:
    """Follows a run. Keeps the times of each open request and forgets them when it finishes."""

    def __init__(self, started: float = 0.0) -> None:
        self.open: dict[Request, RequestTimeline] = {}
        self._last_decode = started
        # The latest token of decoding requests that were not part of the latest decode step.
        self._last_token: dict[Request, float] = {}
        self._preempted: dict[Request, float] = {}  # the latest token before the preemption
        self._shared = SharedGaps[Request]()  # of the requests of the latest decode step
        self._stats: dict[int, StepStats] = {}  # of the steps in flight, by number
        # Preemptions by a plan that was made while another was in flight: their time, and what
        # happened. The plan in flight may still give a token to the request.
        self._later: list[tuple[float, Preemption]] = []

    def follow(self, event: Event) -> StepStats:
        """Apply one event. Every event must be given, in order."""
        if type(event) is Planned:  # first the two of every step, and faster than by `match`
            self._plan(event)
        elif type(event) is Completed:
            return self._complete(event)
        elif isinstance(event, Added):
            self.open.update((request, _times_of(request)) for request in event.requests)
        elif isinstance(event, Aborted | Failed | Reset):
            return self._interrupt(event)
        return NOTHING

    def _plan(self, event: Planned) -> None:
        plan = event.plan
        if plan.preempted:
            self._later += [(event.time, each) for each in plan.preempted]
        if self._later and not self._stats:
            self._preempt_later()
        if plan.is_empty:
            return
        stats = self._stats[plan.step] = StepStats(0.0, 0, plan.num_prefill)
        for admission in plan.admitted:
            self._admit(admission, event.time, stats)
        for chunk in plan.chunks:
            self._count_recomputed(chunk, stats)

    def _complete(self, event: Completed) -> StepStats:
        plan, result = event.planned.plan, event.result
        stats = self._stats.pop(plan.step, None) or StepStats(0.0, 0, plan.num_prefill)
        stats.now = result.ended or event.time
        stats.num_computed = stats.num_prefill + len(plan.decodes) * plan.num_steps
        if plan.decodes:
            self._decode(plan, stats)
        if plan.drafts:
            self._verify(event, stats)
        for chunk in plan.chunks:
            if chunk.is_last and plan.tokens_kept.get(chunk.request, 1) > 0:
                self._sample(chunk.request, stats)
        for request in event.finished:
            self._finish(request, stats)
        if self._later:
            self._preempt_later()
        return stats

    def _interrupt(self, event: Event) -> StepStats:
        """Requests end or are preempted between the results of steps."""
        stats = StepStats(event.time)
        self._later += [(event.time, each) for each in preempted_by(event)]
        self._preempt_later()
        for request in ended_by(event):
            self._finish(request, stats)
        if isinstance(event, Failed):
            self._stats.clear()
        return stats

    def update_stalls(self) -> None:
        """Bring `longest_stall` of open requests up to date; it is final when a request finishes."""
        for key in self._shared.keys:
            self._stall(key, self._shared.longest(key))

    def _stall(self, request: Request, seconds: float) -> None:
        times = self.open.get(request)
        if times is not None and seconds > times.longest_stall:
            times.longest_stall = seconds

    def _leave(self, request: Request) -> None:
        """The request does not have the gap of the next decode step."""
        self._stall(request, self._shared.leave(request))

    def _preempt_later(self) -> None:
        for now, preemption in self._later:
            self._preempt(now, preemption)
        self._later.clear()

    def _preempt(self, now: float, preemption: Preemption) -> None:
        request = preemption.request
        times = self.open.get(request)
        if times is None:
            return
        times.enter("swapped" if preemption.is_swap else "preempted", now)
        times.most_computed = max(times.most_computed, preemption.num_lost)
        self._leave(request)
        if times.first_token >= 0:  # preempted twice in a row: the earlier time stays
            last = self._last_token.pop(request, self._last_decode)
            self._preempted.setdefault(request, last)

    def _admit(self, admission: Admission, now: float, stats: StepStats) -> None:
        times = self.open.get(admission.request)
        if times is None:
            return
        times.enter("prefill", now)
        if times.admitted < 0:
            times.admitted = now
        if not admission.is_resume:
            stats.num_admitted += times.num_prompt
            stats.num_queried += times.num_prompt if times.reads_cache else 0
            stats.num_hit += min(admission.num_cached, times.num_prompt)

    def _count_recomputed(self, chunk: Chunk, stats: StepStats) -> None:
        times = self.open.get(chunk.request)
        if times is not None and times.most_computed > chunk.start:
            num_recomputed = min(chunk.end, times.most_computed) - chunk.start
            times.num_recomputed += num_recomputed
            stats.num_recomputed += num_recomputed

    def _decode(self, plan: Plan, stats: StepStats) -> None:
        """Add one gap for all requests of the latest decode step, and one for each other."""
        now, absent = stats.now, _absent(plan) if plan.deferred or plan.drafts else ()
        dropped = plan.dropped if plan.tokens_kept else NONE_DROPPED
        num_rows = len(plan.decodes) - dropped[0]
        num_tokens = len(plan.decodes) * plan.num_steps - dropped[1]
        for request in absent:
            if request not in self._preempted and request in self.open:
                self._last_token.setdefault(request, self._last_decode)
                self._leave(request)
        gap = now - self._last_decode
        self._shared.add(gap)
        late = [r for r in self._last_token if r not in absent] if self._last_token else ()
        for request in late:
            self._add_gap(request, now - self._last_token.pop(request), stats)
            self._shared.join(request)
        if num_rows > len(late):
            stats.gaps.append((gap, num_rows - len(late)))
        if num_tokens > num_rows:  # a multi-step plan returns its tokens together
            stats.gaps.append((0.0, num_tokens - num_rows))
        stats.num_output += num_tokens
        self._last_decode = now

    def _verify(self, event: Completed, stats: StepStats) -> None:
        """Add one gap for each request with drafts; what it gains comes together."""
        stats.num_computed += event.plan.num_drafted
        for draft, num_accepted in event.verified():
            request = draft.request
            self._leave(request)
            last = self._last_token.get(request, self._last_decode)
            self._add_gap(request, stats.now - last, stats)
            self._last_token[request] = stats.now
            stats.num_draft_steps += 1
            stats.num_drafted += draft.count
            stats.num_accepted += num_accepted
        if stats.num_accepted:
            stats.gaps.append((0.0, stats.num_accepted))
        stats.num_output += stats.num_draft_steps + stats.num_accepted

    def _add_gap(self, request: Request, seconds: float, stats: StepStats) -> None:
        """A gap of one request alone."""
        stats.gaps.append((seconds, 1))
        self._stall(request, seconds)

    def _sample(self, request: Request, stats: StepStats) -> None:
        """The last chunk of the known tokens gives a token."""
        times = self.open.get(request)
        if times is None:
            return
        times.enter("decode", stats.now)
        is_first = times.first_token < 0
        if is_first:
            times.first_token = stats.now
            stats.num_prompt += times.num_prompt
        if times.is_pooling:  # the sampled token is not part of the result
            return
        stats.num_output += 1
        if is_first and not times.is_resumed:
            stats.first_tokens.append(stats.now - times.arrival)
        elif request in self._preempted:
            self._add_gap(request, stats.now - self._preempted.pop(request), stats)
        self._last_token[request] = stats.now

    def _finish(self, request: Request, stats: StepStats) -> None:
        self._last_token.pop(request, None)
        self._preempted.pop(request, None)
        self._leave(request)
        times = self.open.pop(request, None)
        if times is None:
            return
        times.finished, times.finish_reason = stats.now, request.finish_reason or "abort"
        times.num_output = request.num_generated
        stats.finished.append((request, times))


def _absent(plan: Plan) -> set[Request]:
    """Requests past their prompt that are not in the decode step of a plan."""
    return {*plan.deferred, *(draft.request for draft in plan.drafts)}


def _times_of(request: Request) -> RequestTimeline:
    params = request.params
    return RequestTimeline(
        request.id, request.arrival, request.num_prompt, params.client, params.deadline,
        params.pooling is not None, params.reads_cache, bool(request.history.resumed),
        phases=[Phase("queued", request.arrival)],
    )  # fmt: skip
