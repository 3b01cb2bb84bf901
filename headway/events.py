"""What happened to a scheduler: one event for each call, in the order of the calls.

A scheduler gives its events to one function, see `Scheduler.observe`. The calls of a journal can be
repeated with another scheduler, which then gives equal events (record/replay.py). Events refer to
the requests and plans themselves; headway/record writes them as lines of JSON and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headway.config import Config
from headway.plan import Draft, Plan, Preemption, StepResult
from headway.request import Request


@dataclass(slots=True, eq=False)
class Added:
    """Requests entered the queue."""

    requests: Sequence[Request]
    time: float = 0.0  # of this and all events: seconds on the engine's clock, set by the engine


@dataclass(slots=True, eq=False)
class Aborted:
    """A request was ended from outside, in whatever state it was; `finish_reason` says how."""

    request: Request
    time: float = 0.0


@dataclass(slots=True, eq=False)
class Reset:
    """The cached prefixes were forgotten; if forced, running requests were preempted for it."""

    is_forced: bool
    preempted: list[Preemption]
    time: float = 0.0


@dataclass(slots=True, eq=False)
class Reconfigured:
    """The next plan is made with other policies or another token budget."""

    settings: Mapping[str, object]  # as presets.describe gives them
    config: Config | None = None  # None if the event was read from a file
    time: float = 0.0


@dataclass(slots=True, eq=False)
class Answers:
    """What policies answered while a plan was made."""

    num_candidates: dict[Request, int] = field(default_factory=dict)  # by the request preempted
    swap_seconds: dict[Request, tuple[float, float]] = field(default_factory=dict)  # or recompute
    headroom: dict[Request, int] = field(default_factory=dict)  # blocks, at the latest check


@dataclass(slots=True, eq=False)
class Planned:
    """A plan was made. A plan without work is recorded too: the queue may have changed its order.

    If a policy failed, the plan has no work, only the preemptions so far. `Failed` follows, after
    `Completed` if a step is in flight.
    """

    plan: Plan
    num_free: int = 0  # blocks, after planning
    num_running: int = 0
    num_waiting: int = 0
    answers: Answers | None = None  # if the scheduler records them
    has_failed: bool = False
    began: float = 0.0  # seconds on the engine's clock, set by the engine
    time: float = 0.0  # the end of planning
    reaching_limit: list[list[Request]] = field(default_factory=list)  # decoding requests, by step


@dataclass(slots=True, eq=False)
class Completed:
    """The result of the oldest plan in flight was applied; `finished` are the requests it ended."""

    planned: Planned
    result: StepResult
    finished: list[Request]
    time: float = 0.0

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def outputs(self) -> Iterator[tuple[Request, list[int]]]:
        """The tokens that each request gains in this step; none that it has had before."""
        plan, columns = self.plan, self.result.decode_tokens
        for row, request in enumerate(plan.decodes):
            kept = plan.tokens_kept.get(request, plan.num_steps)
            first = _num_repeated(request, kept) if request.history.num_discarded else 0
            if first < kept:
                yield request, [int(column[row]) for column in columns[first:kept]]
        for draft, tokens in zip(plan.drafts, self.result.draft_tokens, strict=True):
            first = _num_repeated(draft.request, len(tokens))
            if tokens[first:]:
                yield draft.request, tokens[first:]
        sampled = (c.request for c in plan.chunks if c.is_last)
        for request, token in zip(sampled, self.result.first_tokens, strict=True):
            if plan.tokens_kept.get(request, 1) and not _num_repeated(request, 1):
                yield request, [token]

    def verified(self) -> Iterator[tuple[Draft, int]]:
        """Drafts with the number of those that became output; none of a request that had ended."""
        for draft, gained in zip(self.plan.drafts, self.result.draft_tokens, strict=True):
            if gained:
                yield draft, len(gained) - 1


def _num_repeated(request: Request, num_gained: int) -> int:
    """How many of the latest tokens were reported before a preemption discarded them."""
    num_before = request.num_generated - num_gained
    return max(0, min(num_gained, request.history.num_discarded - num_before))


@dataclass(slots=True, eq=False)
class Failed:
    """A step failed: requests in flight were ended, and all other running ones preempted.

    All blocks were forgotten, also the copies on the host.
    """

    reason: str
    ended: list[Request]
    preempted: list[Preemption]
    time: float = 0.0


Event = Added | Aborted | Reset | Reconfigured | Planned | Completed | Failed


def ended_by(event: Event) -> Sequence[Request]:
    """The requests that an event ends."""
    match event:
        case Completed():
            return event.finished
        case Aborted():
            return [event.request]
        case Failed():
            return event.ended
    return ()


def preempted_by(event: Event) -> Sequence[Preemption]:
    """The requests that an event preempts."""
    match event:
        case Planned():
            return event.plan.preempted
        case Reset() | Failed():
            return event.preempted
    return ()
