"""Queries to a fleet: which replicas answer, and how their answers become one.

A query that concerns the whole fleet goes to all replicas. Any other goes to one, always the first
by name, because a viewer or a trial sends several queries to the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from headway.engine.messages import FromLoop, Query, QueryResult
from headway.engine.queries import (
    AskEach,
    EngineLoad,
    ExplainQueue,
    GetLoad,
    GetMetrics,
    GetProblem,
    GetSnapshot,
    ResetPrefixCache,
)
from headway.fleet.replica import Replica
from headway.fleet.settings import FleetCounters

Answers = Mapping[str, Any]  # by replica name
Combine = Callable[[Answers], Any]


@dataclass(slots=True, eq=False)
class PendingQuery:
    """A query that some replicas have not answered yet."""

    number: int  # of the caller
    combine: Combine
    num_left: int
    needs_answers: bool = True  # False: it has a result even if all replicas fail
    answers: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def answer(self, name: str, result: QueryResult) -> QueryResult | None:
        """Add the answer of a replica; the result once all have answered.

        Replicas that failed are left out, unless all have.
        """
        if result.error is None:
            self.answers[name] = result.value
        else:
            self.errors[name] = result.error
        self.num_left -= 1
        if self.num_left:
            return None
        if not self.answers and self.needs_answers:
            return QueryResult(self.number, None, _by_replica(self.errors, "replica", "; "))
        return QueryResult(self.number, self.combine(dict(sorted(self.answers.items()))))


class FleetQueries:
    """Sends queries to replicas and combines their answers."""

    def __init__(
        self,
        replicas: dict[str, Replica],
        counters: FleetCounters,
        emit: Callable[[FromLoop], None],
    ) -> None:
        self.local: dict[type[Query[Any]], Callable[[], Any]] = {}  # answered without a replica
        self._combine: dict[type[Query[Any]], Combine] = {
            AskEach: dict,
            ExplainQueue: lambda answers: _by_replica(answers, "Replica", "\n\n"),
            GetLoad: _combine_loads,
            # A fleet is healthy as long as one replica is.
            GetProblem: lambda found: (
                _by_replica(found, "replica") if all(found.values()) else None
            ),
            GetSnapshot: _combine_snapshots,
            ResetPrefixCache: lambda answers: all(answers.values()),
        }
        self.replicas, self._counters, self._emit = replicas, counters, emit
        self.gauges: dict[str, float] = {"starting": 0, "directory_ok": 1}
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
        if not targets:
            problem = "no replica is connected"
            known: dict[type[Query[Any]], Callable[[], object]] = {
                GetProblem: lambda: problem, GetLoad: lambda: EngineLoad(0, 0, 0.0),
                GetMetrics: lambda: combine and combine({}),
            }  # fmt: skip
            answer, error = (known[kind](), None) if kind in known else (None, problem)
            self._emit(QueryResult(query.number, answer, error))
            return
        if combine is None:
            targets, combine = targets[:1], lambda answers: next(iter(answers.values()))
        asked = query.query if isinstance(query, AskEach) else query
        pending = PendingQuery(query.number, combine, len(targets), kind is not GetMetrics)
        for replica in targets:
            number = self.take_number()
            replica.queries[number] = pending
            replica.post(replace(asked, number=number))

    def take_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def receive(self, replica: Replica, message: QueryResult) -> None:
        """Use the answer of a replica; one that nothing waits for is dropped."""
        # All that was sent before the query has arrived, too.
        replica.answered = max(replica.answered, message.number)
        if (use := replica.own_queries.pop(message.number, None)) is not None:
            use(message.value)
        self._finish(replica, message)

    def _finish(self, replica: Replica, message: QueryResult) -> None:
        pending = replica.queries.pop(message.number, None)
        if pending is not None and (result := pending.answer(replica.name, message)) is not None:
            self._emit(result)

    def fail(self, replica: Replica, reason: str) -> None:
        """A replica is gone: it answers no query any more."""
        replica.own_queries.clear()
        for number in list(replica.queries):
            self._finish(replica, QueryResult(number, None, reason))

    def _combine_metrics(self, prefix: str, answers: Answers) -> str:
        from headway.fleet.merge import merge_metrics

        counts = {name.removeprefix("num_"): n for name, n in asdict(self._counters).items()}
        more = {"deaths": self._counters.num_losses, "replicas": len(self.replicas)}
        return merge_metrics(answers, counts | more | self.gauges, prefix)


def _by_replica(texts: Mapping[str, str], prefix: str, separator: str = "\n") -> str:
    return separator.join(f"{prefix} {name}: {text}" for name, text in texts.items())


def _combine_loads(answers: Answers) -> EngineLoad:
    loads: list[EngineLoad] = [*answers.values()]
    num_running = sum(load.running for load in loads)
    num_waiting = sum(load.waiting for load in loads)
    return EngineLoad(num_running, num_waiting, max(load.age for load in loads))


def _combine_snapshots(answers: Answers) -> Any:
    from headway.fleet.merge import merge_snapshots

    return merge_snapshots(answers)
