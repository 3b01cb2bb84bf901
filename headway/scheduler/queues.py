"""Who is served first: the waiting requests, kept in the order of a rule, and the ready-made rules.

A rule is a sort key, so the order costs a bisection and not a ranking of everybody at every step.
Rules whose keys drift while requests wait are sorted again before they are walked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from headway.config import Checked, QueueRule, SchedulerView, count, number
from headway.request import Request
from headway.scheduler.policy_calls import call_group, call_key, policy_failed

FRONT = 16  # requests whose drifting keys are looked at in every step


class WaitingQueue:
    """Waiting, preempted and swapped requests, each in its own place."""

    def __init__(self, rule: QueueRule, view: SchedulerView) -> None:
        self.rule = rule
        self._world = view
        self._groups: dict[str, list[tuple[Any, Request]]] = {}
        self._keys: dict[Request, tuple[str, Any]] = {}  # its group, and the key it is sorted by
        self._turns: dict[str, int] = {}  # whose drifting keys are looked at next

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """Everyone, group by group; `walk` gives the order of service."""
        return (request for group in self._groups.values() for _, request in group)

    def _entry(self, request: Request) -> tuple[Any, Request]:
        return (call_key(self.rule, request, self._world), request.history.serial), request

    def group_of(self, request: Request) -> str:
        """Its group; the rule is asked once, so that a request never changes its group."""
        if request.history.group is None:
            request.history.group = call_group(self.rule, request)
        return request.history.group

    def place(self, request: Request) -> Any:
        """Sorts requests, waiting or running, as this queue would serve them."""
        key, group = self._entry(request)[0], self.group_of(request)
        return key if group == ALL else (self._world.service().get(group, 0.0), key)

    def push(self, request: Request) -> None:
        """Insert a request; PolicyError, and nothing changed, if its key cannot be used."""
        entry, name = self._entry(request), self.group_of(request)
        group = self._groups.get(name, [])
        try:
            if group and entry[0] < group[-1][0]:
                insort(group, entry, key=_sort_key)
            else:
                group.append(entry)
        except Exception as error:
            raise policy_failed("queue", f"to compare request {request.id!r}", error) from error
        self._groups[name] = group
        self._keys[request] = name, entry[0]

    def remove(self, request: Request) -> None:
        """Take out a request, also if the order of the keys is not consistent."""
        name, key = self._keys.pop(request)
        group = self._groups[name]
        del group[_position(group, key, request)]
        if not group:
            del self._groups[name]
            self._turns.pop(name, None)

    def walk(self) -> Iterator[Request]:
        """The order of service; the request just yielded may be removed before the next."""
        if self.rule.drifts:
            self._sort_again()
        if len(self._groups) > 1:
            yield from self._walk_in_turn()
            return
        for group in list(self._groups.values()):
            passed = 0
            while passed < len(group):
                length = len(self._keys)
                yield group[passed][1]
                passed += len(self._keys) == length  # it was not taken

    def has_others(self, request: Request) -> bool:
        """Whether somebody of another group waits."""
        return len(self._groups) > (self.group_of(request) in self._groups)

    def walk_within(self, most: float) -> Iterator[Request]:
        """As `walk`, but only who, given all of it, leaves its group served no more than `most`."""
        if self.rule.drifts:
            self._sort_again()
        return self._walk_in_turn(most)

    def _walk_in_turn(self, most: float = inf) -> Iterator[Request]:
        """The group served least first; taking a request adds to what its group was served."""
        service = self._world.service
        heap = [(service().get(n, 0.0), g[0][0], n, 0) for n, g in self._groups.items()]
        heapify(heap)
        while heap:
            served, _, name, passed = heappop(heap)
            group, length = self._groups[name], len(self._keys)
            if served + group[passed][1].num_known > most:
                continue
            yield group[passed][1]
            passed += len(self._keys) == length
            if passed < len(group):
                heappush(heap, (service().get(name, 0.0), group[passed][0], name, passed))

    def _sort_again(self) -> None:
        """Ask for drifted keys again: of those in front every time, of the others in turn."""
        for name, group in self._groups.items():
            turn = self._turns[name] = self._turns.get(name, 0) + FRONT
            if turn >= len(group):
                turn = self._turns[name] = FRONT
            fresh = [self._entry(r) for _, r in (*group[:FRONT], *group[turn : turn + FRONT])]
            before = group.copy()
            del group[turn : turn + FRONT], group[:FRONT]
            try:
                for entry in fresh:
                    insort(group, entry, key=_sort_key)
            except Exception as error:  # a user's keys that do not compare: no request is lost
                group[:] = before
                raise policy_failed("queue", "to compare waiting requests", error) from error
            self._keys.update((request, (name, key)) for key, request in fresh)


def _sort_key(entry: tuple[Any, Request]) -> Any:
    return entry[0]


def _position(group: list[tuple[Any, Request]], key: Any, request: Request) -> int:
    """Where a request is in its group: by bisection, or by search if its key misleads."""
    try:
        place = bisect_left(group, key, key=_sort_key)
    except Exception:  # keys that do not compare
        place = len(group)
    if place < len(group) and group[place][1] is request:
        return place
    return next(place for place, (_, other) in enumerate(group) if other is request)


ALL = "all"  # the one group of rules that do not serve groups in turn


@dataclass(frozen=True)
class Rule(Checked):
    """What the ready-made rules share: one group, keys that stay, nobody preempted."""

    patience: int = count(0, 0)
    drifts = False
    preempts = False

    def group(self, request: Request) -> str:
        return ALL

    def outranks(self, waiting: Request, running: Request) -> bool:
        return False


@dataclass(frozen=True)
class fcfs(Rule):
    """First come, first served. With patience, a blocked head lets that many others past."""

    def key(self, request: Request, view: SchedulerView) -> Any:
        return request.arrival


@dataclass(frozen=True)
class priority(Rule):
    """Lower numbers first; `aging` seconds of waiting are worth one level (0: strictly by level).

    With `preempts`, a blocked request may send running ones of a lower priority back, each of
    them at most `max_preemptions` times.
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
    """Least left to compute first, after cache hits; a token more is worth `aging` seconds."""

    aging: float = number(0.001, 0)
    drifts = True

    def key(self, request: Request, view: SchedulerView) -> Any:
        return view.num_uncached(request) * self.aging + request.arrival


@dataclass(frozen=True)
class deadline(Rule):
    """Earliest deadline first; a request without one counts as due `slack` seconds on."""

    slack: float = number(60.0, 0)

    def key(self, request: Request, view: SchedulerView) -> Any:
        due = request.params.deadline
        return request.arrival + self.slack if due is None else due


@dataclass(frozen=True)
class fair(Rule):
    """The client served least first, by virtual token counters; within a client by arrival."""

    def group(self, request: Request) -> str:
        return f"client {request.params.client}"

    def key(self, request: Request, view: SchedulerView) -> Any:
        return request.arrival


@dataclass(frozen=True)
class custom(Rule):
    """A user's own function (request, view) -> sort key; those in front are asked every step."""

    function: Callable[[Request, SchedulerView], Any] = lambda request, view: request.arrival
    drifts = True

    def key(self, request: Request, view: SchedulerView) -> Any:
        return self.function(request, view)
