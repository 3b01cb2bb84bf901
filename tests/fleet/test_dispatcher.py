"""What a fleet does with requests when replicas fail, refuse or leave."""

from __future__ import annotations

from math import ceil
from typing import Any, NoReturn

import pytest

from headway.engine.messages import Cancel, FromLoop, LoadReport, Refusal, SampleUpdate, Submit
from headway.errors import ConfigError
from headway.fleet.client import next_tick
from headway.fleet.replica import PROBE_TICKS, TICK_SECONDS, Replica
from headway.fleet.settings import FleetSettings
from headway.request import RequestParams
from tests.support.scripted_fleet import SETTINGS, World, end_of, expected_tokens
from tests.support.tracked import num_keys


@pytest.fixture
def world() -> World:
    world = World()
    world.add("a")
    return world


def lost(world: World, name: str) -> None:
    world.lose(name)


def finish(world: World, num_steps: int = 12) -> None:
    for _ in range(num_steps):
        world.step()
    assert not world.fleet.requests


def test_drains_move_a_request_however_many_they_are(world: World) -> None:
    id = world.submit(length=9)
    for name, after in zip("abcde", "bcdef", strict=True):
        world.step()
        world.add(after)
        world.fleet.drain(world.fleet.replicas[name])
        world.fleet.flush()
        assert world.where(id) == after
    finish(world)
    assert world.tokens[id][0] == expected_tokens(id, 0, 9) and world.ends[id][0].error is None
    counters = world.fleet.counters
    assert (counters.num_drains, counters.num_moves, counters.num_failed) == (5, 5, 0)
    assert counters.num_resumed_tokens == 1 + 2 + 3 + 4 + 5 and counters.num_losses == 0


def test_a_request_without_another_replica_ends_where_it_is(world: World) -> None:
    id = world.submit()
    world.fleet.drain(world.fleet.replicas["a"])
    world.fleet.flush()
    late = world.submit()
    assert world.where(id) == "a" and world.where(late) is None
    for _ in range(4):
        world.step()
    assert world.ends[id][0].reason == "length" and world.where(late) is None


def test_a_replica_that_joins_takes_the_requests_of_one_that_leaves(world: World) -> None:
    id = world.submit()
    world.step()
    world.fleet.drain(world.fleet.replicas["a"])
    world.add("b")
    assert world.where(id) == "b"
    finish(world)


class NotListed(dict[str, Replica]):
    def values(self) -> NoReturn:
        raise AssertionError("all replicas were read")


def test_a_frame_and_a_request_read_one_replica_however_many_there_are(world: World) -> None:
    fleet = world.fleet
    world.add("b")
    world.settle()
    fleet.replicas = fleet.placement.replicas = fleet.queries.replicas = NotListed(fleet.replicas)
    id = world.submit()
    for _ in range(4):
        for each in ("a", "b"):
            world.step(each)
    assert world.tokens[id][0] == expected_tokens(id, 0, 4) and id not in fleet.requests


def test_a_suspect_ends_with_the_replica_on_which_it_is_alone(world: World) -> None:
    """The other request loses as many replicas, and is isolated, too; then it gains a token."""
    poison, innocent = world.submit(), world.submit()
    world.step()
    for name, after in zip("ab", "bc", strict=True):
        world.add(after)
        lost(world, name)
    assert not world.ends[poison] and not world.ends[innocent]
    assert world.where(poison) is None, "it waits until no other loss belongs to the latest"
    world.add("d")
    world.wait(SETTINGS.verdict_seconds)
    replica = world.fleet.placement.isolation.replica
    assert replica is not None and not replica.open, "the engine must say that it is empty"
    alone = replica.name
    world.step(alone)
    world.settle()
    assert (world.where(poison), world.where(innocent)) == (alone, None)
    new = world.submit()
    assert world.where(new) not in (None, alone)
    lost(world, alone)
    (end,) = world.ends[poison].values()
    assert end.reason == "error" and end.error_code == "replicas_failed"
    assert end.error and "3 replicas" in end.error and "killed" in end.error
    world.wait(SETTINGS.verdict_seconds)
    finish(world, 20)
    assert world.ends[innocent][0].reason == world.ends[new][0].reason == "length"
    assert world.fleet.counters.num_failed == 1 and world.fleet.counters.num_isolated == 2


def test_the_second_token_ends_the_isolation(world: World) -> None:
    id, other = world.submit(length=20), world.submit(length=20)
    world.settle()
    for name, after in zip("ab", "bc", strict=True):
        world.add(after)
        lost(world, name)
    world.wait(SETTINGS.verdict_seconds)
    world.step()
    assert (world.where(id), world.where(other)) == ("c", None)
    world.step()  # the first token, the second, and the engine says what it has left
    world.step()
    world.step()
    assert (world.where(id), world.where(other)) == (None, "c")
    world.step()
    world.step()
    assert (world.where(id), world.where(other)) == ("c", "c")
    lost(world, "c")
    world.add("d")
    finish(world, 24)
    assert world.ends[id][0].reason == world.ends[other][0].reason == "length"


