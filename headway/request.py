"""A request: what the user asked for, what is known of it, and where it stands.

Knows nothing of queues, pools or policies. The scheduler moves it between states, the KV cache
keeps its blocks here. Lengths are derived: prompt and output are the one record of what is known,
`num_computed` is the one record of what the plans made so far have put into the KV cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from math import inf
from operator import index
from typing import Literal, get_args

from headway.errors import InvalidRequest, shorten

NO_TOKENS: frozenset[int] = frozenset()
Pooling = Literal["mean", "last"]  # over all prompt tokens, or the last one
PLAIN_COLLECTIONS = (frozenset, set, list, tuple)
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PROMPT = 1 << 27  # tokens; more is not read at all
MAX_STOPS = 1 << 20  # token ids that end one request


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds nothing on the device
    PREFILL = "prefill"  # seated; part of its known tokens is not computed yet
    DECODING = "decoding"  # seated; one token a step
    SWAPPED = "swapped"  # waiting, with its computed tokens kept on the host
    FINISHED = "finished"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash runs in Python


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FINISHED}),
    State.PREFILL: frozenset({State.DECODING, State.WAITING, State.SWAPPED, State.FINISHED}),
    State.DECODING: frozenset({State.WAITING, State.SWAPPED, State.FINISHED}),
    State.SWAPPED: frozenset({State.PREFILL, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What a user may ask of one request. `sampling` is carried to the executor unread."""

    max_tokens: int | None = 128  # None: as far as the model's length allows
    min_tokens: int = 0  # no stop token ends the request before this many
    eos_ids: frozenset[int] = NO_TOKENS
    stop_ids: frozenset[int] = NO_TOKENS
    ignore_eos: bool = False
    priority: int = 0  # lower is sooner
    client: str = ""  # who pays, for fair queueing
    deadline: float | None = None  # on the engine's clock, seconds
    salt: str = ""  # prefixes are shared only between equal salts
    reads_cache: bool = True  # False: compute the whole prompt even if it is cached
    n: int = 1  # samples of one prompt
    pooling: Pooling | None = None  # the result is an embedding; the one sampled token is unused
    sampling: object = None

    @property
    def stops(self) -> frozenset[int]:
        """Every token id that ends the request once min_tokens are there."""
        stops = frozenset(self.stop_ids)
        return stops if self.ignore_eos else stops | frozenset(self.eos_ids)


def check_pooling(pooling: object) -> None:
    """InvalidRequest unless this is a pooling."""
    if not isinstance(pooling, str) or pooling not in get_args(Pooling):
        wanted = " or ".join(map(repr, get_args(Pooling)))
        raise InvalidRequest(f"pooling must be {wanted}, not {shorten(pooling)}")


class Pace:
    """A counter that many requests share, so that advancing all of them is one addition.

    Sampled tokens may be kept here, a column for all, until somebody reads them.
    """

    __slots__ = ("tick",)

    def __init__(self) -> None:
        self.tick = 0

    def num_kept(self, request: Request) -> int:
        """Tokens of the request that are kept here and not yet written to it."""
        return 0

    def write(self, request: Request) -> None:
        """Write them to it."""


STANDING = Pace()  # the pace of everyone who is not decoding; its tick stays 0


@dataclass(slots=True)
class HostCopy:
    """Blocks [first, first + len(blocks)) of a swapped request, holding `num_tokens` in all."""

    first: int
    blocks: list[int]
    num_tokens: int


@dataclass(slots=True, eq=False)
class KVAllocation:
    """What a request holds in the KV cache; written by headway.kv alone."""

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # prefix keys of its full blocks, as known
    host: HostCopy | None = None


@dataclass(slots=True, eq=False)
class History:
    """What has happened to a request; written by the scheduler, read by policies and reports."""

    serial: int = -1  # place in the order of arrival; ties are broken by it
    admission: int = -1  # serial number of its latest admission
    num_cached: int = 0  # prompt tokens its first admission found in the cache
    num_recomputed: int = 0
    num_preemptions: int = 0
    num_priority_preemptions: int = 0  # preemptions in favour of a higher priority
    num_overtaken: int = 0
    aborted_after: int = 0  # requests that had newly come when it was aborted
    group: str | None = None  # of the queue's rule; fixed when the request is added
    max_num_computed: int = 0  # most tokens ever computed; anything below computed again is waste


