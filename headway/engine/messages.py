"""Messages between an engine's loop and its callers, in one process or between several.

Every message is a tagged msgspec Struct, which `headway.remote.codec` encodes as it is. A request
is identified by its id, its samples by number. `StepUpdates` turns events into messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    dataclass_transform,
)

from msgspec import Meta, Struct

from headway.engine.clock import Clock
from headway.errors import HeadwayError
from headway.events import Completed, Event, Planned, ended_by
from headway.plan import Embedding
from headway.request import Request, RequestParams
from headway.sampling_params import TokenLogprobs

if TYPE_CHECKING:
    Prompt = Sequence[int]
else:
    Prompt = array  # the codec sends 32-bit numbers
NO_TOKENS: list[int] = []
Value = TypeVar("Value")


@dataclass_transform(frozen_default=True)
class Message(Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages; the name of a class is its tag."""


# To the loop.


class Submit(Message):
    """Add a request. The loop answers with updates, or with one refusal."""

    id: str
    prompt: Prompt
    params: RequestParams
    traceparent: str = ""  # W3C trace context of the caller; empty: none
    # To continue a request that another engine has begun. One entry for each sample: the tokens
    # that it has generated; None: it has ended. Empty: the request is new.
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    age: float = 0.0  # seconds since the request arrived at the other engine
    deadline_in: float | None = None  # seconds; replaces params.deadline, which is absolute
    # What the samples have gained besides `outputs`, for one that resumes the request.
    history: tuple[SampleUpdate, ...] = ()

    @property
    def num_open(self) -> int:
        """Samples whose ends will be sent; 1 for an invalid n, which gives one refusal."""
        if self.outputs:
            return sum(each is not None for each in self.outputs)
        return max(1, self.params.n) if isinstance(self.params.n, int) else 1


class Cancel(Message):
    """Abort a request, or stop one of its samples as if a stop token had ended it."""

    id: str
    sample: int | None = None  # None: abort all samples


class Resume(Message):
    """Take over a request of a client that was lost, from its first token; a loop never gets it.

    The answer is one update of each sample with all so far, then what follows; or one refusal.
    """

    submit: Submit  # as the lost client had it
    held_id: str  # of the request at its replica
    replica: str = ""  # of a fleet


class Goodbye(Message):
    """The client disconnects as planned: cancel its requests. A loop never gets it."""


class Query(Message, Generic[Value], kw_only=True):
    """Base class of all queries (queries.py). `Value` is the type of the answer."""

    between_steps: ClassVar[bool] = False  # False: answered at once, on any thread
    number: int = 0  # of the answer; the sender sets it


# From the loop.


class FinishInfo(NamedTuple):
    """How a sample ended. Times are seconds since the request arrived."""

    reason: str  # stop, length, abort or error
    stop_token: int | None
    error: str | None
    num_cached: int
    num_preemptions: int
    queue: float  # until the first admission
    first_token: float
    total: float
    # "grammar": the grammar of the request caused the error; of a fleet: see RequestTable.fail
    error_code: str | None = None
    num_drafted: int = 0  # draft tokens that were computed for the sample
    num_accepted: int = 0  # those that became output


class SampleUpdate(Message):
    """What one sample gained in one step."""

    id: str
    sample: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprobs]] | None = None  # with prompt positions
    end: FinishInfo | None = None
    embedding: Embedding | None = None  # comes with the end of an embedding request


class TokenBatch(Message):
    """The tokens that many requests gained in one step.

    Holds requests with one sample that gained tokens and nothing else. Most requests do in most
    steps, and one message for all of them is cheap to make, to send and to read.
    """

    ids: list[str]
    tokens: list[list[int]]  # in the order of `ids`


class Refusal(Message):
    """A request was not added: class name (in headway.errors), message and fields of the error."""

    id: str
    kind: str
    message: str
    fields: dict[str, Any]


def refusal_of(id: str, error: HeadwayError) -> Refusal:
    """The refusal from which the caller's side can raise `error` again."""
    return Refusal(id, type(error).__name__, str(error), dict(vars(error)))


class QueryResult(Message):
    """The answer to a query, or the error that prevented it."""

    number: int
    value: Any = None
    error: str | None = None


Key = Annotated[bytes, Meta(min_length=16, max_length=16)]  # a prefix key
Number = Annotated[int, Meta(ge=0, lt=1 << 48)]  # sums of a fleet's numbers fit into 64 bits


class LoadReport(Message):
    """The load of an engine after a step, or while it is idle or busy with a long step."""

    step: Number  # number of the next step
    num_running: Number
    num_waiting: Number
    waiting_tokens: Number  # tokens that admitted and waiting requests have left to prefill
    num_free_blocks: Number
    num_blocks: Number


class CacheDelta(Message):
    """How the prefix keys in the KV cache changed since the last delta.

    If `cleared`, keys of earlier deltas are gone, and `added` has all that are present.
    """

    added: list[Key]
    removed: list[Key]
    cleared: bool


