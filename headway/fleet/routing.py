"""Routing rules: which replica gets a request. The gateway and the simulator call the same rules.

A rule is called with a request and a view of every replica that takes requests, and returns an
index into the views. A rule without numbers is a function. A rule with numbers is a callable frozen
dataclass. Neither keeps state: the serial number of the decision and the views have what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

from headway.errors import ConfigError, shorten
from headway.scheduler import policy_text
from headway.scheduler.policy_calls import bad_result, policy_failed


class RouteRequest(NamedTuple):
    """What a rule may read of a request."""

    id: str
    num_prompt: int
    keys: Sequence[bytes]  # prefix keys of the full blocks of its prompt
    client: str
    tick: int  # serial number of the decision


class ReplicaView(NamedTuple):
    """What a rule may read of a replica."""

    name: str
    num_cached: int  # prompt tokens of this request that its cache holds
    num_new: int  # prompt tokens left to compute after these hits, at least 1
    waiting_tokens: int  # prompt tokens not yet computed of requests sent to it
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int

    @property
    def num_open(self) -> int:
        """Requests that were sent to it and have not ended."""
        return self.num_running + self.num_waiting


RouteRule = Callable[[RouteRequest, Sequence[ReplicaView]], int]


def prefix_load(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    """Least product of prompt tokens to compute, this request's included, and open requests."""
    return _least(
        [
            ((view.waiting_tokens + view.num_new) * (view.num_open + 1), view.num_open)
            for view in replicas
        ],
        request.tick,
    )


def least_loaded(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    """Fewest open requests, then fewest prompt tokens to compute; ties in turn."""
    return _least([(view.num_open, view.waiting_tokens) for view in replicas], request.tick)


def round_robin(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    """Each replica in turn."""
    return request.tick % len(replicas)


def _least(keys: Sequence[Any], tick: int) -> int:
    """The index of the least key; equal ones are taken in turn."""
    least = min(keys)
    places = [place for place, key in enumerate(keys) if key == least]
    return places[tick % len(places)]


ROUTES: tuple[Any, ...] = (prefix_load, least_loaded, round_robin)
DEFAULT_ROUTE = "prefix_load"


def parse_route(text: str) -> RouteRule:
    """The rule that a text names; ConfigError if it is unknown or takes other arguments."""
    known = {rule.__name__: rule for rule in ROUTES}
    rule: Any = policy_text.parse_policy("route", text, known, {})
    if not callable(rule):
        raise ConfigError(
            f"route must be a rule name, module:function or a callable, not {shorten(rule)}"
        )
    policy_text.check_arguments("route", rule, "request replicas")
    return rule  # type: ignore[no-any-return]


def format_route(rule: RouteRule) -> str:
    """The text that `parse_route` reads as this rule."""
    return policy_text.format_policy(rule, ROUTES)


def call_route(rule: RouteRule, request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    """The index of the chosen replica; PolicyError if a rule raises or returns no valid index."""
    try:
        place: Any = rule(request, replicas)
    except Exception as error:
        raise policy_failed("route", rule, f"for request {request.id!r}", error) from error
    try:
        number = index(place)
    except TypeError:
        number = -1
    if not 0 <= number < len(replicas):
        purpose, most = f"for request {request.id!r}", len(replicas) - 1
        raise bad_result("route", rule, place, purpose, f"return an index from 0 to {most}")
    return number
