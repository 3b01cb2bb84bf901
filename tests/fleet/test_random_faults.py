"""No token is lost or doubled, and every request ends once, whatever happens to the replicas."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from headway.engine.messages import Cancel, Query
from headway.engine.queries import AskEach, GetLoad, GetRecording
from headway.fleet.dispatcher import Dispatcher
from headway.fleet.replica import TICK_SECONDS
from tests.support.scripted_fleet import SETTINGS, World, expected_tokens
from tests.support.tracked import holds

HANG_TICKS = round(SETTINGS.hang_seconds / TICK_SECONDS)
has_replica = precondition(lambda self: self.fleet.replicas)


class FleetMachine(RuleBasedStateMachine):
    """Requests and replicas come, go, fail and return in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.add("a")
        self.world.add("b")
        self.num_asked = 0

    @property
    def fleet(self) -> Dispatcher:
        return self.world.fleet

    def assigned_to(self, name: str) -> dict[str, tuple[int, int]]:
        """Moves and losses so far of the requests of a replica that are not about to end."""
        return {
            id: (request.num_moves, request.num_losses)
            for id, request in self.fleet.requests.items()
            if request.replica == name and not request.is_cancelled
            and not all(sample.is_stopping for _, sample in request.open_samples())
        }  # fmt: skip

    def check_moved(self, before: dict[str, tuple[int, int]], *, is_loss: bool) -> None:
        """Each request has moved, or waits; or it was alone, and failed with a text that names it."""
        self.world.settle()
        for id, (num_moves, num_losses) in before.items():
            request = self.fleet.requests.get(id)
            if request is not None:
                assert request.num_moves > num_moves
                assert num_losses <= request.num_losses <= num_losses + is_loss
            elif error := next(iter(self.world.ends[id].values())).error:
                assert is_loss and repr(id) in error and "alone" in error
                assert num_losses >= SETTINGS.max_replica_losses

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.fleet.replicas)))

    @rule(n=st.integers(1, 3), length=st.integers(1, 6))
    def submit(self, n: int, length: int) -> None:
        self.world.submit(n, length)

    @rule(data=st.data(), sample=st.sampled_from([None, 0, 1]))
    @precondition(lambda self: self.fleet.requests)
    def cancel(self, data: st.DataObject, sample: int | None) -> None:
        self.fleet.cancel(Cancel(data.draw(st.sampled_from(list(self.fleet.requests))), sample))
        self.fleet.flush()

    @rule(data=st.data(), num_tokens=st.integers(1, 3))
    @has_replica
    def step(self, data: st.DataObject, num_tokens: int) -> None:
        self.world.scripted(self.fleet.replicas[self.pick(data)]).step(num_tokens)

    @rule(data=st.data(), num_batches=st.integers(1, 3))
    @has_replica
    def deliver(self, data: st.DataObject, num_batches: int) -> None:
        self.world.deliver(self.pick(data), num_batches)

    @rule(num_rounds=st.integers(1, 2))
    def advance(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.world.step()

    @rule(name=st.sampled_from("abc"))
    def add(self, name: str) -> None:
        before = self.assigned_to(name)
        self.world.add(name)
        self.check_moved(before, is_loss=True)

    @rule(data=st.data(), kind=st.sampled_from(["kill", "hang", "fail", "drain", "remove", "fill"]))
    @has_replica
    def fault(self, data: st.DataObject, kind: str) -> None:
        name = self.pick(data)
        replica, before = self.fleet.replicas[name], self.assigned_to(name)
        if kind == "kill":
            self.fleet.lose(replica, "killed")
        elif kind == "hang":
            self.hang(name)
        elif kind == "fail":
            before = self.fail_step(name)
        elif kind == "fill":
            before, self.world.scripted(replica).is_full = {}, True
        elif kind == "drain":
            if not replica.takes_requests or len(self.fleet.placement.ready()) == 1:
                before = {}  # they stay
            self.fleet.drain(replica)
        else:
            self.fleet.remove(replica)
        self.check_moved(before, is_loss=kind not in ("drain", "remove"))
        self.fleet.flush()

    def hang(self, name: str) -> None:
        self.fleet.replicas[name].quiet_ticks = 0
        for _ in range(HANG_TICKS):
            for other in self.fleet.replicas.values():
                if other.name != name:
                    self.fleet.receive(other, [self.world.scripted(other).load()])
            assert name in self.fleet.replicas
            self.fleet.tick()
            self.fleet.flush()
        assert name not in self.fleet.replicas

    def fail_step(self, name: str) -> dict[str, tuple[int, int]]:
        """A step of the replica fails; returns what was assigned to it, as `assigned_to`."""
        self.world.deliver(name)
        link, before = self.world.scripted(self.fleet.replicas[name]), self.assigned_to(name)
        before = {
            id: found for id, found in before.items()
            if self.fleet.requests[id].replica_id in link.assigned
        }  # fmt: skip
        link.fail_step()
        self.world.deliver(name)
        return before

    @rule()
    @precondition(lambda self: self.world.late)
    def deliver_late(self) -> None:
        replica = self.world.late.pop()
        before = repr((self.world.tokens, self.world.ends, self.world.answers, self.fleet.requests))
        for batch in self.world.scripted(replica).outbox:
            self.fleet.receive(replica, batch)
        now = repr((self.world.tokens, self.world.ends, self.world.answers, self.fleet.requests))
        assert before == now

    @rule(query=st.sampled_from([GetLoad(), GetRecording(1), AskEach(GetLoad())]))
    def ask(self, query: Query[Any]) -> None:
        self.num_asked += 1
        self.fleet.queries.ask(replace(query, number=self.num_asked))
        self.fleet.flush()

    @rule()
    def wait(self) -> None:
        self.world.clock.advance_to(self.world.clock.now() + SETTINGS.no_replica_seconds)
        waiting = [request.id for request in self.fleet.table.waiting]
        for replica in self.fleet.replicas.values():
            replica.quiet_ticks = 0
        self.fleet.tick()
        self.fleet.flush()
        is_open = bool(self.fleet.placement.ready())
        assert is_open or not self.fleet.table.waiting
        assert is_open or all(self.world.ends[id] or id in self.world.refused for id in waiting)

    @invariant()
    def books_agree(self) -> None:
        """A request is in one place, and the tracker knows the keys that were delivered."""
        fleet = self.fleet
        placed = [r for replica in fleet.replicas.values() for r in replica.open.values()]
        assert len(placed) == len(set(placed)) and not fleet.table.waiting.keys() & set(placed)
        assert {*placed, *fleet.table.waiting} == {*fleet.requests.values()}
        for replica in fleet.replicas.values():
            link = self.world.scripted(replica)
            if not link.outbox:
                assert holds(fleet.router.tracker, replica.name, link.reported_keys)
        assert fleet.router.tracker.slots.keys() <= fleet.replicas.keys()

    def teardown(self) -> None:
        """Let everything end: then each sample has ended once, with the right tokens."""
        world = self.world
        for replica in list(self.fleet.replicas.values()):
            if replica.is_draining:
                self.fleet.remove(replica)
            world.scripted(replica).is_full = False
        if not self.fleet.replicas:
            world.add("d")
        for _ in range(200):
            world.step()
            world.wait(TICK_SECONDS)
        assert not self.fleet.requests and not self.fleet.table.waiting
        for id, samples in world.tokens.items():
            assert (id in world.refused) != (len(world.ends[id]) == len(samples))
            for sample, end in world.ends[id].items():
                tokens = samples[sample]
                assert tokens == expected_tokens(id, sample, len(tokens))
                assert end.reason in ("length", "abort", "stop", "error")
        numbers = sorted(answer.number for answer in world.answers)
        assert numbers == list(range(1, self.num_asked + 1))
        assert not any(world.scripted(r).assigned for r in self.fleet.replicas.values())


FleetMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestFleetMachine = FleetMachine.TestCase
