"""Laws of the waiting queue: its order, keys that change, groups, and what may be overtaken."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from headway.config import ALL
from headway.errors import PolicyError
from headway.request import Request, RequestParams
from headway.scheduler.policies import queue as queues
from headway.scheduler.queue import NUM_REFRESHED, WaitingQueue
from tests.support.drive import small_driver


@dataclass(frozen=True)
class listed(queues.Rule):
    """Keys from a table that a test changes; counts how often each is asked for."""

    keys: dict[str, Any] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    keys_change = True

    def key(self, request: Request, view: object) -> Any:
        self.asked[request.id] += 1
        return self.keys[request.id]

    def group(self, request: Request) -> str:
        return request.params.client or ALL


class NoService:
    """A view in which each group has the service that a test sets."""

    def __init__(self, **served: float) -> None:
        self.served = served

    def service(self) -> dict[str, float]:
        return self.served


def a_queue(rule: Any, number: int, **served: float) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue(rule, NoService(**served))  # type: ignore[arg-type]
    requests = []
    for serial in range(number):
        request = Request(str(serial), [1], RequestParams())
        request.history.serial = serial
        rule.keys.setdefault(request.id, serial)
        queue.push(request)
        requests.append(request)
    return queue, requests


def order(queue: WaitingQueue, **more: Any) -> list[str]:
    return [request.id for request in queue.walk(**more)]


def test_new_keys_at_the_front_count_at_once() -> None:
    assert NUM_REFRESHED == 16
    rule = listed()
    queue, _ = a_queue(rule, 100)
    rule.keys.update({str(place): -place for place in range(NUM_REFRESHED)})
    assert order(queue)[:NUM_REFRESHED] == [str(p) for p in reversed(range(NUM_REFRESHED))]


@pytest.mark.parametrize("number", (1, 15, 16, 17, 32, 33, 48, 100))
def test_every_key_is_refreshed_in_turn_and_few_at_a_time(number: int) -> None:
    rule = listed()
    queue, _ = a_queue(rule, number)
    num_turns = -(-max(number - NUM_REFRESHED, 0) // NUM_REFRESHED)
    rule.asked.clear()
    for _ in range(max(num_turns, 1)):
        before = rule.asked.total()
        order(queue)
        assert rule.asked.total() - before <= 2 * NUM_REFRESHED
    assert set(rule.asked) == {str(place) for place in range(number)}
    front = {str(place) for place in range(min(number, NUM_REFRESHED))}
    assert all(rule.asked[id] == max(num_turns, 1) for id in front)
    assert all(count == 1 for id, count in rule.asked.items() if id not in front)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_few_walks_the_order_is_that_of_the_new_keys(seed: int) -> None:
    rng, rule = random.Random(seed), listed()
    number = rng.randint(2, 120)
    queue, requests = a_queue(rule, number)
    values = list(range(number))
    rng.shuffle(values)
    rule.keys.update({str(place): value for place, value in enumerate(values)})
    for _ in range(2 * number):
        order(queue)
    wanted = sorted(range(number), key=values.__getitem__)
    assert order(queue) == [str(place) for place in wanted]
    for request in rng.sample(requests, number // 2):  # still found, and nothing else is removed
        queue.remove(request)
        wanted.remove(int(request.id))
        assert len(queue) == len(wanted)
    assert order(queue) == [str(place) for place in wanted] == [r.id for r in queue]


def test_keys_that_cannot_be_compared_leave_the_queue_as_it_was() -> None:
    rule = listed()
    queue, requests = a_queue(rule, 20)
    rule.keys.update({"3": "text", "5": -1})
    with pytest.raises(Exception, match="queue"):
        order(queue)
    rule.keys.update({"3": 3, "5": 5})
    assert order(queue) == [str(place) for place in range(20)]
    for request in requests:
        queue.remove(request)
    assert not len(queue) and not order(queue)


class Unordered:
    """A key that is less than no other, so that bisection finds a wrong place."""

    def __lt__(self, other: object) -> bool:
        return False


def test_a_request_is_found_where_its_key_has_no_order() -> None:
    rule = listed(keys={str(place): Unordered() for place in range(8)})
    queue, requests = a_queue(rule, 0)
    for place in range(8):
        requests.append(Request(str(place), [1], RequestParams()))
        queue.push(requests[-1])
    left = {request.id for request in requests}
    for request in random.Random(1).sample(requests, 8):
        queue.remove(request)
        left.remove(request.id)
        assert {each.id for each in queue} == left


def test_another_rule_orders_those_that_wait_and_those_that_come() -> None:
    queue, _ = a_queue(listed(), 4)
    backwards = listed(keys={str(place): -place for place in range(6)})
    queue.change_rule(backwards, [])
    assert queue.rule is backwards and order(queue) == ["3", "2", "1", "0"]
    late = Request("5", [1], RequestParams(client="new"))
    queue.push(late)
    assert order(queue) == ["5", "3", "2", "1", "0"]
    assert queue.counters.served == {ALL: 0.0}


def test_a_rule_that_cannot_be_used_leaves_the_groups_as_they_were() -> None:
    class Fails(listed):
        def group(self, request: Request) -> str:
            return "other"

        def key(self, request: Request, view: object) -> Any:
            raise ValueError("no key")

    queue, requests = grouped(a=0.0, b=1.0)
    running = Request("running", [1], RequestParams(client="b"))
    requests_of_both = [running, *requests.values()]
    before = [request.history.group for request in requests_of_both]
    with pytest.raises(PolicyError):
        queue.change_rule(Fails(), [running])
    assert [request.history.group for request in requests_of_both] == before
    assert set(before) > {"a"}


def grouped(**served: float) -> tuple[WaitingQueue, dict[str, Request]]:
    """Three requests of each group, all with equal keys."""
    rule = listed()
    queue = WaitingQueue(rule, NoService(**served))  # type: ignore[arg-type]
    requests = {}
    for serial, (group, length) in enumerate((g, n) for n in (10, 20, 30) for g in served):
        request = Request(f"{group}{length}", range(length), RequestParams(client=group))
        request.history.serial = serial
        rule.keys[request.id] = 0
        queue.push(request)
        requests[request.id] = request
    return queue, requests


def test_groups_are_walked_by_their_service_and_within_a_group_by_key() -> None:
    queue, _ = grouped(b=5.0, a=9.0)
    assert order(queue) == ["b10", "b20", "b30", "a10", "a20", "a30"]
    assert queue.sort_key(next(queue.walk()))[0] == 5.0


@pytest.mark.parametrize("first", ("known", "new"))
def test_a_group_without_any_service_yet_counts_as_zero(first: str) -> None:
    """With equal service the lower key is served first, whichever group it is in."""
    rule = listed()
    queue = WaitingQueue(rule, NoService(known=0.0))  # type: ignore[arg-type]
    for serial, group in enumerate(("known", "new", "known", "new")):
        request = Request(f"{group}{serial}", [1], RequestParams(client=group))
        request.history.serial, rule.keys[request.id] = serial, (serial // 2, group != first)
        queue.push(request)
        assert queue.sort_key(request)[0] == 0.0
    second = "new" if first == "known" else "known"
    assert [id[:-1] for id in order(queue)] == [first, second, first, second]


def test_a_group_that_gains_service_during_a_walk_goes_behind_the_others() -> None:
    queue, requests = grouped(b=5.0, a=9.0)
    seen = []
    for request in queue.walk():
        seen.append(request.id)
        queue.remove(request)
        group = request.params.client
        queue._view.served[group] += request.num_known  # type: ignore[attr-defined]
    assert seen == ["b10", "a10", "b20", "a20", "b30", "a30"] and not len(queue)
    assert set(seen) == set(requests)


@pytest.mark.parametrize(
    "max_service, wanted",
    ((25, "b10 b20 a10"), (24, "b10 a10"), (19, "b10 a10"), (18, "b10"), (15, "b10"), (14, "")),
)
def test_a_walk_with_a_limit_skips_what_would_exceed_it(max_service: float, wanted: str) -> None:
    """A group is passed over from its first request on that would have too much."""
    queue, _ = grouped(b=5.0, a=9.0)
    assert " ".join(order(queue, max_service=max_service)) == wanted


def test_other_groups_are_those_that_wait_and_are_not_the_requests_own() -> None:
    queue, requests = grouped(b=5.0, a=9.0)
    assert queue.has_other_groups(requests["a10"])
    for id in ("b10", "b20", "b30"):
        queue.remove(requests[id])
    assert not queue.has_other_groups(requests["a10"])
    assert queue.has_other_groups(requests["b10"])  # runs, while only the other group waits


def test_ready_made_keys_order_by_what_their_names_say() -> None:
    def key(rule: Any, arrival: float = 0.0, num_uncached: int = 0, **params: Any) -> Any:
        class Cached:
            def num_uncached(self, request: Request) -> int:
                return num_uncached

        return rule.key(Request("a", [1], RequestParams(**params), arrival=arrival), Cached())

    assert key(queues.fcfs(), 3.0) == 3.0 and key(queues.fair(), 3.0) == 3.0
    assert key(queues.priority(aging=60.0), 3.0, priority=2) == 123.0
    assert key(queues.priority(aging=0), 3.0, priority=2) == (2, 3.0)
    assert key(queues.shortest_first(aging=0.5), 3.0, 8) == 7.0
    assert key(queues.earliest_deadline(slack=9.0), 3.0) == 12.0
    assert key(queues.earliest_deadline(slack=9.0), 3.0, deadline=5.0) == 5.0
    assert key(queues.custom(), 3.0) == 3.0
    drifting = {rule.__name__ for rule in queues.Rule.__subclasses__() if rule.keys_change}
    assert {"shortest_first", "custom"} <= drifting
    assert not drifting & {"fcfs", "priority", "earliest_deadline", "fair"}


def test_only_a_priority_rule_that_preempts_outranks_a_lower_priority() -> None:
    first, second = (Request("a", [1], RequestParams(priority=p)) for p in (1, 2))
    rule = queues.priority(preempts=True, max_preemptions=2)
    assert rule.outranks(first, second) and not rule.outranks(second, first)
    assert not rule.outranks(first, first) and not queues.priority().outranks(first, second)
    second.history.num_priority_preemptions = 1
    assert rule.outranks(first, second)
    second.history.num_priority_preemptions = 2
    assert not rule.outranks(first, second)
    others = (queues.fcfs, queues.fair, queues.earliest_deadline, queues.shortest_first)
    for other in (make() for make in others):
        assert not other.preempts and not other.outranks(first, second)
        assert other.group(first) == ("client " if isinstance(other, queues.fair) else "all")


@pytest.mark.parametrize("max_overtakes", (0, 1, 3))
def test_a_blocked_request_is_overtaken_as_often_as_its_rule_allows(max_overtakes: int) -> None:
    """One request per step fits beside the first; each that passes counts."""
    world = small_driver(
        queue=f"fcfs({max_overtakes})", num_blocks=20, max_num_seqs=9, max_num_batched_tokens=100
    )
    world.add("holder", 40, 30)
    world.step()
    large = world.add("large", 60, 1)  # 15 blocks, 9 are free
    for number in range(6):
        world.add(f"small{number}", 3, 1)
    world.step()
    assert large.history.num_overtaken == max_overtakes
    world.steps(3)
    assert large.history.num_overtaken == max_overtakes


def test_only_as_many_blocked_requests_are_examined_as_patience_allows() -> None:
    world = small_driver(queue="fcfs(2)", num_blocks=20, max_num_seqs=9, max_num_batched_tokens=100)
    world.add("holder", 40, 30)
    world.step()
    for number in range(5):
        world.add(f"large{number}", 60, 1)
    plan = world.step()
    assert [b.request.id for b in plan.blocked] == ["large0", "large1", "large2"]
    assert [(b.reason, b.need, b.have) for b in plan.blocked] == [("blocks", 15, 9)] * 3
    assert plan.not_considered is not None
    assert (plan.not_considered.reason, plan.not_considered.num_requests) == ("behind_blocked", 2)
