"""Queries to an engine, each a message with the type of its answer.

`EngineLoop.handle` registers what answers a query of an engine; `headway.fleet.queries` says how a
fleet combines the answers of its replicas. A document is plain JSON data.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from headway.engine.messages import Key, Query
from headway.record.lines import HeaderLine, Line, RequestLine

Document = dict[str, Any]


class EngineLoad(Struct, frozen=True):
    """Requests of an engine, and the duration of the current step so far in seconds."""

    running: int
    waiting: int
    age: float


class GetTime(Query[float]):
    """The time on the engine's clock, on which deadlines are."""


class GetLoad(Query[EngineLoad]):
    """The number of requests."""


class GetProblem(Query[str | None]):
    """Why the engine is unhealthy; None if it is healthy."""


class CountRequests(Query[int]):
    """Requests that the engine has left between two steps."""

    between_steps = True


class ExplainQueue(Query[str]):
    """Why requests wait, in sentences."""


class ResetPrefixCache(Query[bool]):
    """Drop all cached prefixes; False if running requests use cached blocks."""

    between_steps = True


CACHE_PARTS = 16


class ReportCache(Query[list[Key]]):
    """The keys of the prefix cache in one of CACHE_PARTS parts; changes are sent from then on.

    A part is chosen by the keys' first byte, so that no message is large. Changes go to all readers.
    """

    part: int = 0
    between_steps = True


class GetMetrics(Query[str]):
    """All metrics in the Prometheus text format; their names start with `prefix`."""

    prefix: str = "headway"


class GetSnapshot(Query[Document]):
    """What the live page shows."""


class GetDiagnosis(Query[Document]):
    """Findings of the doctor over the last minute."""


class LiveRecording(Struct, frozen=True):
    """The number of a viewer, and the first bytes of its recording."""

    viewer: int
    header: bytes


class StartRecording(Query[LiveRecording]):
    """Record the engine's steps from now on."""

    between_steps = True


class GetRecording(Query[bytes]):
    """The recording since the last query of a viewer."""

    viewer: int
    between_steps = True


class StopRecording(Query[None]):
    """Stop the recording of a viewer."""

    viewer: int
    between_steps = True


class TrialStart(Struct, frozen=True, kw_only=True):
    """What a trial needs besides the recorded events, which have the numbers [first, end)."""

    header: HeaderLine
    model: Document | None
    before: list[tuple[RequestLine, int | None]]  # open requests, and their cached tokens
    generated: dict[str, int]  # tokens of the requests that are open now
    first: int
    end: int


class StartTrial(Query[TrialStart | None]):
    """Start a trial; None if another one runs."""

    between_steps = True


class GetTrialLines(Query[list[Line]]):
    """A part of the recorded events, from the number `first` on."""

    first: int
    between_steps = True


class EndTrial(Query[None]):
    """Allow the next trial."""

    between_steps = True


class FindRequest(Query[tuple[str, str] | None]):
    """Which replica holds a request, and its id there; None if it cannot be resumed."""

    id: str


class DescribeFleet(Query[Document]):
    """Counters of a fleet, and state and load of its replicas; a single engine has no answer."""


if TYPE_CHECKING:
    EngineQuery = Query[Any]
else:
    EngineQuery = reduce(or_, Query.__subclasses__())  # those above


class AskEach(Query[Document]):
    """The answers of all replicas of a fleet to a query, by name; not for a single engine."""

    query: EngineQuery
