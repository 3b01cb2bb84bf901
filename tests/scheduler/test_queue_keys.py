"""Laws of the waiting queue: a key is refused, or the request can be found and removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import PolicyError
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies import queue as queues
from headway.scheduler.policy_calls import ordered
from headway.scheduler.queue import WaitingQueue


class Inconsistent:
    """Less than every other value: not an order."""

    def __lt__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        return "Inconsistent()"


@dataclass(frozen=True)
class given_keys(queues.Rule):
    """Keys from a list, in the order of the calls."""

    keys: list[Any] = field(default_factory=list)
    num_groups: int = 1
    keys_change = True

    def key(self, request: Request, view: object) -> Any:
        return self.keys.pop() if self.keys else 0.0

    def group(self, request: Request) -> str:
        return str(int(request.id) % self.num_groups)


number_keys = st.sampled_from([0, 1, 1.0, -1.5, inf, -inf, nan, True, 10**400, np.float64(nan)])
any_keys = st.recursive(
    number_keys | st.sampled_from(["a", None, 1j, frozenset({1}), frozenset({2}), Inconsistent()]),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(
    keys=st.lists(number_keys | st.tuples(number_keys, number_keys), max_size=40)
    | st.lists(
        st.builds(Inconsistent) | st.sampled_from([frozenset({1}), frozenset({2})]), max_size=40
    )
    | st.lists(any_keys, max_size=40),
    num_groups=st.integers(1, 3),
    actions=st.lists(st.tuples(st.sampled_from(["push", "remove", "walk"]), st.integers(0, 99))),
)
@settings(max_examples=300, deadline=None)
def test_remove_removes_exactly_that_request(
    keys: list[Any], num_groups: int, actions: list[tuple[str, int]]
) -> None:
    rule = given_keys(keys=keys, num_groups=num_groups)
    queue = WaitingQueue(rule, Scheduler(preset(num_blocks=4)).state.view)
    waiting: list[Request] = []
    for number, (action, choice) in enumerate([*actions, *[("remove", 0)] * len(actions)]):
        try:
            if action == "push":
                request = Request(str(number), [1], RequestParams())
                request.history.serial = number
                queue.push(request)
                waiting.append(request)
            elif action == "walk":
                walked = list(queue.walk())
                assert set(walked) == set(waiting) and len(walked) == len(waiting)
            elif waiting:
                queue.remove(waiting.pop(choice % len(waiting)))
        except PolicyError as error:  # the key is refused and nothing changes
            assert error.slot == "queue" and action != "remove"
        except TypeError:  # keys of two groups are not comparable: only the step fails
            assert action == "walk" and num_groups > 1
        assert set(queue) == set(waiting) and len(queue) == len(waiting)
    assert not queue._groups and not queue._keys and not queue._next_refresh


@pytest.mark.parametrize(
    "key",
    [nan, (1.0, nan), (1, (2, [nan])), np.float64(nan), None, (None, 1), {}, 1j, object(), [{}]],
    ids=lambda key: type(key).__name__,
)
def test_a_key_without_an_order_is_refused_and_shown(key: Any) -> None:
    scheduler = Scheduler(preset(queue=lambda request, view: key))
    with pytest.raises(PolicyError, match="request 'a'") as caught:
        scheduler.add(Request("a", [1], RequestParams()))
    assert repr(key)[:40] in str(caught.value) and scheduler.is_idle


@pytest.mark.parametrize("key", [0, -inf, 10**400, "x", True, (), (1, "x", [2.0]), b"x"], ids=repr)
def test_a_key_of_ordered_values_is_accepted(key: Any) -> None:
    assert ordered(key) is key
    scheduler = Scheduler(preset(queue=lambda request, view: key))
    for id in "abc":
        scheduler.add(Request(id, [1], RequestParams()))
    for id in "bac":
        assert scheduler.abort(id) and id not in {request.id for request in scheduler.queue}
    assert scheduler.is_idle


def test_a_request_is_removed_even_if_its_key_no_longer_compares() -> None:
    class Fading:
        def __init__(self, value: int) -> None:
            self.value = value

        def __lt__(self, other: Fading) -> bool:
            if is_broken:
                raise RuntimeError("no order any more")
            return self.value < other.value

    is_broken = False
    queue = Scheduler(preset(queue=lambda request, view: Fading(int(request.id)))).queue
    requests = [Request(id, [1], RequestParams()) for id in "012"]
    for request in requests:
        queue.push(request)
    is_broken = True
    for request in (requests[1], requests[2], requests[0]):
        queue.remove(request)
        assert request not in set(queue)
    assert len(queue) == 0


def test_a_key_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    scheduler = Scheduler(preset(queue=lambda request, view: endless))
    with pytest.raises(PolicyError, match="queue"):
        scheduler.add(Request("a", [1], RequestParams()))
    assert scheduler.is_idle


def test_the_group_rule_is_called_once_per_request() -> None:
    """So a rule whose groups change, or that starts to raise, cannot corrupt the counters."""
    calls: list[str] = []

    @dataclass(frozen=True)
    class changing(queues.fair):
        def group(self, request: Request) -> str:
            calls.append(request.id)
            if len(calls) > 2:
                raise RuntimeError("no more groups")
            return str(len(calls))

    scheduler = Scheduler(preset(queue=changing(), num_blocks=64))
    for id in "ab":
        scheduler.add(Request(id, [1, 2], RequestParams(max_tokens=3)))
    scheduler.schedule()
    assert scheduler.abort("a") and scheduler.abort("b")
    assert calls == ["a", "b"] and not scheduler.requests


@pytest.mark.parametrize(
    ("num_waiting", "rest"),
    [(1, [()]), (16, [()]), (17, [(16,)]), (40, [range(16, 32), range(32, 40), range(16, 32)])],
)
def test_keys_are_refreshed_at_the_front_and_elsewhere_in_turn(
    num_waiting: int, rest: list[Any]
) -> None:
    asked: list[int] = []

    def key(request: Request, view: object) -> float:
        asked.append(int(request.id))
        return request.arrival

    queue = Scheduler(preset(queue=key)).queue
    for number in range(num_waiting):
        queue.push(Request(str(number), [1], RequestParams(), arrival=float(number)))
    for later in rest:
        asked.clear()
        next(queue.walk())
        assert asked == [*range(min(16, num_waiting)), *later]
