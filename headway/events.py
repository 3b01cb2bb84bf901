"""What happened to a scheduler: one event for each call, in the order of the calls.

A scheduler gives its events to one function, see `Scheduler.observe`. The calls of a journal can be
repeated with another scheduler, which then gives equal events (record/replay.py). Events refer to
the requests and plans themselves; record/journal.py writes them as lines of JSON and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.config import Config
from headway.plan import Plan, Preemption, StepResult
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
class Planned:
    """A plan was made. A plan without work is recorded too: the queue may have changed its order."""

    plan: Plan
    time: float = 0.0  # at the end of planning
    began: float = 0.0


@dataclass(slots=True, eq=False)
class Completed:
    """The result of the oldest plan in flight was applied; `finished` are the requests it ended."""

    plan: Plan
    result: StepResult
    finished: list[Request]
    time: float = 0.0


@dataclass(slots=True, eq=False)
class Failed:
    """A step failed: requests in flight were ended, and all other running ones preempted.

    All blocks were forgotten, also the copies on the host. If the failure came from a policy, the
    call that made the plan had begun, and its plan is not recorded.
    """

    reason: str
    while_planning: bool
    ended: list[Request]
    preempted: list[Preemption]
    time: float = 0.0


Event = Added | Aborted | Reset | Reconfigured | Planned | Completed | Failed
