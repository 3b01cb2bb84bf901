"""How a prompt is completed: `SamplingParams` for users, `Sampling` for executors.

`SamplingParams` has vLLM's names and defaults. `Sampling` is the part of it that an executor reads,
with texts as tokens. Knows nothing of tensors or tokenizers: the caller tokenizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import starmap
from struct import Struct
from typing import Any, NamedTuple

from headway.checks import are_token_ids
from headway.errors import InvalidRequest, shorten
from headway.grammar.grammar import Grammar
from headway.request import SamplingOptions

MAX_LOGPROBS = 100
COLDEST = 1e-4  # lower temperatures are greedy: float32 could not tell tokens apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingOptions):
    """What the executor reads of one request; the content of `RequestParams.sampling`."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None  # top alternatives to report; 0: only the chosen token's
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_tokens: frozenset[int] | None = None  # None: all
    grammar: Grammar | None = None

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on earlier tokens and their counts."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def edits_logits(self) -> bool:
        """True if logits are masked, biased or penalized before a token is chosen."""
        is_masked = bool(self.bad_words) or self.allowed_tokens is not None
        is_masked = is_masked or self.grammar is not None
        return is_masked or bool(self.logit_bias) or self.has_penalties

    def seed_of(self, sample: int) -> int:
        """The seed of one of n samples, as 64 bits."""
        return (self.seed + sample) % 2**64


GREEDY = Sampling(temperature=0.0)


def sampling_of(id: str, given: object) -> Sampling:
    """The content of `RequestParams.sampling`, greedy if None; InvalidRequest for other values."""
    sampling = GREEDY if given is None else given
    if not isinstance(sampling, Sampling):
        raise InvalidRequest(
            f"request {id!r}: sampling is {sampling!r}; it must be a Sampling or None"
        )
    return sampling


PAIR = Struct("<id")  # a token and its log probability


class TokenLogprobs(NamedTuple):
    """The log probability of one token under the raw logits, and those of the top alternatives."""

    token: int
    logprob: float
    rank: int  # 1: no token was more probable
    packed_top: bytes = b""  # a client that reads slowly may leave many behind: objects are large

    @property
    def top(self) -> list[tuple[int, float]]:
        """Token ids and log probabilities, most probable first."""
        return list(PAIR.iter_unpack(self.packed_top))


def pack_top(top: Iterable[tuple[int, float]]) -> bytes:
    """The form of `TokenLogprobs.packed_top`."""
    return b"".join(starmap(PAIR.pack, top))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an output must look like; exactly one field is set. InvalidRequest otherwise."""

    json: Mapping[str, Any] | str | None = None  # JSON schema, as an object or as its JSON
    regex: str | None = None
    choice: Sequence[str] | None = None  # exactly one of these texts
    grammar: str | None = None  # context-free, in Lark notation
    json_object: bool | None = None  # True: any JSON object

    def __post_init__(self) -> None:
        self.to_grammar()

    def to_grammar(self) -> Grammar:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            has = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs must have one of {names}; it has {has}")
        if given == ["json_object"]:
            return Grammar.json_object()
        makers: dict[str, Callable[[Any], Grammar]] = {
            "json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice,
            "grammar": Grammar.lark,
        }  # fmt: skip
        return makers[given[0]](getattr(self, given[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to complete one prompt. InvalidRequest names a field whose value is out of range.

    Fields and defaults are those of vLLM. `priority`, `client`, `deadline` and `salt` are read by
    the scheduler.
    """

    n: int = 1  # samples of the prompt
    max_tokens: int | None = 16  # None: as far as the model's length allows
    min_tokens: int = 0
    temperature: float = 1.0  # 0: always the most probable token
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: a seed is drawn for each request
    logprobs: int | None = None  # top alternatives for each token; 0: only the token itself
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Collection[int] = ()  # None is read as ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()  # None is read as ()
    allowed_token_ids: Collection[int] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    grammar: Grammar | None = None  # set from structured_outputs if that is given
    priority: int = 0  # lower values run first
    client: str = ""  # for fair queueing
    deadline: float | None = None  # seconds on the engine's clock
    salt: str = ""  # prefixes are shared only between equal salts

    def __post_init__(self) -> None:
        for name, limits in RANGES.items():
            limits.check(name, getattr(self, name))
        for name, kind in KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise _wrong(name, f"a {kind.__name__}", getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for name in ("stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        _check_list("stop", self.stop_strings, "non-empty texts", _is_text)
        _check_list("bad_words", self.bad_words, "non-empty texts", _is_text)
        _check_list("stop_token_ids", self.stop_token_ids, IDS, TOKEN_ID.has)
        if self.allowed_token_ids is not None:
            _check_list("allowed_token_ids", self.allowed_token_ids, IDS, TOKEN_ID.has)
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)
        _set_grammar(self)
        _check_grammar(self)

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a sequence."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop


class Range(NamedTuple):
    """The numbers that a field may have."""

    low: float
    high: float
    is_whole: bool = False
    is_open: bool = False  # `low` itself is not allowed
    is_optional: bool = False  # None is allowed

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        if self.is_open:
            limits = f" above {self.low} and at most {self.high}"
        elif self.high < HUGE:
            limits = f" from {self.low} to {self.high}"
        else:
            limits = f" of at least {self.low}" if self.low > -HUGE else ""
        return f"{kind}{limits}{' or None' if self.is_optional else ''}"

    def check(self, name: str, value: object) -> None:
        """InvalidRequest unless the value is in the range."""
        if not (value is None and self.is_optional) and not self.has(value):
            raise _wrong(name, str(self), value)

    def has(self, value: object) -> bool:
        kinds = int if self.is_whole else int | float
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)


