"""Laws of aborts: every arrival and every end is recorded once, in the order of the calls."""

from __future__ import annotations

import random

import pytest

from headway import Plan, Scheduler, preset
from headway.events import Aborted, Added, Failed, Planned
from headway.request import Request, RequestParams
from tests.support.drive import Driver, small_driver
from tests.support.events import Events


def a_drive() -> Driver:
    return Driver("vllm_v1", num_blocks=40, block_size=4, max_num_seqs=3, max_num_batched_tokens=16)


def ids(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def calls_of(events: Events) -> list[tuple[str, str]]:
    """Arrivals and aborts, as they were recorded."""
    calls = list[tuple[str, str]]()
    for event in events:
        match event:
            case Added(requests):
                calls += [("add", request.id) for request in requests]
            case Aborted(request):
                calls.append(("abort", request.id))
    return calls


class Storm:
    """Random arrivals and aborts around plans in flight."""

    def __init__(self, seed: int) -> None:
        self.rng, self.world = random.Random(seed), a_drive()
        self.calls: list[tuple[str, str]] = []

    def disturb(self) -> None:
        for _ in range(self.rng.randint(0, 3)):
            if self.world.scheduler.requests and self.rng.random() < 0.5:
                self.abort(self.rng.choice(list(self.world.scheduler.requests)))
            else:
                number = len(self.world.requests)
                self.world.add(f"r{number}", self.rng.randint(1, 9), self.rng.randint(1, 4))
                self.calls.append(("add", f"r{number}"))

    def abort(self, id: str) -> None:
        assert self.world.scheduler.abort(id)
        self.calls.append(("abort", id))

    def check_calls(self) -> None:
        """All calls are recorded in their order, and every end once."""
        assert calls_of(self.world.events) == self.calls
        ended = [r.id for r in self.world.requests.values() if r.is_finished]
        assert sorted(ids(self.world.events.ended)) == sorted(ended)


@pytest.mark.parametrize("is_async", (False, True))
@pytest.mark.parametrize("seed", range(60))
def test_every_arrival_and_every_end_is_recorded_once_and_in_order(
    seed: int, is_async: bool
) -> None:
    storm, in_flight = Storm(seed), list[Plan]()
    scheduler = storm.world.scheduler
    for _ in range(12):
        storm.disturb()
        plan = storm.world.plan()
        in_flight += [] if plan.is_empty else [plan]
        storm.disturb()
        if in_flight and (len(in_flight) == 1 + is_async or plan.is_empty):
            storm.world.finish(in_flight.pop(0))
        storm.check_calls()
    while in_flight:
        storm.world.finish(in_flight.pop(0))
    for id in list(scheduler.requests):
        storm.abort(id)
    storm.check_calls()
    assert sorted(ids(storm.world.events.ended)) == sorted(storm.world.requests)
    storm.world.check_empty()


@pytest.mark.parametrize("seed", range(40))
def test_a_failure_is_recorded_with_the_requests_it_ends(seed: int) -> None:
    storm, in_flight = Storm(seed), list[Plan]()
    scheduler = storm.world.scheduler
    for _ in range(5):
        storm.disturb()
        plan = storm.world.plan()
        in_flight += [] if plan.is_empty else [plan]
        storm.disturb()
        if len(in_flight) == 2:
            storm.world.finish(in_flight.pop(0))
    if in_flight and len(in_flight) < 2:
        storm.world.plan()  # two in flight, if there is work for both
    storm.disturb()
    running = {id: r for id, r in scheduler.requests.items() if r.row >= 0}
    scheduler.fail("no device")
    assert not scheduler.in_flight and not scheduler.running
    assert all(r.error in (None, "no device") for r in running.values())
    failed = storm.world.events[-1]
    assert isinstance(failed, Failed) and failed.reason == "no device"
    assert all(r.finish_reason == "error" and r.error == "no device" for r in failed.ended)
    storm.check_calls()
    storm.world.run()
    storm.check_calls()
    storm.world.check_empty()


def test_an_abort_ends_the_request_with_its_reason_and_only_once() -> None:
    world = a_drive()
    request = world.add("a", 5)
    world.step()
    assert world.scheduler.abort("a", "error", "no space left")
    assert request.is_finished
    assert (request.finish_reason, request.error) == ("error", "no space left")
    assert not world.scheduler.abort("a") and not world.scheduler.abort("never added")
    assert world.events.ended == [request]
    other = world.add("b", 5)
    world.scheduler.abort("b")
    assert other.finish_reason == "abort" and other.error is None
    assert world.events.ended == [request, other]


def test_a_plan_without_work_is_recorded_at_its_place() -> None:
    """An empty plan beside one in flight considers arrivals before the result that is in flight."""
    world = small_driver(num_blocks=40, max_num_seqs=1, max_num_batched_tokens=16)
    world.add("a", 5, 1)
    first = world.plan()
    world.add("b", 3)
    world.scheduler.abort("b")
    assert world.plan().is_empty
    world.add("c", 3)
    world.finish(first)
    second = world.plan()
    assert [type(event).__name__ for event in world.events] == [
        "Added", "Planned", "Added", "Aborted", "Planned", "Added", "Completed", "Planned",
    ]  # fmt: skip
    assert (first.step, second.step) == (0, 1) and world.events.plans == [first, second]


def test_an_addition_that_fails_leaves_no_trace() -> None:
    world = a_drive()
    world.add("a", 5)
    good = [Request(id, [1, 2], world.requests["a"].params) for id in "bc"]
    bad = Request("a", [1, 2], world.requests["a"].params)
    with pytest.raises(Exception, match="'a'"):
        world.scheduler.add(*good, bad)
    assert list(world.scheduler.requests) == ["a"] and len(world.scheduler.queue) == 1
    assert ids(world.events.added) == ["a"]
    world.scheduler.add(*good)
    assert [request.history.serial for request in good] == [1, 2]
    world.add("d", 2)
    assert world.requests["d"].history.serial == 3
    world.run()
    world.check_empty()


def test_a_scheduler_is_idle_only_without_requests_plans_and_held_blocks() -> None:
    world = a_drive()
    assert world.scheduler.is_idle
    assert (
        world.scheduler.last_planned.plan.step == -1 and world.scheduler.last_planned.plan.is_empty
    )
    world.add("a", 5, 2)
    assert not world.scheduler.is_idle
    plan = world.plan()
    world.scheduler.abort("a")
    assert not world.scheduler.is_idle  # a plan is in flight
    world.finish(plan)
    assert world.scheduler.is_idle


@pytest.mark.parametrize("part", ["requests", "running", "swapped", "in_flight", "queue", "blocks"])
def test_a_scheduler_is_idle_only_if_every_part_of_it_is_empty(part: str) -> None:
    """Also after an interruption in the middle of a change, when the parts do not agree."""
    scheduler = Scheduler(preset("vllm", num_blocks=8, num_host_blocks=8))
    assert scheduler.is_idle
    request = Request("a", [1, 2, 3], RequestParams(max_tokens=2))
    if part == "queue":
        scheduler.queue.push(request)
    elif part == "blocks":
        scheduler.kv.pool.take(1)
    elif part == "in_flight":
        scheduler.in_flight.append(Planned(Plan(0)))
    else:
        getattr(scheduler, part)["a" if part == "requests" else request] = request
    assert not scheduler.is_idle
