"""What a fleet does with requests when replicas fail, refuse or leave."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from headway.engine.messages import Cancel, FromLoop, Refusal, SampleUpdate, Submit
from headway.errors import ConfigError
from headway.fleet.client import next_tick
from headway.fleet.replica import TICK_SECONDS
from headway.fleet.settings import FleetSettings
from headway.request import RequestParams
from tests.support.scripted_fleet import SETTINGS, World, end_of, expected_tokens


@pytest.fixture
def world() -> World:
    world = World()
    world.add("a")
    return world


def lost(world: World, name: str) -> None:
    world.fleet.lose(world.fleet.replicas[name], "killed")
    world.fleet.flush()


def finish(world: World, num_steps: int = 12) -> None:
    for _ in range(num_steps):
        world.step()
    assert not world.fleet.requests


def test_three_drains_move_a_request_and_the_fourth_ends_it(world: World) -> None:
    id = world.submit(length=9)
    for name, after in zip("abcd", "bcde", strict=True):
        world.step()
        world.add(after)
        world.fleet.drain(world.fleet.replicas[name])
        world.fleet.flush()
        if name != "d":
            assert world.where(id) == after
    assert world.tokens[id][0] == expected_tokens(id, 0, 4)
    (end,) = world.ends[id].values()
    assert end.reason == "error" and end.error and "3 times (limit 3)" in end.error
    counters = world.fleet.counters
    assert (counters.num_drains, counters.num_moves, counters.num_failed) == (4, 3, 1)
    assert counters.num_resumed_tokens == 1 + 2 + 3 and counters.num_losses == 0


def test_a_request_that_loses_two_replicas_fails_alone(world: World) -> None:
    """The second request joins later: it loses one."""
    poison = world.submit()
    world.add("b")
    lost(world, "a")
    innocent = world.submit()
    world.add("c")
    lost(world, "b")
    (end,) = world.ends[poison].values()
    assert end.reason == "error" and end.error
    assert "2 times (limit 2" in end.error and "killed" in end.error
    finish(world)
    assert world.ends[innocent][0].reason == "length"


def test_the_first_death_ends_a_request_if_the_settings_say_so(world: World) -> None:
    world.fleet.settings = FleetSettings(max_replica_losses=1)
    begun = world.submit()
    world.step()
    new = world.submit()
    lost(world, "a")
    assert world.ends[begun][0].reason == "error" and world.tokens[begun] != [[]]
    assert world.refused[new].kind == "ExecutorError" and "limit 1" in world.refused[new].message


def test_what_was_requested_before_a_death_happens(world: World) -> None:
    cancelled, stopped = world.submit(n=2), world.submit(n=2)
    world.step()
    world.fleet.cancel(Cancel(cancelled))
    world.fleet.cancel(Cancel(stopped, 1))
    lost(world, "a")
    assert {end.reason for end in world.ends[cancelled].values()} == {"abort"}
    assert world.ends[stopped][1].reason == "stop" and 0 not in world.ends[stopped]
    world.add("b")
    finish(world)
    assert world.ends[stopped][0].reason == "length" and world.fleet.counters.num_moves == 1


def test_a_drained_replica_drops_its_requests_and_gets_no_new_ones(world: World) -> None:
    world.submit()
    world.step()
    link = world.scripted(world.fleet.replicas["a"])
    assert link.assigned
    world.add("b")
    world.fleet.drain(world.fleet.replicas["a"])
    world.fleet.flush()
    assert world.where(world.submit()) == "b"
    world.step("a")
    assert not link.assigned and not link.is_closed
    finish(world)


def test_a_failed_step_moves_all_samples_and_stops_those_that_still_run(world: World) -> None:
    id = world.submit(n=2, length=5)
    world.step()
    other = world.add("b")
    link = world.scripted(world.fleet.replicas["a"])
    update = SampleUpdate(id, 0, [], end=end_of("error", "out of memory"))
    world.fleet.receive(world.fleet.replicas["a"], [update])
    world.fleet.flush()
    world.step("a")
    assert not link.assigned and world.where(id) is not None and not world.ends[id]
    world.fleet.lose(world.fleet.replicas[str(world.where(id))], "killed")
    assert all(end.reason == "error" for end in world.ends[id].values())
    assert not other.is_closed


def test_a_moved_request_keeps_its_arrival_and_the_rest_of_its_deadline(world: World) -> None:
    world.tokens["d"], world.ends["d"] = [[]], {}
    params = RequestParams(max_tokens=4, deadline=20.0)
    world.clock.advance_to(5.0)
    world.fleet.submit(Submit("d", [5], params))
    world.fleet.flush()
    world.step()
    world.clock.advance_to(12.0)
    link = world.add("b")
    lost(world, "a")
    link.step()
    moved = link.submits["d~1"]
    assert (moved.age, moved.deadline_in) == (7.0, 8.0)
    assert moved.outputs == (tuple(expected_tokens("d", 0, 1)),)


def test_the_time_from_a_move_to_the_next_token_is_counted(world: World) -> None:
    """Time before the loss, and without a replica, is not part of it."""
    single, several = world.submit(), world.submit(n=2)
    world.step()
    world.clock.advance_to(2.0)
    lost(world, "a")
    world.clock.advance_to(5.0)
    world.add("b")
    world.clock.advance_to(5.5)
    world.step()
    assert world.fleet.counters.resume_seconds == 2 * 0.5
    assert {len(tokens) for id in (single, several) for tokens in world.tokens[id]} == {2}
    finish(world)
    assert world.fleet.counters.resume_seconds == 2 * 0.5


def test_an_error_of_the_request_itself_does_not_move_it(world: World) -> None:
    id = world.submit()
    end = end_of("error", "the grammar cannot be followed")._replace(error_code="grammar")
    world.fleet.receive(world.fleet.replicas["a"], [SampleUpdate(id, 0, [], end=end)])
    assert world.ends[id][0].error_code == "grammar" and not world.fleet.requests


@pytest.mark.parametrize("kind", ["InvalidRequest", "RequestTooLong", "PolicyError"])
def test_a_refusal_is_passed_on_and_does_not_count_against_the_replica(
    world: World, kind: str
) -> None:
    ids = [world.submit() for _ in range(20)]
    refusals: list[FromLoop] = [Refusal(id, kind, f"request {id!r} is wrong", {}) for id in ids]
    world.fleet.receive(world.fleet.replicas["a"], refusals)
    assert world.refused.keys() == set(ids) and world.fleet.counters.num_losses == 0
    assert world.where(world.submit()) == "a"


def test_messages_of_a_lost_replica_are_ignored(world: World) -> None:
    id, replica = world.submit(), world.fleet.replicas["a"]
    world.scripted(replica).step()
    lost(world, "a")
    for batch in world.scripted(replica).outbox:
        world.fleet.receive(replica, batch)
    tracker = world.fleet.router.tracker
    assert world.tokens[id] == [[]] and not sum(map(tracker.num_keys, tracker.slots))


def test_messages_of_an_earlier_stay_are_ignored(world: World) -> None:
    """After a failed step, the request returns to the same replica, its only one."""
    id, replica = world.submit(n=2), world.fleet.replicas["a"]
    stray = SampleUpdate(id, 1, expected_tokens(id, 1, 1))
    failed = SampleUpdate(id, 0, [], end=end_of("error", "out of memory"))
    world.fleet.receive(replica, [failed, stray])
    assert world.tokens[id] == [[], []]
    world.fleet.flush()
    finish(world)
    assert [end.reason for end in world.ends[id].values()] == ["length"] * 2


def test_an_engine_that_has_given_up_is_lost(world: World) -> None:
    id = world.submit()
    world.add("b")
    refusal = Refusal(id, "ExecutorError", "the engine has stopped", {})
    world.fleet.receive(world.fleet.replicas["a"], [refusal])
    assert "a" not in world.fleet.replicas and world.where(id) == "b" and not world.refused


def test_a_full_replica_passes_a_new_request_to_another(world: World) -> None:
    full, id = world.scripted(world.fleet.replicas["a"]), world.submit()
    full.is_full = True
    other = world.add("b")
    world.step()
    assert world.where(id) == "b" and world.fleet.counters.num_moves == 0
    other.is_full = True
    refused = world.submit()
    for _ in range(2):
        world.step()
    assert world.refused[refused].kind == "Overloaded"
    assert world.refused[refused].message == f"no room for {refused}"


def test_a_replica_without_steps_is_lost_although_it_is_heard(world: World) -> None:
    id, replica = world.submit(), world.fleet.replicas["a"]
    num_ticks = round(SETTINGS.stall_seconds / TICK_SECONDS)
    for _ in range(num_ticks):
        assert world.where(id) == "a"
        world.fleet.receive(replica, [world.scripted(replica).load()])
        world.fleet.tick()
    assert replica.is_gone and world.where(id) is None


def test_a_stopped_replica_is_noticed_within_two_seconds_although_ticks_are_late() -> None:
    """The replica stops right after a tick; every tick is nearly as late as the next one."""
    num_ticks = ceil(SETTINGS.hang_seconds / TICK_SECONDS)
    lateness, due, now = 0.95 * TICK_SECONDS, 0.0, 0.0
    for _ in range(num_ticks):
        due = next_tick(due, now)
        now = due + lateness
    assert SETTINGS.hang_seconds <= now <= 2.0


def test_a_gateway_that_was_stopped_makes_up_for_no_tick() -> None:
    due = next_tick(10.0, 13.0)
    assert due == 13.0 and next_tick(due, 13.01) == 13.0 + TICK_SECONDS


@pytest.mark.parametrize("field", ["hang_seconds", "max_moves", "max_replica_losses"])
def test_wrong_settings_are_named(field: str) -> None:
    wrong: Any = {field: -1}
    with pytest.raises(ConfigError, match=rf"{field} .*-1"):
        FleetSettings(**wrong)