def test_a_suspect_waits_a_limited_time_for_requests_of_another_gateway(world: World) -> None:
    id = world.submit(length=20)
    world.settle()
    for name, after in zip("ab", "bc", strict=True):
        world.add(after)
        lost(world, name)
    link = world.scripted(world.fleet.replicas["c"])
    link.assign_for_another_gateway("other")
    world.wait(SETTINGS.verdict_seconds)
    world.step()
    assert world.where(id) is None
    world.wait(SETTINGS.hang_seconds)
    assert world.where(id) == "c"


def test_a_loss_before_the_replica_had_the_request_does_not_count(world: World) -> None:
    id = world.submit()
    for name, after in zip("abcd", "bcde", strict=True):
        world.fleet.lose(world.fleet.replicas[name], "killed")
        world.fleet.flush()
        world.add(after)  # it answers nothing
        assert world.where(id) == after
    request = world.fleet.requests[id]
    assert (request.num_losses, request.num_in_row) == (4, 0)


def test_requests_move_only_to_replicas_that_have_answered_since_the_loss(world: World) -> None:
    """B and C are dead, too, which is not known yet; all three losses count as one."""
    ids = [world.submit() for _ in range(4)]
    world.settle()
    links = {name: world.add(name) for name in "bcd"}
    world.settle()
    links["b"].is_frozen = links["c"].is_frozen = True
    lost(world, "a")
    assert {world.where(id) for id in ids} == {None}
    lost(world, "b")
    lost(world, "c")
    assert {world.where(id) for id in ids} == {"d"}
    assert {world.fleet.requests[id].num_in_row for id in ids} == {0}
    finish(world)


def test_a_replica_that_is_late_with_its_answer_delays_moves_for_a_limited_time(
    world: World,
) -> None:
    id = world.submit()
    world.add("b").is_frozen = True
    world.add("c")
    lost(world, "a")
    assert world.where(id) is None
    world.wait(SETTINGS.verdict_seconds)
    assert world.where(id) == "c" and "b" in world.fleet.replicas


def test_requests_wait_as_long_as_a_replica_is_being_started(world: World) -> None:
    id = world.submit()
    world.step()
    lost(world, "a")
    world.fleet.num_starting = 1
    world.wait(3 * SETTINGS.no_replica_seconds)
    assert not world.ends[id]
    world.fleet.num_starting = 0
    world.wait(SETTINGS.no_replica_seconds)
    (end,) = world.ends[id].values()
    assert end.error_code == "no_replica" and end.error and "a was lost: killed" in end.error


def test_a_replica_with_a_failed_step_gets_one_request_at_a_time(world: World) -> None:
    world.add("b")
    failed = world.submit()
    name = str(world.where(failed))
    link = world.scripted(world.fleet.replicas[name])
    waiting = [id for id in (world.submit() for _ in range(4)) if world.where(id) == name]
    world.step()
    link.problem = "the latest step failed"
    link.assigned.clear()
    world.fleet.receive(
        world.fleet.replicas[name],
        [SampleUpdate(failed, 0, [], end=end_of("error", "a rank has ended"))],
    )
    world.settle()
    assert waiting and name not in {world.where(id) for id in (failed, *waiting)}
    assert world.fleet.requests[waiting[0]].num_losses == 0
    assert name not in {world.where(world.submit()) for _ in range(4)}
    world.wait(PROBE_TICKS * TICK_SECONDS)
    probes = [id for id in (world.submit() for _ in range(6)) if world.where(id) == name]
    assert len(probes) == 1
    link.problem = None
    world.wait(TICK_SECONDS)
    assert name in {world.where(world.submit()) for _ in range(4)}


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
    world.settle()
    world.step("a")
    assert not link.assigned and world.where(id) == "b" and not world.ends[id]
    lost(world, str(world.where(id)))
    world.add("c")
    world.wait(SETTINGS.verdict_seconds)
    finish(world)
    assert {end.reason for end in world.ends[id].values()} == {"length"} and not other.is_closed


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
    assert world.tokens[id] == [[]] and not num_keys(tracker)


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
    world.settle()
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


def test_a_heartbeat_that_is_late_does_not_replace_a_newer_load(world: World) -> None:
    """Heartbeats come from a thread, which may have read the load before a step ended."""
    replica = world.fleet.replicas["a"]
    before, after = LoadReport(1, 1, 0, 0, 9, 10), LoadReport(2, 0, 0, 0, 10, 10)
    world.fleet.receive(replica, [after, before])
    assert replica.load == after


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


@pytest.mark.parametrize("field", ["hang_seconds", "max_waiting", "max_replica_losses"])
def test_wrong_settings_are_named(field: str) -> None:
    wrong: Any = {field: -1}
    with pytest.raises(ConfigError, match=rf"{field} .*-1"):
        FleetSettings(**wrong)
