"""Queries to a fleet: which replicas answer, and how their answers become one.

A query that concerns the whole fleet goes to all replicas. Any other goes to one, always the first
by name, because a viewer or a trial sends several queries to the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from headway.engine.messages import FromLoop, Query, QueryResult
from headway.engine.queries import (
    AskEach,
    EngineLoad,
    ExplainQueue,
    FindRequest,
    GetLoad,
    GetMetrics,
    GetProblem,
    GetSnapshot,
    ResetPrefixCache,
)
from headway.fleet.replica import Replica, UseResult

Answers = Mapping[str, Any]  # by replica name
Combine = Callable[[Answers], Any]
NO_REPLICAS = "no replica is connected"


@dataclass(slots=True, eq=False)
class PendingQuery:
    """A query that some replicas have not answered yet."""

    number: int  # of the caller
    combine: Combine
    num_left: int
    needs_answers: bool  # False: it has a result even without any
    answers: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def result(self) -> QueryResult:
        """Replicas that failed are left out, unless all have."""
        if self.needs_answers and not self.answers:
            problem = _by_replica(self.errors, "replica", "; ") or NO_REPLICAS
            return QueryResult(self.number, None, problem)
        return QueryResult(self.number, self.combine(dict(sorted(self.answers.items()))))


class FleetQueries:
    """Sends queries to replicas and combines their answers."""

    def __init__(self, replicas: dict[str, Replica], emit: Callable[[FromLoop], None]) -> None:
        self.local: dict[type[Query[Any]], Callable[[], Any]] = {}  # answered without a replica
        self._combine: dict[type[Query[Any]], Combine] = {
            AskEach: dict,
            ExplainQueue: lambda answers: _by_replica(answers, "Replica", "\n\n"),
            FindRequest: _latest_move,
            GetLoad: _combine_loads,
            GetProblem: _combine_problems,
            GetSnapshot: _combine_snapshots,
            ResetPrefixCache: lambda answers: all(answers.values()),
        }
        self.numbers: Callable[[], dict[str, float]] = dict  # of the metrics of the fleet
        self.replicas, self._emit = replicas, emit
        self.next_number = 1  # of a query to a replica; numbers only grow

    def ask(self, query: Query[Any]) -> None:
        kind = type(query)
        if kind in self.local:
            self._emit(QueryResult(query.number, self.local[kind]()))
            return
        targets = [self.replicas[name] for name in sorted(self.replicas)]
        combine = self._combine.get(kind)
        if isinstance(query, GetMetrics):
            combine = partial(self._combine_metrics, query.prefix)
        if combine is None:
            targets, combine = targets[:1], lambda answers: next(iter(answers.values()))
        has_default = kind in (GetLoad, GetProblem) and not targets
        needs_answers = kind is not GetMetrics and not has_default
        pending = PendingQuery(query.number, combine, len(targets), needs_answers)
        if not targets:
            self._emit(pending.result())
        for replica in targets:
            asked = query.query if isinstance(query, AskEach) else query
            self.ask_one(replica, asked, partial(self._add, pending, replica.name))

    def ask_one(self, replica: Replica, query: Query[Any], use: UseResult) -> None:
        number = self.take_number()
        replica.asked[number] = use
        replica.post(replace(query, number=number))

    def take_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def receive(self, replica: Replica, message: QueryResult) -> None:
        """Use the answer of a replica; one that nothing waits for is dropped."""
        # All that was sent before the query has arrived, too.
        replica.answered = max(replica.answered, message.number)
        if (use := replica.asked.pop(message.number, None)) is not None:
            use(message)

    def fail(self, replica: Replica, reason: str) -> None:
        """A replica is gone: it answers no query any more."""
        while replica.asked:
            number, use = replica.asked.popitem()
            use(QueryResult(number, None, reason))

    def _add(self, pending: PendingQuery, name: str, answer: QueryResult) -> None:
        if answer.error is None:
            pending.answers[name] = answer.value
        else:
            pending.errors[name] = answer.error
        pending.num_left -= 1
        if not pending.num_left:
            self._emit(pending.result())

    def _combine_metrics(self, prefix: str, answers: Answers) -> str:
        from headway.fleet.merge import merge_metrics

        numbers = {name.removeprefix("num_"): n for name, n in self.numbers().items()}
        return merge_metrics(answers, numbers, prefix)


def _by_replica(texts: Mapping[str, str], prefix: str, separator: str = "\n") -> str:
    return separator.join(f"{prefix} {name}: {text}" for name, text in texts.items())


def _combine_loads(answers: Answers) -> EngineLoad:
    loads: list[EngineLoad] = [*answers.values()]
    num_running = sum(load.running for load in loads)
    num_waiting = sum(load.waiting for load in loads)
    return EngineLoad(num_running, num_waiting, max((load.age for load in loads), default=0.0))


def _combine_problems(answers: Answers) -> str | None:
    """A fleet is healthy as long as one replica is."""
    return (_by_replica(answers, "replica") or NO_REPLICAS) if all(answers.values()) else None


def _latest_move(answers: Answers) -> tuple[str, str] | None:
    """The replica that got a request last, and its id there: see OpenRequest.replica_id."""
    found = [(name, id) for name, answer in answers.items() if answer for _, id in [answer]]
    return max(found, key=lambda each: int(each[1].partition("~")[2] or 0), default=None)


def _combine_snapshots(answers: Answers) -> Any:
    from headway.fleet.merge import merge_snapshots

    return merge_snapshots(answers)
