"""Call a policy and check its result; a PolicyError names slot, policy, request, cause and line.

A policy may be a user's function, so it may raise anything and return anything. These calls change
nothing: the caller decides what a failure ends.
"""

from __future__ import annotations

import os
from operator import index
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal

from headway.config import (
    BatchingRule,
    ChunkRule,
    HeadroomRule,
    QueueRule,
    SchedulerView,
    StepActions,
    SwapRule,
    VictimRule,
)
from headway.errors import PolicyError, shorten
from headway.request import Request
from headway.step_cost import StepWork

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
KEYS = "return a number, a string or a tuple of these, without NaN or None"


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
    slot: str,
    rule: object,
    result: object,
    purpose: str,
    advice: str,
    request_id: str | None = None,
) -> PolicyError:
    """The PolicyError for a value that a policy must not return."""
    text = f"{slot} policy {_name(rule)} returned {shorten(result)} {purpose}; {advice}"
    return PolicyError(text, slot=slot, request_id=request_id)


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


def call_batching(rule: BatchingRule, step: StepActions) -> None:
    """Let the batching rule build the step; PolicyError if a user's rule raises."""
    try:
        rule(step)
    except Exception as error:
        if _line_of_policy(error) is None:
            raise
        raise policy_failed("batching", rule, "to build a step", error) from error


def call_key(rule: QueueRule, request: Request, view: SchedulerView) -> Any:
    """The sort key of a request; PolicyError unless it has an order."""
    try:
        key = rule.key(request, view)
    except Exception as error:
        where = f"for request {request.id!r}"
        raise policy_failed("queue", rule, where, error, request.id) from error
    if not is_orderable(key):
        purpose = f"as the sort key of request {request.id!r}"
        raise bad_result("queue", rule, key, purpose, KEYS, request.id)
    return key


def call_group(rule: QueueRule, request: Request) -> str:
    """The group of a request; PolicyError unless it is a string."""
    try:
        group = rule.group(request)
    except Exception as error:
        where = f"in group() for request {request.id!r}"
        raise policy_failed("queue", rule, where, error, request.id) from error
    if not isinstance(group, str):
        purpose = f"as the group of request {request.id!r}"
        raise bad_result("queue", rule, group, purpose, "return a string", request.id)
    return group


def call_chunk(rule: ChunkRule, want: int, left: int, is_first: bool) -> int:
    """Tokens of `want` that the chunk rule grants, in [0, min(want, left)]; floats round down."""
    try:
        granted: Any = rule(want, left, is_first)
    except Exception as error:
        where = f"for {want} tokens wanted and {left} left"
        raise policy_failed("chunk", rule, where, error) from error
    try:
        granted = granted if isinstance(granted, float) else index(granted)
        # In this order, NaN reaches int(), which raises.
        return int(max(min(granted, want, left), 0))
    except Exception:
        where = f"for {want} tokens wanted and {left} left"
        raise bad_result("chunk", rule, granted, where, "return a number") from None


def call_most_tokens(rule: ChunkRule, want: int, work: StepWork, start: int) -> int:
    """Tokens of `want` that a rule with a limit of time allows; PolicyError unless a whole number."""
    where = f"in most_tokens() for {want} tokens wanted"
    try:
        most: int = rule.most_tokens(want, work, start)  # type: ignore[attr-defined]
        return index(most)
    except Exception as error:
        raise policy_failed("chunk", rule, where, error) from error


def call_victim(rule: VictimRule, request: Request, view: SchedulerView) -> Any:
    """The key of a running request; PolicyError unless it has an order."""
    try:
        key = rule(request, view)
    except Exception as error:
        where = f"for request {request.id!r}"
        raise policy_failed("victim", rule, where, error, request.id) from error
    if not is_orderable(key):
        purpose = f"as the key of request {request.id!r}"
        raise bad_result("victim", rule, key, purpose, KEYS, request.id)
    return key


def call_headroom(rule: HeadroomRule, request: Request, view: SchedulerView) -> int:
    """Blocks to leave free when the request is admitted, at least 0; PolicyError if not a number."""
    where = f"for request {request.id!r}"
    try:
        blocks: Any = rule(request, view)
    except Exception as error:
        raise policy_failed("headroom", rule, where, error, request.id) from error
    try:
        return max(0, int(blocks + 0))  # int() alone would take a text
    except Exception:
        raise bad_result("headroom", rule, blocks, where, "return a number", request.id) from None


def call_swap(rule: SwapRule, request: Request, view: SchedulerView) -> bool | Literal["discard"]:
    """Whether to swap the request out rather than recompute it, or to discard its output too."""
    where = f"for request {request.id!r}"
    try:
        answer: Any = rule(request, view)
        if not isinstance(answer, str):
            return bool(answer)
    except Exception as error:
        raise policy_failed("swap", rule, where, error, request.id) from error
    if answer != "discard":  # "recompute" would count as true, and swap
        advice = 'return True, False or "discard"'
        raise bad_result("swap", rule, answer, where, advice, request.id)
    return "discard"


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
