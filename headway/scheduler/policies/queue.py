"""Queue rules: a sort key for each waiting request; the lowest is served first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from headway.checks import Checked, count, number, policy
from headway.config import ALL, SchedulerView
from headway.request import Request


@dataclass(frozen=True)
class Rule(Checked):
    """Defaults of the ready-made rules: by arrival, one group, stable keys, no preemption."""

    _: KW_ONLY  # the first number of a rule is its own: MyRule(5)
    max_overtakes: int = count(0, 0)
    keys_change = False
    preempts = False

    def key(self, request: Request, view: SchedulerView) -> Any:
        return request.arrival

    def group(self, request: Request) -> str:
        return ALL

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False


@dataclass(frozen=True)
class fcfs(Rule):
    """First come, first served. A blocked request may be overtaken `max_overtakes` times."""

    max_overtakes: int = count(0, 0)  # also by position


@dataclass(frozen=True)
class priority(Rule):
    """Lower numbers first; `aging` seconds of waiting are worth one level (0: strictly by level).

    With `preempts`, a blocked request may preempt running ones of a lower priority, each of them
    at most `max_preemptions` times.
    """

    aging: float = number(60.0, 0)
    preempts: bool = False
    max_preemptions: int = count(2, 0)

    def key(self, request: Request, view: SchedulerView) -> Any:
        if self.aging:
            return request.params.priority * self.aging + request.arrival
        return request.params.priority, request.arrival

    def outranks(self, waiting: Request, running: Request) -> bool:
        return (
            self.preempts
            and waiting.params.priority < running.params.priority
            and running.history.num_priority_preemptions < self.max_preemptions
        )


@dataclass(frozen=True)
class shortest_first(Rule):
    """Fewest tokens left to compute first, cache hits deducted.

    Each token counts as arriving `aging` seconds later.
    """

    aging: float = number(0.001, 0)
    keys_change = True

    def key(self, request: Request, view: SchedulerView) -> Any:
        return view.num_uncached(request) * self.aging + request.arrival


@dataclass(frozen=True)
class earliest_deadline(Rule):
    """Earliest deadline first; without one, a request is due `slack` seconds after its arrival."""

    slack: float = number(60.0, 0)

    def key(self, request: Request, view: SchedulerView) -> Any:
        due = request.params.deadline
        return request.arrival + self.slack if due is None else due


@dataclass(frozen=True)
class fair(Rule):
    """The client with the least service first; within a client, by arrival."""

    max_overtakes: int = count(0, 0)  # also by position

    def group(self, request: Request) -> str:
        return f"client {request.params.client}"


@dataclass(frozen=True)
class custom(Rule):
    """A user's function (request, view) -> sort key; its keys are computed again while requests wait."""

    function: Callable[[Request, SchedulerView], Any] = policy(lambda r, _: r.arrival)
    keys_change = True

    def key(self, request: Request, view: SchedulerView) -> Any:
        return self.function(request, view)
