"""Call a policy and check its result; a PolicyError names slot, policy, request, cause and line.

A policy may be a user's function, so it may raise anything and return anything. These calls change
nothing: the caller decides what a failure ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from operator import index
from pathlib import Path
from traceback import walk_tb
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from headway.config import BatchingRule, Headroom, StepActions
from headway.errors import PolicyError, shorten
from headway.request import Request

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


T = TypeVar("T")


class Call(NamedTuple, Generic[T]):
    """A kind of policy call: how its result is read, and what errors say. `where` and `wanted` are
    formats of the arguments."""

    slot: str
    where: str
    read: Callable[..., T]  # takes the result and the arguments; raises if the result is no good
    wanted: str
    method: str | None = None  # of the rule; None: the rule itself is called


def call(kind: Call[T], rule: Any, *arguments: Any) -> T:
    """The result of a policy; PolicyError if it raises, or returns what its slot does not take."""
    policy = rule if kind.method is None else getattr(rule, kind.method)
    try:
        result = policy(*arguments)
    except Exception as error:
        where, id = kind.where.format(*arguments), _request_id(arguments)
        raise policy_failed(kind.slot, rule, where, error, id) from error
    try:
        return kind.read(result, *arguments)
    except Exception:
        wanted, id = kind.wanted.format(*arguments), _request_id(arguments)
        raise bad_result(kind.slot, rule, result, wanted, id) from None


def call_batching(rule: BatchingRule, step: StepActions) -> None:
    """Let the batching rule build the step; PolicyError if a user's rule raises."""
    try:
        rule(step)
    except Exception as error:
        if _line_of_policy(error) is None:
            raise
        raise policy_failed("batching", rule, "to build a step", error) from error


def policy_failed(
    slot: str, rule: object, where: str, error: Exception, request_id: str | None = None
) -> PolicyError:
    """The PolicyError for an exception that a policy raised."""
    if isinstance(error, PolicyError):
        return error
    cause, line = f"{type(error).__name__}: {error}", _line_of_policy(error)
    text = f"{slot} policy {_name(rule)} failed {where}: {cause}"
    return PolicyError(f"{text} ({line})" if line else text, slot=slot, request_id=request_id)


def bad_result(
    slot: str, rule: object, result: object, wanted: str, request_id: str | None = None
) -> PolicyError:
    """The PolicyError for a value that a policy must not return."""
    text = f"{slot} policy {_name(rule)} returned {shorten(result)} {wanted}"
    return PolicyError(text, slot=slot, request_id=request_id)


def _request_id(arguments: tuple[Any, ...]) -> str | None:
    return getattr(arguments[0], "id", None)  # chunk rules get numbers only


def _name(rule: object) -> str:
    """module:function; module:class for an object."""
    rule = getattr(rule, "function", rule)  # of a queue rule that wraps a user's function
    named: Any = rule if hasattr(rule, "__qualname__") else type(rule)
    return f"{named.__module__}:{named.__qualname__}"


def _line_of_policy(error: Exception) -> str | None:
    """file:line, the latest in the file of the user's policy; None if no such file took part."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    outside = [(file, line) for file, line in lines if not file.startswith(PACKAGE)]
    own = [line for file, line in outside if file == outside[0][0]]
    return f"{outside[0][0]}:{own[-1]}" if own else None


def is_orderable(key: Any) -> bool:
    """Whether a key, with all its items, equals itself and is not less than itself."""
    if isinstance(key, float | int | str):
        return bool(key == key)  # NaN does not equal itself
    try:
        if isinstance(key, tuple | list):
            return all(map(is_orderable, key))
        return bool(key == key) and not key < key
    except Exception:  # no order, or a list that contains itself
        return False


def _read_key(key: Any, *arguments: Any) -> Any:
    if not is_orderable(key):
        raise ValueError
    return key


def _read_group(group: Any, request: Request) -> str:
    if not isinstance(group, str):
        raise TypeError
    return group


def _read_chunk(tokens: Any, want: int, left: int, is_first: bool) -> int:
    """In [0, min(want, left)]; floats round down."""
    tokens = tokens if isinstance(tokens, float) else index(tokens)
    return int(max(min(tokens, want, left), 0))  # in this order, NaN reaches int(), which raises


def _read_headroom(blocks: Any, *arguments: Any) -> Headroom:
    """At least 0."""
    base = blocks.base if isinstance(blocks, Headroom) else inf
    return Headroom(max(0, int(blocks + 0)), base)  # int() alone would take a text


def _read_swap(answer: Any, *arguments: Any) -> bool | Literal["discard"]:
    if not isinstance(answer, str):
        return bool(answer)
    if answer != "discard":  # "recompute" would count as true, and swap
        raise ValueError
    return "discard"


REQUEST, TOKENS = "request {0.id!r}", "for {0} tokens wanted and {1} left"
ORDERED = "return a number, a string or a tuple of these, without NaN or None"

QUEUE_KEY = Call(
    "queue", f"for {REQUEST}", _read_key, f"as the sort key of {REQUEST}; {ORDERED}", "key"
)
QUEUE_GROUP = Call(
    "queue", f"in group() for {REQUEST}", _read_group,
    f"as the group of {REQUEST}; return a string", "group",
)  # fmt: skip
CHUNK = Call("chunk", TOKENS, _read_chunk, f"{TOKENS}; return a number")
TIME_LIMIT = Call(
    "chunk", "in most_tokens() for {0} tokens wanted", lambda tokens, *_: index(tokens),
    "in most_tokens() for {0} tokens wanted; return a whole number", "most_tokens",
)  # fmt: skip
HEADROOM = Call("headroom", f"for {REQUEST}", _read_headroom, f"for {REQUEST}; return a number")
VICTIM = Call("victim", f"for {REQUEST}", _read_key, f"as the key of {REQUEST}; {ORDERED}")
SWAP = Call("swap", f"for {REQUEST}", _read_swap, f'for {REQUEST}; return True, False or "discard"')