class Request:
    """One sequence of tokens on its way from prompt to finish."""

    __slots__ = (
        "__weakref__",
        "arrival",
        "base",
        "error",
        "error_code",
        "finish_reason",
        "history",
        "id",
        "kv",
        "limit",
        "num_prompt",
        "pace",
        "params",
        "parent",
        "prefill_end",
        "prompt",
        "row",
        "sample",
        "state",
        "stop_token",
        "stops",
        "written",
        "written_to",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: Iterable[int],
        params: Params,
        *,
        arrival: float = 0.0,
        parent: Request | None = None,
        sample: int = 0,
    ) -> None:
        self.id = id
        self.params = params
        self.arrival = arrival
        self.parent = parent  # the sample of the same prompt that computes it for all
        self.sample = sample  # which of the n samples of its prompt it is
        self.prompt = _token_ids(id, prompt)
        self.stops = _stops(id, params)
        self.num_prompt = len(self.prompt)
        self.written: array[int] = array("i")  # read `output`, which is up to date
        self.written_to = 0  # the tick of its pace up to which it is
        self.limit = 0  # length at which it ends; set when it is added
        self.state = State.WAITING
        self.row = -1  # its seat while it runs
        self.base = 0  # with the tick of its pace, what is computed: see num_computed
        self.pace = STANDING
        self.prefill_end = 0  # tokens to compute before it decodes; fixed at admission
        self.kv = KVAllocation()
        self.history = History()
        self.finish_reason: str | None = None  # stop, length, abort or error
        self.stop_token: int | None = None
        self.error: str | None = None
        self.error_code: str | None = None  # as in plan.Failure

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state.value} {self.num_computed}/{self.num_known}>"

    @property
    def output(self) -> array[int]:
        """What has been generated, as far as it is known."""
        self.pace.write(self)
        return self.written

    @property
    def tokens(self) -> array[int]:
        """Prompt and output in one; made anew at every call."""
        return self.prompt + self.output

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache once the plans made so far have run."""
        return self.base + self.pace.tick

    @property
    def num_generated(self) -> int:
        return len(self.written) + self.pace.num_kept(self)

    @property
    def num_known(self) -> int:
        """Length of prompt and output; tokens still in flight are not known."""
        return self.num_prompt + self.num_generated

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    def move(self, state: State) -> None:
        """Change state; anything but a listed transition is our bug."""
        assert state in TRANSITIONS[self.state], f"{self} cannot become {state.value}"
        self.state = state


def _token_ids(id: str, prompt: Iterable[int]) -> array[int]:
    """The prompt as 32-bit numbers; InvalidRequest names the first that is not one."""
    if type(prompt) is list and len(prompt) <= MAX_PROMPT:  # nearly always; the rest takes longer
        with suppress(TypeError, OverflowError):
            return array("i", prompt)
    name = f"request {id!r}: prompt"
    if isinstance(prompt, str | bytes | bytearray | Mapping):
        raise InvalidRequest(f"{name} must be a list of token ids, not {shorten(prompt)}")
    try:
        if isinstance(prompt, Iterator):  # kept, so that a wrong element can be found again
            prompt = list(islice(prompt, MAX_PROMPT + 1))
        if _num_elements(prompt) <= MAX_PROMPT:
            return array("i", prompt)
    except (TypeError, ValueError, OverflowError):
        wrong = shorten(_first_wrong(prompt))
        wanted = f"a list of token ids from 0 to {MAX_TOKEN_ID}"
        raise InvalidRequest(f"{name} must be {wanted}, not {wrong}") from None
    raise InvalidRequest(f"{name} must be at most {MAX_PROMPT} tokens long, not {shorten(prompt)}")


def _first_wrong(prompt: object) -> object:
    """The first element that is no 32-bit number; the prompt itself if it has no elements."""
    try:
        for token in prompt:  # type: ignore[attr-defined]
            try:
                array("i", [index(token)])
            except (TypeError, OverflowError):
                return token
    except (TypeError, ValueError):
        pass
    return prompt


def _stops(id: str, params: Params) -> frozenset[int]:
    """The ids that end the request; InvalidRequest names a field that holds anything else."""
    for name in ("stop_ids", "eos_ids"):
        ids = getattr(params, name)
        if not _are_token_ids(ids):
            wanted = f"a set of at most {MAX_STOPS} token ids, each at most {MAX_TOKEN_ID}"
            raise InvalidRequest(f"request {id!r}: {name} must be {wanted}, not {shorten(ids)}")
    if not isinstance(params.ignore_eos, bool):
        wrong = shorten(params.ignore_eos)
        raise InvalidRequest(f"request {id!r}: ignore_eos must be a bool, not {wrong}")
    return params.stops


def _are_token_ids(ids: object) -> bool:
    if not isinstance(ids, PLAIN_COLLECTIONS) and (  # quicker than asking for a Collection
        not isinstance(ids, Collection) or isinstance(ids, str | bytes | Mapping)
    ):
        return False
    return _num_elements(ids) <= MAX_STOPS and all(
        isinstance(token, int) and -MAX_TOKEN_ID <= token <= MAX_TOKEN_ID for token in ids
    )


def _num_elements(values: object) -> float:
    """The length, if it is known; infinite if it is beyond what len() can return."""
    try:
        return len(values) if isinstance(values, Sized) else 0
    except OverflowError:  # such as of range(10**30)
        return inf
