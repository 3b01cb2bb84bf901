"""Laws of aborts: every arrival and every end is reported once, in an order that can be replayed.

A step reports what happened before it. `aborted_after` tells how many of the arrivals that are
reported with an abort came before it, so the order of all calls can be restored.
"""

from __future__ import annotations

import random

import pytest

from headway.plan import Plan, StepReport
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler, preset
from tests.support.drive import Driver


def a_drive() -> Driver:
    return Driver("vllm_v1", num_blocks=40, block_size=4, max_num_seqs=3, max_num_batched_tokens=16)


def ids(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


def interleaved(report: StepReport) -> list[tuple[str, str]]:
    """Arrivals and aborts of a report, in the order of the calls."""
    events, calls = report.plan.events, []
    aborted = list(events.aborted)
    for place, request in enumerate([*events.added, None]):
        while aborted and aborted[0].history.aborted_after <= place:
            calls.append(("abort", aborted.pop(0).id))
        if request is not None:
            calls.append(("add", request.id))
    assert not aborted
    return calls


@pytest.mark.parametrize("seed", range(30))
def test_without_a_plan_in_flight_the_order_of_all_calls_can_be_restored(seed: int) -> None:
    rng, world = random.Random(seed), a_drive()
    number = 0
    for _ in range(6):
        calls = []
        for _ in range(rng.randint(1, 6)):
            if world.scheduler.requests and rng.random() < 0.4:
                id = rng.choice(list(world.scheduler.requests))
                assert world.scheduler.abort(id)
                calls.append(("abort", id))
            else:
                number += 1
                world.add(f"r{number}", rng.randint(1, 9), 3)
                calls.append(("add", f"r{number}"))
        plan = world.plan()
        report = world.scheduler.take_pending_events() if plan.is_empty else world.finish(plan)
        assert report is not None and interleaved(report) == calls


class Storm:
    """Random arrivals and aborts around plans in flight, and all that is reported of them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.world = random.Random(seed), a_drive()
        self.added: list[str] = []  # as reported
        self.ended: list[str] = []  # as reported
        self.known: set[str] = set()  # arrivals that a plan has reported or will report
        self.num_added: dict[str, int] = {}  # requests that were added before an abort, by id

    def see(self, report: StepReport | None) -> None:
        if report is None:
            return
        events, num_before = report.plan.events, len(self.added)
        self.added += ids(events.added)
        assert set(ids(report.finished)) <= set(self.added), "an end is reported before its arrival"
        self.ended += ids(report.finished)
        for requests, first in (
            (events.aborted, num_before),
            (events.aborted_in_flight, len(self.added)),
        ):
            for request in requests:
                if request.finish_reason == "abort":
                    place = first + request.history.aborted_after
                    assert place == self.num_added[request.id]

    def disturb(self) -> None:
        for _ in range(self.rng.randint(0, 3)):
            if self.world.scheduler.requests and self.rng.random() < 0.5:
                self.abort(self.rng.choice(list(self.world.scheduler.requests)))
            else:
                number = len(self.world.requests)
                self.world.add(f"r{number}", self.rng.randint(1, 9), self.rng.randint(1, 4))

    def abort(self, id: str) -> None:
        """A plan in flight reports the abort of a request that it knows; the next plan the rest."""
        scheduler = self.world.scheduler
        self.num_added[id] = len(self.world.requests)
        reports = scheduler.state.events.aborted
        if scheduler.in_flight and id in self.known:
            reports = scheduler.in_flight[-1].events.aborted_in_flight
        assert scheduler.abort(id) and reports[-1].id == id

    def plan(self) -> Plan:
        plan = self.world.plan()
        if not plan.is_empty:
            self.known = set(self.world.requests)
        return plan


@pytest.mark.parametrize("seed", range(60))
def test_every_arrival_and_every_end_is_reported_once_and_in_order(seed: int) -> None:
    storm, in_flight = Storm(seed), list[Plan]()
    scheduler = storm.world.scheduler
    for _ in range(12):
        storm.disturb()
        plan = storm.plan()
        in_flight += [] if plan.is_empty else [plan]
        storm.disturb()
        if in_flight and (len(in_flight) == 2 or plan.is_empty):
            storm.see(storm.world.finish(in_flight.pop(0)))
    while in_flight:
        storm.see(storm.world.finish(in_flight.pop(0)))
    for id in list(scheduler.requests):
        storm.abort(id)
    storm.see(scheduler.take_pending_events())
    assert storm.added == list(storm.world.requests)
    assert sorted(storm.ended) == sorted(storm.world.requests)
    assert not scheduler.has_pending_events and scheduler.take_pending_events() is None
    storm.world.check_empty()


@pytest.mark.parametrize("seed", range(40))
def test_after_a_failure_everything_that_was_not_reported_is_reported(seed: int) -> None:
    storm, in_flight = Storm(seed), list[Plan]()
    scheduler = storm.world.scheduler
    for _ in range(5):
        storm.disturb()
        plan = storm.plan()
        in_flight += [] if plan.is_empty else [plan]
        storm.disturb()
        if len(in_flight) == 2:
            storm.see(storm.world.finish(in_flight.pop(0)))
    if in_flight and len(in_flight) < 2:
        storm.plan()  # two in flight, if there is work for both
    storm.disturb()
    running = {id: r for id, r in scheduler.requests.items() if r.row >= 0}
    scheduler.fail("no device")
    assert not scheduler.in_flight and not scheduler.running
    assert all(r.error in (None, "no device") for r in running.values())
    storm.see(scheduler.take_pending_events())
    assert storm.added == list(storm.world.requests)
    ended = [r.id for r in storm.world.requests.values() if r.is_finished]
    assert sorted(storm.ended) == sorted(ended)
    storm.world.run()
    storm.world.check_empty()


def test_an_abort_ends_the_request_with_its_reason_and_only_once() -> None:
    world = a_drive()
    request = world.add("a", 5)
    world.step()
    assert world.scheduler.abort("a", "error", "no space left")
    assert (
        request.is_finished
        and request.finish_reason == "error"
        and request.error == "no space left"
    )
    assert not world.scheduler.abort("a") and not world.scheduler.abort("never added")
    assert world.scheduler.has_pending_events
    other = world.add("b", 5)
    world.scheduler.abort("b")
    assert other.finish_reason == "abort" and other.error is None


def test_pending_events_are_not_taken_while_a_plan_may_report_them() -> None:
    world = a_drive()
    world.add("a", 5)
    plan = world.plan()
    world.add("b", 5)
    world.scheduler.abort("b")
    assert world.scheduler.has_pending_events and world.scheduler.take_pending_events() is None
    world.finish(plan)
    report = world.scheduler.take_pending_events()
    assert report is not None and report.plan.step == -1 and report.plan.is_empty
    assert ids(report.plan.events.added) == ids(report.finished) == ["b"]


def test_arrivals_that_an_empty_plan_saw_are_counted_as_early() -> None:
    """An empty plan beside one in flight considers arrivals before the result that is in flight."""
    world = Driver(
        "vllm_v1", num_blocks=40, block_size=4, max_num_seqs=1, max_num_batched_tokens=16
    )
    world.add("a", 5, 1)
    first = world.plan()
    world.add("b", 3)
    world.add("c", 3)
    world.scheduler.abort("b")
    assert world.plan().is_empty
    world.add("d", 3)
    world.finish(first)
    second = world.plan()
    assert second.events.num_early == (2, 1)
    assert ids(second.events.added) == ["b", "c", "d"] and ids(second.events.aborted) == ["b"]
    assert (first.step, second.step) == (0, 1)
    world.add("e", 3)
    third = world.plan()
    assert [p.events.num_in_flight for p in (first, second, third)] == [0, 0, 1]


def test_an_addition_that_fails_leaves_no_trace() -> None:
    world = a_drive()
    world.add("a", 5)
    good = [Request(id, [1, 2], world.requests["a"].params) for id in "bc"]
    bad = Request("a", [1, 2], world.requests["a"].params)
    with pytest.raises(Exception, match="'a'"):
        world.scheduler.add(*good, bad)
    assert list(world.scheduler.requests) == ["a"] and len(world.scheduler.queue) == 1
    assert ids(world.scheduler.state.events.added) == ["a"]
    world.scheduler.add(*good)
    assert [request.history.serial for request in good] == [1, 2]
    world.add("d", 2)
    assert world.requests["d"].history.serial == 3
    world.run()
    world.check_empty()


def test_a_scheduler_is_idle_only_without_requests_plans_and_held_blocks() -> None:
    world = a_drive()
    assert world.scheduler.is_idle
    assert world.scheduler.last_plan.step == -1 and world.scheduler.last_plan.is_empty
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
        scheduler.in_flight.append(Plan(0))
    else:
        getattr(scheduler, part)["a" if part == "requests" else request] = request
    assert not scheduler.is_idle
