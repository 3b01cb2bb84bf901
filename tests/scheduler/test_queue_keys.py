"""Laws of the waiting queue: any key that a rule returns is refused, or keeps every request findable."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import PolicyError
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset, queues
from headway.scheduler.policy_calls import is_orderable
from headway.scheduler.queues import WaitingQueue


class Contrary:
    """Equal to itself, and below everything else: no order at all."""

    def __lt__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        return "Contrary()"


@dataclass(frozen=True)
class drawn(queues.Rule):
    """Keys from a list, in the order in which they are asked for."""

    keys: list[Any] = field(default_factory=list)
    num_groups: int = 1
    drifts = True

    def key(self, request: Request, world: object) -> Any:
        return self.keys.pop() if self.keys else 0.0

    def group(self, request: Request) -> str:
        return str(int(request.id) % self.num_groups)


numbers = st.sampled_from([0, 1, 1.0, -1.5, inf, -inf, nan, True, 10**400, np.float64(nan)])
anything = st.recursive(
    numbers | st.sampled_from(["a", None, 1j, frozenset({1}), frozenset({2}), Contrary()]),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(
    keys=st.lists(numbers | st.tuples(numbers, numbers), max_size=40)
    | st.lists(st.builds(Contrary) | st.sampled_from([frozenset({1}), frozenset({2})]), max_size=40)
    | st.lists(anything, max_size=40),
    num_groups=st.integers(1, 3),
    acts=st.lists(st.tuples(st.sampled_from(["push", "remove", "walk"]), st.integers(0, 99))),
)
@settings(max_examples=300, deadline=None)
def test_remove_takes_out_exactly_that_request(
    keys: list[Any], num_groups: int, acts: list[tuple[str, int]]
) -> None:
    rule = drawn(keys=keys, num_groups=num_groups)
    queue = WaitingQueue(rule, Scheduler(preset(num_blocks=4)).state.view)
    waiting: list[Request] = []
    for number, (act, choice) in enumerate([*acts, *[("remove", 0)] * len(acts)]):
        try:
            if act == "push":
                request = Request(str(number), [1], Params())
                request.history.serial = number
                queue.push(request)
                waiting.append(request)
            elif act == "walk":
                walked = list(queue.walk())
                assert set(walked) == set(waiting) and len(walked) == len(waiting)
            elif waiting:
                queue.remove(waiting.pop(choice % len(waiting)))
        except PolicyError as error:  # the key was refused: nothing has changed
            assert error.slot == "queue" and act != "remove"
        except TypeError:  # keys of two groups that do not compare: this fails a step, no more
            assert act == "walk" and num_groups > 1
        assert set(queue) == set(waiting) and len(queue) == len(waiting)
    assert not queue._groups and not queue._keys and not queue._next_refresh


@pytest.mark.parametrize(
    "key",
    [nan, (1.0, nan), (1, (2, [nan])), np.float64(nan), None, (None, 1), {}, 1j, object(), [{}]],
    ids=lambda key: type(key).__name__,
)
def test_a_key_that_has_no_place_in_an_order_is_refused_and_shown(key: Any) -> None:
    scheduler = Scheduler(preset(queue=lambda request, world: key))
    with pytest.raises(PolicyError, match="sort key of request 'a'") as caught:
        scheduler.add(Request("a", [1], Params()))
    assert repr(key)[:40] in str(caught.value) and scheduler.is_idle


@pytest.mark.parametrize("key", [0, -inf, 10**400, "x", True, (), (1, "x", [2.0]), b"x"], ids=repr)
def test_a_key_of_plain_values_is_taken(key: Any) -> None:
    assert is_orderable(key)
    scheduler = Scheduler(preset(queue=lambda request, world: key))
    for id in "abc":
        scheduler.add(Request(id, [1], Params()))
    for id in "bac":
        assert scheduler.abort(id) and id not in {request.id for request in scheduler.queue}
    assert scheduler.is_idle


def test_a_key_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    scheduler = Scheduler(preset(queue=lambda request, world: endless))
    with pytest.raises(PolicyError, match="queue"):
        scheduler.add(Request("a", [1], Params()))
    assert scheduler.is_idle


def test_a_group_is_asked_for_once() -> None:
    """So a rule that changes its mind, or begins to raise, cannot lose a request's counters."""
    asked: list[str] = []

    @dataclass(frozen=True)
    class fickle(queues.fair):
        def group(self, request: Request) -> str:
            asked.append(request.id)
            if len(asked) > 2:
                raise RuntimeError("no more groups")
            return str(len(asked))

    scheduler = Scheduler(preset(queue=fickle(), num_blocks=64))
    for id in "ab":
        scheduler.add(Request(id, [1, 2], Params(max_tokens=3)))
    scheduler.schedule()
    assert scheduler.abort("a") and scheduler.abort("b")
    assert asked == ["a", "b"] and not scheduler.requests
