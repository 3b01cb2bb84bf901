"""Call a policy and check its result; a PolicyError names slot, policy, request, cause and line.

A policy may be a user's function, so it may raise anything and return anything. These calls change
nothing: the caller decides what a failure ends.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from headway.checks import MAX_TOKEN_ID
from headway.config import BatchingRule, Config, Headroom, StepActions
from headway.errors import bad_result, line_of_policy, policy_failed
from headway.plan import UNKNOWN_TOKEN

SEQUENCES, SCALARS = (tuple, list), (float, int, str)  # quicker than unions
T = TypeVar("T")


class Call(NamedTuple, Generic[T]):
    """A kind of policy call: how its result is read, and what errors say."""

    slot: str
    where: str  # a format of the arguments, as `wanted`
    read: Callable[[Any], T]  # raises if the result is not one of the slot
    wanted: str
    method: str | None = None  # of the rule; None: the rule itself is called


def checked(kind: Call[T], rule: Any) -> Callable[..., T]:
    """The policy as a function that raises PolicyError for what it must not raise or return."""
    policy = rule if kind.method is None else getattr(rule, kind.method)
    read = kind.read

    def call(*arguments: Any) -> T:
        try:
            result = policy(*arguments)
        except Exception as error:
            where, id = kind.where.format(*arguments), _request_id(arguments)
            raise policy_failed(kind.slot, rule, where, error, id) from error
        try:
            return read(result)
        except Exception:
            wanted, id = kind.wanted.format(*arguments), _request_id(arguments)
            raise bad_result(kind.slot, rule, result, wanted, id) from None

    return call


def call_batching(rule: BatchingRule, step: StepActions) -> None:
    """Let the batching rule build the step; PolicyError if a user's rule raises."""
    try:
        rule(step)
    except Exception as error:
        if line_of_policy(error) is None:
            raise
        raise policy_failed("batching", rule, "to build a step", error) from error


def _request_id(arguments: tuple[Any, ...]) -> str | None:
    return getattr(arguments[0], "id", None)  # chunk rules get numbers only


def ordered(key: Any) -> Any:
    """The key, if it and all its items equal themselves and are not less than themselves."""
    if isinstance(key, SCALARS):
        is_ordered = key == key  # NaN does not equal itself
    elif isinstance(key, SEQUENCES):
        is_ordered = all(ordered(item) is item for item in key)
    else:
        is_ordered = key == key and not key < key
    if not is_ordered:
        raise ValueError(f"{key!r} has no order")
    return key


def _read_group(group: Any) -> str:
    if not isinstance(group, str):
        raise TypeError
    return group


def _read_chunk(tokens: Any) -> float:
    """Any number; the caller rounds it down, and takes no more than is wanted and left."""
    is_float = isinstance(tokens, float) and tokens == tokens  # NaN does not equal itself
    return tokens if is_float else index(tokens)


def _read_headroom(blocks: Any) -> Headroom:
    headroom = Headroom(max(0, int(blocks + 0)))  # int() alone would take a text
    if isinstance(blocks, Headroom):
        headroom.base = blocks.base
    return headroom


def _read_swap(answer: Any) -> bool | Literal["discard"]:
    if not isinstance(answer, str):
        return bool(answer)
    if answer != "discard":  # "recompute" would count as true, and swap
        raise ValueError
    return "discard"


def _read_tokens(tokens: Any) -> tuple[int, ...]:
    found = tuple(map(index, tokens))
    if found and not UNKNOWN_TOKEN <= min(found) <= max(found) <= MAX_TOKEN_ID:
        raise ValueError
    return found


REQUEST, TOKENS = "request {0.id!r}", "for {0} tokens wanted and {1} left"
ORDERED = "return a number, a string or a tuple of these, without NaN or None"

QUEUE_KEY = Call(
    "queue", f"for {REQUEST}", ordered, f"as the sort key of {REQUEST}; {ORDERED}", "key"
)
QUEUE_GROUP = Call(
    "queue", f"in group() for {REQUEST}", _read_group,
    f"as the group of {REQUEST}; return a string", "group",
)  # fmt: skip
OUTRANKS = Call(
    "queue", f"in outranks() for {REQUEST}", bool,
    f"in outranks() for {REQUEST}; return True or False", "outranks",
)  # fmt: skip
CHUNK = Call("chunk", TOKENS, _read_chunk, f"{TOKENS}; return a number")
TIME_LIMIT = Call(
    "chunk", "in most_tokens() for {0} tokens wanted", index,
    "in most_tokens() for {0} tokens wanted; return a whole number", "most_tokens",
)  # fmt: skip
HEADROOM = Call("headroom", f"for {REQUEST}", _read_headroom, f"for {REQUEST}; return a number")
VICTIM = Call("victim", f"for {REQUEST}", ordered, f"as the key of {REQUEST}; {ORDERED}")
DRAFT = Call("draft", f"for {REQUEST}", index, f"for {REQUEST}; return a whole number")
DRAFTER = Call(
    "drafter", f"for {REQUEST}", _read_tokens, f"for {REQUEST}; return token ids", "propose"
)
SWAP = Call("swap", f"for {REQUEST}", _read_swap, f'for {REQUEST}; return True, False or "discard"')


class Policies:
    """The policies of a config as functions whose results are checked."""

    def __init__(self, config: Config) -> None:
        self.outranks = checked(OUTRANKS, config.queue)
        self.chunk = checked(CHUNK, config.chunk)
        self.most_tokens = checked(TIME_LIMIT, config.chunk) if config.limits_time else None
        self.headroom = checked(HEADROOM, config.headroom)
        self.victim = checked(VICTIM, config.victim)
        self.swap = checked(SWAP, config.swap)
        self.draft = checked(DRAFT, config.draft) if config.draft is not None else None
