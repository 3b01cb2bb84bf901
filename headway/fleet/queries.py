"""Queries to a fleet: which replicas answer, and how their answers become one.

A query that concerns the whole fleet goes to all replicas. Any other goes to one, always the first
by name, because a film or a trial takes several queries to the same engine. The query "each" with
`(name, details)` asks all replicas and returns the answers by replica name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.engine.messages import FromLoop, Query, QueryResult
from headway.fleet.replica import Replica

Answers = Mapping[str, Any]  # by replica name
Combine = Callable[[Answers], Any]
Emit = Callable[[FromLoop], None]


def combine_why(answers: Answers) -> str:
    return "\n\n".join(f"Replica {name}: {text}" for name, text in answers.items())


def combine_load(answers: Answers) -> dict[str, float]:
    loads = list(answers.values())
    totals = {key: sum(load[key] for load in loads) for key in ("running", "waiting")}
    return {**totals, "age": max(load["age"] for load in loads)}


def combine_problems(answers: Answers) -> str | None:
    """A fleet is healthy as long as one replica is."""
    if not all(answers.values()):
        return None
    return "\n".join(f"replica {name}: {problem}" for name, problem in answers.items())


COMBINED: dict[str, Combine] = {
    "why": combine_why,
    "load": combine_load,
    "problem": combine_problems,
    "reset_prefix_cache": lambda answers: all(answers.values()),
}


@dataclass(slots=True, eq=False)
class PendingQuery:
    """A query that some replicas have not answered yet."""

    number: int  # of the caller
    combine: Combine
    num_left: int
    answers: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def answer(self, name: str, value: Any, error: str | None) -> QueryResult | None:
        """Add the answer of a replica; the result once all have answered.

        Replicas that failed are left out, unless all have.
        """
        if error is None:
            self.answers[name] = value
        else:
            self.errors[name] = error
        self.num_left -= 1
        if self.num_left:
            return None
        if not self.answers:
            texts = [f"replica {name}: {text}" for name, text in self.errors.items()]
            return QueryResult(self.number, None, "; ".join(texts))
        return QueryResult(self.number, self.combine(dict(sorted(self.answers.items()))))


class FleetQueries:
    """Sends queries to replicas and combines their answers. `combined` may be extended."""

    def __init__(self, replicas: Mapping[str, Replica], emit: Emit) -> None:
        self.local: dict[str, Callable[[], Any]] = {}  # answered without a replica
        self.combined = dict(COMBINED)
        self._replicas, self._emit = replicas, emit
        self._num_asked = 0

    def ask(self, query: Query) -> None:
        what, details = query.what, query.details
        if what in self.local:
            self._emit(QueryResult(query.number, self.local[what]()))
            return
        targets = sorted(self._replicas.values(), key=lambda replica: replica.name)
        if not targets:
            self._emit(QueryResult(query.number, *_without_replicas(what)))
            return
        combine = self.combined.get(what, _first)
        if what == "each":
            (what, details), combine = details, dict
        elif combine is _first:
            targets = targets[:1]
        pending = PendingQuery(query.number, combine, len(targets))
        for replica in targets:
            self._num_asked += 1
            replica.queries[self._num_asked] = pending
            replica.post(Query(self._num_asked, what, details))

    def receive(self, replica: Replica, message: QueryResult) -> None:
        """Use the answer of a replica; one that nothing waits for is dropped."""
        pending = replica.queries.pop(message.number, None)
        if pending is not None:
            result = pending.answer(replica.name, message.value, message.error)
            if result is not None:
                self._emit(result)

    def fail(self, replica: Replica, reason: str) -> None:
        """A replica is gone: it answers no query any more."""
        for number in list(replica.queries):
            self.receive(replica, QueryResult(number, None, reason))


def _first(answers: Answers) -> Any:
    return next(iter(answers.values()))


def _without_replicas(what: str) -> tuple[Any, str | None]:
    """Value and error of a query to a fleet that has no replica."""
    if what == "problem":
        return "no replica is connected", None
    if what == "load":
        return {"running": 0, "waiting": 0, "age": 0.0}, None
    return None, "no replica is connected"
