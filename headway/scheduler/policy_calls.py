"""Call a policy and check its result; a PolicyError names the slot, the request and the cause.

A policy may be a user's function, so it may raise anything and return anything. These calls change
nothing: the caller decides what a failure ends.
"""

from __future__ import annotations

from operator import index
from typing import Any, Literal

from headway.config import (
    ChunkRule,
    HeadroomRule,
    QueueRule,
    SchedulerView,
    SwapRule,
    VictimRule,
)
from headway.errors import PolicyError, shorten
from headway.request import Request


def policy_failed(slot: str, where: str, error: Exception) -> PolicyError:
    """The PolicyError for an exception that a policy raised."""
    if isinstance(error, PolicyError):
        return error
    return PolicyError(f"{slot} policy failed {where}: {type(error).__name__}: {error}", slot=slot)


def call_key(rule: QueueRule, request: Request, view: SchedulerView) -> Any:
    """The sort key of a request; PolicyError unless it has an order."""
    try:
        key = rule.key(request, view)
    except Exception as error:
        raise policy_failed("queue", f"for request {request.id!r}", error) from error
    if not is_orderable(key):
        raise PolicyError(
            f"queue policy returned {shorten(key)} as the sort key of request {request.id!r}; "
            "return a number, a string or a tuple of these, without NaN or None",
            slot="queue",
        )
    return key


def call_group(rule: QueueRule, request: Request) -> str:
    """The group of a request; PolicyError unless it is a string."""
    try:
        group = rule.group(request)
    except Exception as error:
        raise policy_failed("queue", f"in group() for request {request.id!r}", error) from error
    if not isinstance(group, str):
        raise PolicyError(
            f"queue policy returned {shorten(group)} as the group of request {request.id!r}; "
            "return a string",
            slot="queue",
        )
    return group


def call_chunk(rule: ChunkRule, want: int, left: int, is_first: bool) -> int:
    """Tokens of `want` that the chunk rule grants, in [0, min(want, left)]; floats round down."""
    try:
        granted: Any = rule(want, left, is_first)
        granted = granted if isinstance(granted, float) else index(granted)
        # In this order, NaN reaches int(), which raises.
        return int(max(min(granted, want, left), 0))
    except Exception as error:
        where = f"for {want} tokens wanted and {left} left"
        raise policy_failed("chunk", where, error) from error


def call_victim(rule: VictimRule, request: Request, view: SchedulerView) -> Any:
    """The key of a running request; PolicyError unless it has an order."""
    try:
        key = rule(request, view)
    except Exception as error:
        raise policy_failed("victim", f"for request {request.id!r}", error) from error
    if not is_orderable(key):
        raise PolicyError(
            f"victim policy returned {shorten(key)} as the key of request {request.id!r}; "
            "return a number, a string or a tuple of these, without NaN or None",
            slot="victim",
        )
    return key


def call_headroom(rule: HeadroomRule, request: Request, view: SchedulerView) -> int:
    """Blocks to leave free when the request is admitted, at least 0; PolicyError if not a number."""
    try:
        return max(0, int(rule(request, view)))
    except Exception as error:
        raise policy_failed("headroom", f"for request {request.id!r}", error) from error


def call_swap(rule: SwapRule, request: Request, view: SchedulerView) -> bool | Literal["discard"]:
    """Whether to swap the request out rather than recompute it, or to discard its output too."""
    try:
        answer = rule(request, view)
        return "discard" if isinstance(answer, str) and answer == "discard" else bool(answer)
    except Exception as error:
        raise policy_failed("swap", f"for request {request.id!r}", error) from error


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
