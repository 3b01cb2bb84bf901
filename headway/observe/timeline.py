"""The request timeline: when each request changed phase, and the statistics of each step.

`Timeline` is the only state machine that follows requests through a run. It reads step records; a
live engine provides them with `record_of`, a trace file with `TraceReader`. Prometheus metrics, the
live page, spans, run summaries and Perfetto files all use its results.

Requests that were part of the previous decode step share one time between tokens. The cost of a
steady decode step therefore does not depend on the number of requests. A request's longest stall is
found when it leaves the batch (see shared_gaps.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from headway.observe.shared_gaps import SharedGaps
from headway.observe.trace import dropped
from headway.plan import Plan, StepReport
from headway.request import Request

Key = TypeVar("Key", bound=Hashable)  # identifies one request of a run
NEVER = -1.0
NONE_DROPPED = (0, 0)


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
    longest_stall: float = 0.0  # its largest time between two tokens; see Timeline.update_stalls
    phases: list[Phase] = field(default_factory=list)

    def enter(self, phase: str, start: float) -> None:
        """Start a phase. With async scheduling a plan may be older than the previous phase."""
        self.phases.append(Phase(phase, max(start, self.phases[-1].start)))


class StepRecord(NamedTuple, Generic[Key]):
    """One completed step: the form that a step report and a trace line have in common."""

    step: int  # -1: events that no step reports
    planned: float
    started: float
    ended: float
    num_running: int
    num_waiting: int
    num_free: int
    num_prefill: int  # prompt tokens computed
    num_decodes: int
    num_steps: int  # decode steps of this plan
    dropped: tuple[int, int]  # decodes that kept no token, sampled tokens that were not kept
    copies: tuple[int, int]  # blocks copied to the host, blocks copied from the host
    swap_in: float  # seconds to copy blocks from the host
    reasons: Iterable[str]  # why requests waited
    added: Sequence[tuple[Key, RequestTimeline]]
    aborted: Sequence[Key]  # before or during the step
    preempted: Sequence[tuple[Key, bool, bool]]  # whether swapped, whether for a priority
    admitted: Sequence[tuple[Key, int, bool]]  # cached tokens, whether admitted before
    chunks: Sequence[tuple[Key, bool, int]]  # whether it gave a token, tokens recomputed so far
    deferred: Sequence[Key]
    finished: Sequence[tuple[Key, str, int, int]]  # reason, output tokens, tokens recomputed


@dataclass(slots=True)
class StepStats(Generic[Key]):
    """What one step changed."""

    now: float  # the end of the step
    num_computed: int = 0  # tokens of the forward passes
    num_prefill: int = 0  # those of them that chunks computed
    num_prompt: int = 0  # tokens of prompts whose computation ended
    num_output: int = 0  # tokens generated; embeddings give none
    num_recomputed: int = 0
    num_admitted: int = 0  # prompt tokens of requests admitted for the first time
    num_queried: int = 0  # those of them that were looked up in the prefix cache
    num_hit: int = 0  # prompt tokens found in the prefix cache
    first_tokens: list[float] = field(
        default_factory=list
    )  # seconds from arrival to the first token
    gaps: list[tuple[float, int]] = field(default_factory=list)  # seconds between tokens, count
    finished: list[tuple[Key, RequestTimeline]] = field(default_factory=list)


class Timeline(Generic[Key]):
    """Follows a run. Keeps the times of each open request and forgets them when it finishes."""

    def __init__(self, started: float = 0.0) -> None:
        self.open: dict[Key, RequestTimeline] = {}
        self._last_decode = started
        # The latest token of decoding requests that were not part of the latest decode step.
        self._last_token: dict[Key, float] = {}
        self._preempted: dict[Key, float] = {}  # the latest token before the preemption
        self._shared = SharedGaps[Key]()  # of the requests of the latest decode step

    def follow(self, record: StepRecord[Key]) -> StepStats[Key]:
        """Apply one step. Every step must be given, in order."""
        num_prefill = record.num_prefill
        stats: StepStats[Key] = StepStats(
            record.ended, num_prefill + record.num_decodes * record.num_steps, num_prefill
        )
        for key, times in record.added:
            times.phases.append(Phase("queued", times.arrival))
            self.open[key] = times
        for key, is_swap, _ in record.preempted:
            self._preempt(key, "swapped" if is_swap else "preempted", record.planned)
        for key in record.aborted:  # an aborted request takes no token of this step
            self._last_token.pop(key, None)
            self._leave(key)
        for key, num_cached, is_resume in record.admitted:
            self._admit(key, num_cached, is_resume, record.planned, stats)
        if record.num_decodes:
            self._decode(record, stats)
        for key, has_token, num_recomputed in record.chunks:
            self._compute(key, has_token, num_recomputed, stats)
        for key, reason, num_output, num_recomputed in record.finished:
            self._finish(key, reason, num_output, num_recomputed, stats)
        return stats

    def update_stalls(self) -> None:
        """Bring `longest_stall` of open requests up to date; it is final when a request finishes."""
        for key in self._shared.keys:
            self._stall(key, self._shared.longest(key))

    def _stall(self, key: Key, seconds: float) -> None:
        times = self.open.get(key)
        if times is not None and seconds > times.longest_stall:
            times.longest_stall = seconds

    def _leave(self, key: Key) -> None:
        """The request does not have the gap of the next decode step."""
        self._stall(key, self._shared.leave(key))

    def _preempt(self, key: Key, phase: str, now: float) -> None:
        times = self.open.get(key)
        if times is None:
            return
        times.enter(phase, now)
        self._leave(key)
        if times.first_token >= 0:  # preempted twice in a row: the earlier time stays
            self._preempted.setdefault(key, self._last_token.pop(key, self._last_decode))

    def _admit(
        self, key: Key, num_cached: int, is_resume: bool, now: float, stats: StepStats[Key]
    ) -> None:
        times = self.open.get(key)
        if times is None:
            return
        times.enter("prefill", now)
        if times.admitted < 0:
            times.admitted = now
        if not is_resume:
            stats.num_admitted += times.num_prompt
            stats.num_queried += times.num_prompt if times.reads_cache else 0
            stats.num_hit += min(num_cached, times.num_prompt)

    def _decode(self, record: StepRecord[Key], stats: StepStats[Key]) -> None:
        """Add one gap for all requests of the latest decode step, and one for each other."""
        now, deferred = stats.now, record.deferred and set(record.deferred)
        num_rows = record.num_decodes - record.dropped[0]
        num_tokens = record.num_decodes * record.num_steps - record.dropped[1]
        for key in deferred:
            if key not in self._preempted and key in self.open:
                self._last_token.setdefault(key, self._last_decode)
                self._leave(key)
        gap = now - self._last_decode
        self._shared.add(gap)
        late = [key for key in self._last_token if key not in deferred] if self._last_token else ()
        for key in late:
            self._add_gap(key, now - self._last_token.pop(key), stats)
            self._shared.join(key)
        if num_rows > len(late):
            stats.gaps.append((gap, num_rows - len(late)))
        if num_tokens > num_rows:  # a multi-step plan returns its tokens together
            stats.gaps.append((0.0, num_tokens - num_rows))
        stats.num_output += num_tokens
        self._last_decode = now

    def _add_gap(self, key: Key, seconds: float, stats: StepStats[Key]) -> None:
        """A gap of one request alone."""
        stats.gaps.append((seconds, 1))
        self._stall(key, seconds)

    def _compute(
        self, key: Key, has_token: bool, num_recomputed: int, stats: StepStats[Key]
    ) -> None:
        """A chunk was computed. The last chunk of the known tokens gives a token."""
        times = self.open.get(key)
        if times is None:
            return
        _count_recomputed(times, num_recomputed, stats)
        if not has_token:
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
        elif key in self._preempted:
            self._add_gap(key, stats.now - self._preempted.pop(key), stats)
        self._last_token[key] = stats.now

    def _finish(
        self, key: Key, reason: str, num_output: int, num_recomputed: int, stats: StepStats[Key]
    ) -> None:
        self._last_token.pop(key, None)
        self._preempted.pop(key, None)
        self._leave(key)
        times = self.open.pop(key, None)
        if times is None:
            return
        times.finished, times.finish_reason, times.num_output = stats.now, reason, num_output
        _count_recomputed(times, num_recomputed, stats)
        stats.finished.append((key, times))


def _count_recomputed(times: RequestTimeline, num_recomputed: int, stats: StepStats[Any]) -> None:
    """Trace lines give the number only at the end; until then they give 0."""
    if num_recomputed > times.num_recomputed:
        stats.num_recomputed += num_recomputed - times.num_recomputed
        times.num_recomputed = num_recomputed


def record_of(report: StepReport) -> StepRecord[Request]:
    """The record of a live step. A steady decode step has no lists to build."""
    plan, result, events = report.plan, report.result, report.plan.events
    return StepRecord(  # in the order of the fields: names would take longer
        plan.step, events.schedule_ended, result.started, result.ended or events.schedule_ended,
        events.num_running, events.num_waiting, events.num_free,
        sum([c.end - c.start for c in plan.chunks]) if plan.chunks else 0,
        len(plan.decodes), plan.num_steps,
        dropped(plan) if plan.tokens_kept else NONE_DROPPED,
        (len(plan.copies_out), len(plan.copies_in)), result.swap_in, _reasons(plan),
        [(r, _times_of(r)) for r in events.added] if events.added else (),
        events.aborted + events.aborted_in_flight,
        [(p.request, p.is_swap, p.is_priority) for p in events.preempted]
        if events.preempted else (),
        [(a.request, a.num_cached, a.is_resume) for a in plan.admitted] if plan.admitted else (),
        _chunks(plan) if plan.chunks else (), plan.deferred,
        [
            (r, r.finish_reason or "abort", r.num_generated, r.history.num_recomputed)
            for r in report.finished
        ] if report.finished else (),
    )  # fmt: skip


def _reasons(plan: Plan) -> Iterable[str]:
    rest = (plan.not_considered.reason,) if plan.not_considered else ()
    return {*rest, *[blocked.reason for blocked in plan.blocked]} if plan.blocked else rest


def _chunks(plan: Plan) -> list[tuple[Request, bool, int]]:
    kept = plan.tokens_kept
    return [
        (c.request, c.is_last and kept.get(c.request, 1) > 0, c.request.history.num_recomputed)
        for c in plan.chunks
    ]


def _times_of(request: Request) -> RequestTimeline:
    params = request.params
    return RequestTimeline(
        request.id, request.arrival, request.num_prompt, params.client, params.deadline,
        params.pooling is not None, params.reads_cache, bool(request.history.resumed),
    )  # fmt: skip
