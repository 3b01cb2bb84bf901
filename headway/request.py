"""A request: what was asked, the tokens known so far, and its state.

Knows nothing of queues, pools or policies. The scheduler changes the state; the KV cache keeps the
request's blocks here. Lengths are derived: prompt and output are the only record of known tokens,
and `num_computed` counts the tokens that the plans made so far put into the KV cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, get_args

from headway.checks import MAX_STOPS, MAX_TOKEN_ID, are_token_ids, token_array
from headway.errors import InvalidRequest, shorten

if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array  # headway.remote sends 32-bit numbers
NO_TOKENS: frozenset[int] = frozenset()
Pooling = Literal["mean", "last"]  # over all prompt tokens, or the last one


class RequestState(Enum):
    """The states of a request."""

    WAITING = "waiting"  # holds nothing on the device
    PREFILL = "prefill"  # running; some known tokens are not computed yet
    DECODING = "decoding"  # running; one token per step
    SWAPPED = "swapped"  # waiting; its computed tokens are kept on the host
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs in Python


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset(
        {RequestState.DECODING, RequestState.WAITING, RequestState.SWAPPED, RequestState.FINISHED}
    ),
    RequestState.DECODING: frozenset(
        {RequestState.WAITING, RequestState.SWAPPED, RequestState.FINISHED}
    ),
    RequestState.SWAPPED: frozenset(
        {RequestState.PREFILL, RequestState.WAITING, RequestState.FINISHED}
    ),
    RequestState.FINISHED: frozenset(),
}


class SamplingOptions:
    """Base class of what an executor reads of a request."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Options of one request. The scheduler passes `sampling` to the executor unread."""

    max_tokens: int | None = 128  # None: up to max_model_len
    max_total_tokens: int | None = None  # prompt and output; None: up to max_model_len
    min_tokens: int = 0  # stop tokens are ignored before this many are generated
    eos_ids: frozenset[int] = NO_TOKENS
    stop_ids: frozenset[int] = NO_TOKENS
    ignore_eos: bool = False
    priority: int = 0  # lower values run first
    client: str = ""  # for fair queueing
    deadline: float | None = None  # seconds on the engine's clock
    salt: str = ""  # prefixes are shared only between equal salts
    reads_cache: bool = True  # False: compute the whole prompt even if it is cached
    n: int = 1  # samples of one prompt
    pooling: Pooling | None = None  # the result is an embedding; the one sampled token is unused
    prediction: Tokens | None = None  # tokens that the output may resemble, for drafts
    sampling: SamplingOptions | None = None

    @property
    def stops(self) -> frozenset[int]:
        """All token ids that end the request once it has min_tokens."""
        stops = frozenset(self.stop_ids)
        return stops if self.ignore_eos else stops | frozenset(self.eos_ids)


def check_pooling(pooling: object) -> None:
    """Raise InvalidRequest unless `pooling` is one of Pooling."""
    if not isinstance(pooling, str) or pooling not in get_args(Pooling):
        wanted = " or ".join(map(repr, get_args(Pooling)))
        raise InvalidRequest(f"pooling must be {wanted}, not {shorten(pooling)}")


class SharedProgress:
    """One counter and one token buffer for many requests, so that a step advances all at once.

    This base class is for requests that do not decode: the counter stays 0, the buffer is empty.
    """

    __slots__ = ("tick",)

    def __init__(self) -> None:
        self.tick = 0

    def num_buffered(self, request: Request) -> int:
        """Tokens of the request that are in the buffer and not in its output yet."""
        return 0

    def flush(self, request: Request) -> None:
        """Move the request's buffered tokens to its output."""


NOT_DECODING = SharedProgress()


@dataclass(slots=True)
class HostCopy:
    """Host copies of blocks [first, first + len(blocks)); `num_tokens` counts from token 0."""

    first: int
    blocks: list[int]
    num_tokens: int


@dataclass(slots=True, eq=False)
class WindowAllocation:
    """Blocks [first, first + len(blocks)) of a request in the sliding-window layers."""

    first: int
    blocks: list[int]
    num_reserved: int  # the most blocks that it may hold


@dataclass(slots=True, eq=False)
class KVAllocation:
    """A request's part of the KV cache; only headway.kv writes it."""

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # prefix keys of its full blocks, as known
    host: HostCopy | None = None
    window: WindowAllocation | None = None  # of a running request, if the model has such layers