HUGE = sys.float_info.max  # excludes infinity
TOKEN_ID = Range(0, HUGE, is_whole=True)
IDS = "token ids, whole numbers of at least 0"
BIAS = Range(-100, 100)
RANGES = {
    "n": Range(1, 1024, is_whole=True),
    "max_tokens": Range(1, HUGE, is_whole=True, is_optional=True),
    "min_tokens": Range(0, HUGE, is_whole=True),
    "temperature": Range(0, 1000),
    "top_k": Range(-1, HUGE, is_whole=True),
    "top_p": Range(0, 1, is_open=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.001, 1000),  # a smaller one could make a logit infinite
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**64 - 1, is_whole=True, is_optional=True),
    "logprobs": Range(0, MAX_LOGPROBS, is_whole=True, is_optional=True),
    "prompt_logprobs": Range(0, MAX_LOGPROBS, is_whole=True, is_optional=True),
    "priority": Range(-HUGE, HUGE, is_whole=True),
    "deadline": Range(-HUGE, HUGE, is_optional=True),
}
KINDS: dict[str, type] = {
    "include_stop_str_in_output": bool,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "client": str,
    "salt": str,
}


def _wrong(name: str, wanted: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {value!r}")


def _check_list(name: str, values: object, wanted: str, is_fine: Callable[[object], bool]) -> None:
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        raise _wrong(name, f"a list of {wanted}", values)
    for value in values:
        if not is_fine(value):
            raise InvalidRequest(f"{name} must be a list of {wanted}; it contains {value!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise _wrong("logit_bias", f"a mapping from token ids to {BIAS}", bias)
    _check_list("logit_bias", list(bias), IDS, TOKEN_ID.has)
    for token, value in bias.items():
        BIAS.check(f"logit_bias of token {token}", value)


def _set_grammar(params: SamplingParams) -> None:
    """Set `grammar` from `structured_outputs`; InvalidRequest if both are given and differ."""
    wanted = params.structured_outputs
    if wanted is None:
        return
    if isinstance(wanted, Mapping):
        known = {field.name for field in fields(StructuredOutputsParams)}
        if unknown := sorted(map(str, wanted.keys() - known)):
            raise InvalidRequest(f"structured_outputs has unknown fields: {', '.join(unknown)}")
        wanted = StructuredOutputsParams(**wanted)
    if not isinstance(wanted, StructuredOutputsParams):
        raise _wrong("structured_outputs", "a StructuredOutputsParams or None", wanted)
    grammar = wanted.to_grammar()
    if params.grammar not in (None, grammar):
        raise InvalidRequest("structured_outputs and grammar are both set; set one of them")
    object.__setattr__(params, "grammar", grammar)


def _check_grammar(params: SamplingParams) -> None:
    """Refuse fields that would prevent an output from ending where its grammar ends."""
    if params.grammar is None:
        return
    if not isinstance(params.grammar, Grammar):
        raise _wrong("grammar", "a Grammar or None", params.grammar)
    for name in ("ignore_eos", "min_tokens"):
        if value := getattr(params, name):
            raise InvalidRequest(f"{name} is {value!r}; it cannot be set together with a grammar")


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """InvalidRequest if params name a token that the model does not have, or allow no token."""
    allowed = params.allowed_token_ids
    if allowed is not None and len(allowed) == 0:
        raise InvalidRequest(
            f"allowed_token_ids is empty; allow at least one of the {vocab_size} tokens, or use "
            "None to allow all"
        )
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise InvalidRequest(
                    f"{name} has token {token}; the model's tokens are 0 to {vocab_size - 1}"
                )
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name) or 0) > vocab_size:
            raise _wrong(name, f"at most {vocab_size}, the size of the vocabulary", value)


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """InvalidRequest for values that `token_level` does not make, as another process may send."""

    def are_known(ids: Any) -> bool:
        return are_token_ids(ids) and bool(ids) and min(ids) >= 0 and max(ids) < vocab_size

    for name in SAMPLING_NUMBERS:
        RANGES[name].check(name, getattr(sampling, name))
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(sampling, name) or 0) > vocab_size:
            raise _wrong(name, f"at most {vocab_size}, the size of the vocabulary", value)
    _check_bias(sampling.logit_bias)
    wanted = f"at least one of the model's tokens, 0 to {vocab_size - 1}"
    _check_list("bad_words", sampling.bad_words, f"sequences of {wanted}", are_known)
    biased = list(sampling.logit_bias) or None
    for name, ids in (("logit_bias", biased), ("allowed_tokens", sampling.allowed_tokens)):
        if ids is not None and not are_known(ids):
            raise InvalidRequest(f"{name} must be {wanted}, not {shorten(ids)}")
    if not isinstance(sampling.grammar, Grammar | None):
        raise _wrong("grammar", "a Grammar or None", sampling.grammar)


CONVERTED = {"logit_bias", "seed", "bad_words"}  # the others have the same value in both classes
SAMPLING_NUMBERS = sorted(RANGES.keys() & {f.name for f in fields(Sampling)})
SHARED = {f.name for f in fields(Sampling)} & {f.name for f in fields(SamplingParams)} - CONVERTED


def token_level(
    params: SamplingParams, *, seed: int, bad_words: tuple[tuple[int, ...], ...]
) -> Sampling:
    """The part of checked params that an executor reads."""
    if not all(bad_words):
        raise InvalidRequest(f"bad_words contains a text that has no tokens: {params.bad_words!r}")
    allowed = params.allowed_token_ids
    return Sampling(
        **{name: getattr(params, name) for name in SHARED},
        logit_bias=dict(params.logit_bias or {}),
        seed=seed,
        bad_words=bad_words,
        allowed_tokens=None if allowed is None else frozenset(allowed),
    )