class Drain(Message):
    """The engine is about to stop: move its requests elsewhere."""

    reason: str


class EngineStopped(Message):
    """The loop has ended, or the connection to it is lost. No message follows."""

    reason: str


ToLoop = Submit | Cancel | Query[Any] | Resume | Goodbye
FromLoop = (
    TokenBatch
    | SampleUpdate
    | Refusal
    | QueryResult
    | LoadReport
    | CacheDelta
    | Drain
    | EngineStopped
)

# From events to messages.


class StepExtra(Protocol):
    """What an executor may report beside the tokens of a step."""

    logprobs: Mapping[Request, list[TokenLogprobs]]
    prompt: Mapping[Request, list[tuple[int, TokenLogprobs]]]
    embeddings: Mapping[Request, Embedding]


@dataclass(slots=True)
class RequestTimes:
    """Arrival, first admission and first token, in seconds on the engine's clock."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None


class StepUpdates:
    """Turns events into messages, and keeps the times of open requests.

    `add` must be called for every request. Requests with `is_live` false get one update: their
    end, with all their tokens.
    """

    def __init__(self, clock: Clock) -> None:
        self.times: dict[Request, RequestTimes] = {}  # of open requests
        self._at_end: set[Request] = set()  # open requests that are not live
        self._clock = clock

    def add(self, requests: Iterable[Request], *, is_live: bool = True) -> None:
        for request in requests:
            self.times[request] = RequestTimes(request.arrival)
            if not is_live:
                self._at_end.add(request)

    def clear(self) -> None:
        self.times.clear()
        self._at_end.clear()

    def of(self, event: Event) -> Iterator[TokenBatch | SampleUpdate]:
        """One message for all requests that only gained tokens, one for each other request."""
        if isinstance(event, Planned):
            for admission in event.plan.admitted:
                times = self.times.get(admission.request)
                if times and times.admitted is None:
                    times.admitted = event.time
            return
        now, extra = event.time, None
        if isinstance(event, Completed):
            now, extra = event.result.ended or now, event.result.extra
            for chunk in event.plan.chunks:
                times = self.times.get(chunk.request)
                if times and times.first_token is None and chunk.is_last:
                    times.first_token = now
        finished = ended_by(event)
        gained = self._gained(event, finished)
        ended = {request: self._end(request, now) for request in finished}
        yield from self._messages(gained, ended, extra)  # type: ignore[arg-type]

    def _messages(
        self,
        gained: dict[Request, list[int]],
        ended: dict[Request, FinishInfo],
        extra: StepExtra | None,
    ) -> Iterator[TokenBatch | SampleUpdate]:
        single = dict.fromkeys(ended)
        if extra is not None:
            single |= dict.fromkeys([r for r in gained if r in extra.logprobs])
            single |= dict.fromkeys(extra.prompt)
        for request in single:
            tokens = gained.pop(request, NO_TOKENS)
            yield _update(request, tokens, ended.get(request), extra)
        plain = [request for request in gained if request.parent is None and not request.sample]
        if plain:
            yield TokenBatch([request.id for request in plain], [gained[each] for each in plain])
        if len(plain) < len(gained):
            yield from (_update(r, tokens) for r, tokens in gained.items() if r.parent or r.sample)

    def _gained(self, event: Event, finished: Sequence[Request]) -> dict[Request, list[int]]:
        """New tokens by request; all tokens of a request that is not live and has ended."""
        has_live = len(self.times) > len(self._at_end)
        gained = dict(event.outputs()) if has_live and isinstance(event, Completed) else {}
        if self._at_end:
            gained = {r: tokens for r, tokens in gained.items() if r not in self._at_end}
            for request in self._at_end.intersection(finished):
                gained[request] = list(request.output)
            self._at_end.difference_update(finished)
        return gained

    def _end(self, request: Request, now: float) -> FinishInfo:
        times = self.times.pop(request, None) or RequestTimes(request.arrival)
        admitted, first = times.admitted or now, times.first_token or now
        history = request.history
        return FinishInfo(
            request.finish_reason or "abort", request.stop_token, request.error,
            history.num_cached, history.num_preemptions,
            admitted - times.arrival, first - times.arrival, now - times.arrival,
            request.error_code, history.num_drafted, history.num_accepted,
        )  # fmt: skip


def _update(
    request: Request,
    tokens: list[int],
    end: FinishInfo | None = None,
    extra: StepExtra | None = None,
) -> SampleUpdate:
    id = request.parent.id if request.parent else request.id
    if extra is None:
        return SampleUpdate(id, request.sample, tokens, None, None, end)
    logprobs, prompt_logprobs = extra.logprobs.get(request), extra.prompt.get(request)
    if logprobs and request.history.num_discarded:  # without tokens that are generated again
        logprobs = logprobs[len(logprobs) - len(tokens) :]
    return SampleUpdate(
        id, request.sample, tokens, logprobs, prompt_logprobs, end, extra.embeddings.get(request)
    )