@dataclass(slots=True, eq=False)
class History:
    """What happened to a request; the scheduler writes it, policies and reports read it."""

    serial: int = -1  # order of arrival; breaks ties
    admission: int = -1  # serial number of the latest admission
    num_cached: int = 0  # prompt tokens that the first admission found in the cache
    num_recomputed: int = 0
    num_preemptions: int = 0
    num_priority_preemptions: int = 0
    num_overtaken: int = 0
    group: str | None = None  # set by the queue's rule when the request is added
    num_discarded: int = 0  # most generated tokens that a preemption discarded
    max_num_computed: int = 0  # computing a token below this again is counted as recomputed
    num_drafted: int = 0  # draft tokens that were computed for it
    num_accepted: int = 0  # those that were right
    acceptance: float = 0.5  # probability that the next draft is right, from the latest ones
    drafts_from: int = 0  # no drafts are made before this many tokens are computed
    num_misses: int = 0  # consecutive attempts without a draft
    resumed: tuple[int, ...] = ()  # tokens that another engine had generated when it was added


class Request:
    """One sequence of tokens, from its prompt to its end."""

    __slots__ = (
        "__weakref__", "arrival", "computed_base", "error", "error_code", "finish_reason",
        "flushed_tick", "flushed_tokens", "history", "id", "kv", "limit", "num_prompt", "params",
        "parent", "prefill_end", "progress", "prompt", "row", "sample", "state", "stop_token", "stops",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: Iterable[int],
        params: RequestParams,
        *,
        arrival: float = 0.0,
        parent: Request | None = None,
        sample: int = 0,
        output: Sequence[int] = (),  # see continue_from
    ) -> None:
        self.id = id
        self.params = params
        self.arrival = arrival
        self.parent = parent  # the request for the same prompt that computes it for all samples
        self.sample = sample  # index among the n samples of its prompt
        self.prompt = token_array(f"request {id!r}: prompt", prompt)
        self.stops = _stop_ids(id, params)
        self.num_prompt = len(self.prompt)
        self.flushed_tokens: array[int] = array("i")  # use `output`, which includes buffered ones
        self.flushed_tick = 0  # tick of its progress up to which tokens are flushed
        self.limit = 0  # length at which it ends; set when it is added
        self.state = RequestState.WAITING
        self.row = -1  # in the executor's tables, while it runs
        self.computed_base = 0  # see num_computed
        self.progress = NOT_DECODING
        self.prefill_end = 0  # tokens to compute before it decodes; 0 while it waits
        self.kv = KVAllocation()
        self.history = History()
        self.finish_reason: str | None = None  # stop, length, abort or error
        self.stop_token: int | None = None
        self.error: str | None = None
        self.error_code: str | None = None  # see plan.Failure
        if output:
            self.continue_from(output)

    def continue_from(self, output: Sequence[int]) -> None:
        """Start with the tokens that another engine has generated for this request."""
        self.flushed_tokens = token_array(f"request {self.id!r}: output", output)
        self.history.resumed = tuple(self.flushed_tokens)

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state.value} {self.num_computed}/{self.num_known}>"

    @property
    def output(self) -> array[int]:
        """The tokens generated so far, as far as they are known to the host."""
        self.progress.flush(self)
        return self.flushed_tokens

    @property
    def tokens(self) -> array[int]:
        """Prompt and output; a new array at every call."""
        return self.prompt + self.output

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache once all plans made so far have run."""
        return self.computed_base + self.progress.tick

    @property
    def num_generated(self) -> int:
        return len(self.flushed_tokens) + self.progress.num_buffered(self)

    @property
    def num_known(self) -> int:
        """Length of prompt and output; tokens in flight are not known yet."""
        return self.num_prompt + self.num_generated

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def move(self, state: RequestState) -> None:
        """Change the state along TRANSITIONS; anything else is a bug here."""
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state


def _stop_ids(id: str, params: RequestParams) -> frozenset[int]:
    """All token ids that end the request; InvalidRequest names the field that is not a set of ids."""
    for name in ("stop_ids", "eos_ids"):
        ids = getattr(params, name)
        if ids is not NO_TOKENS and not are_token_ids(ids):
            wanted = f"a set of at most {MAX_STOPS} token ids, each at most {MAX_TOKEN_ID}"
            raise InvalidRequest(f"request {id!r}: {name} must be {wanted}, not {shorten(ids)}")
    if not isinstance(params.ignore_eos, bool):
        wrong = shorten(params.ignore_eos)
        raise InvalidRequest(f"request {id!r}: ignore_eos must be a bool, not {wrong}")
    return params.stops
