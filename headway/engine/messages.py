"""What passes between an engine's loop and those who ask it, in one process or between several.

Plain and picklable. A request is known by its id; its n samples by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.errors import HeadwayError
from headway.plan import Embedding
from headway.request import Params
from headway.sampling_params import TokenLogprobs

# To the loop.


@dataclass(frozen=True, slots=True)
class Submit:
    """Take a request. Answered by updates, or by one that refuses it."""

    id: str
    prompt: Sequence[int]
    params: Params
    traceparent: str = ""  # W3C trace context of the caller; empty: none


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, or one sample of it where it stands, as one that has stopped."""

    id: str
    sample: int | None = None  # None: all of it, aborted


@dataclass(frozen=True, slots=True)
class Query:
    """A question that `EngineLoop.answers` has a function for; answered by a QueryResult."""

    number: int
    what: str
    details: Any = None


# From the loop.


class End(NamedTuple):
    """How a sample ended. Seconds since its request came to the loop."""

    reason: str  # stop, length, abort or error
    stop_token: int | None
    error: str | None
    num_cached: int
    num_preemptions: int
    queue: float
    first_token: float
    total: float
    error_code: str | None = None  # "grammar": the request's own grammar is at fault


class Update(NamedTuple):
    """What one sample gained in one step."""

    id: str
    sample: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprobs]] | None = None  # by place
    end: End | None = None
    embedding: Embedding | None = None  # comes with the end of an embedding request


class Tokens(NamedTuple):
    """What requests of one sample gained in one step, where that is tokens and nothing else.

    So are most, and one message for all of them is cheap to make, to send and to read.
    """

    ids: list[str]
    tokens: list[list[int]]  # of each


class Refusal(NamedTuple):
    """A request that was not taken: the error's class in headway.errors, words and numbers."""

    id: str
    kind: str
    words: str
    numbers: dict[str, Any]


def refusal_of(id: str, error: HeadwayError) -> Refusal:
    """The refusal that raises `error` again where the request came from."""
    return Refusal(id, type(error).__name__, str(error), dict(vars(error)))


class QueryResult(NamedTuple):
    """The answer to a question, or why there is none."""

    number: int
    value: Any
    error: str | None = None


class EngineStopped(NamedTuple):
    """The loop has ended; nothing that is open will be answered any more."""

    reason: str


ToLoop = Submit | Cancel | Query
FromLoop = Tokens | Update | Refusal | QueryResult | EngineStopped
