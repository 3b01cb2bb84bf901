"""Random worlds of a fleet: processes that are killed, stopped and restarted while requests run.

A process that is killed answers nothing from then on; the fleet notices it later, by its connection
or by its silence. A stopped process may continue later, and then connects again if it was given up.
Some requests are poisonous: they kill every replica that they reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from headway.engine.messages import EngineStopped
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.settings import FleetSettings
from tests.support.scripted_fleet import ScriptedReplica, World, expected_tokens

STEPS = 4  # of a replica, in one tick
MAX_RESTART_TICKS = 40  # less than requests wait for a replica


@dataclass(eq=False)
class Process:
    """A replica's process, and how the fleet sees it."""

    replica: Replica
    link: ScriptedReplica
    is_dead: bool = False
    stopped_ticks: int = 0
    notice_ticks: int | None = None  # until the fleet sees that its connection is closed


@dataclass
class Poison:
    """How a request kills: after some steps of each replica, or at one token."""

    num_steps: int = 0
    at_token: int | None = None
    num_killed: int = 0
    steps: dict[Process, int] = field(default_factory=dict)


class FaultWorld(World):
    """Processes and requests; all times are ticks of the fleet."""

    def __init__(self, random: Random, num_replicas: int, settings: FleetSettings) -> None:
        super().__init__(settings)
        self.random, self.processes = random, list[Process]()
        self.poisons: dict[str, Poison] = {}
        self.lengths: dict[str, int] = {}  # of requests; a sample has its number more
        self.restarts: list[int] = []  # ticks until a new replica starts
        self.loses_messages = True  # what a process had sent may be lost with it
        self.num_names = self.num_kills = self.num_stops = 0
        for _ in range(num_replicas):
            self.start()

    @property
    def alive(self) -> list[Process]:
        return [each for each in self.processes if not each.is_dead]

    def start(self) -> None:
        self.num_names += 1
        self.connect(f"p{self.num_names}")

    def connect(self, name: str) -> None:
        link = self.add(name)
        link.num_prefill_steps = lambda: self.random.choice((0, 0, 1, 3, 6))
        self.processes.append(Process(self.fleet.replicas[name], link))

    def kill(self, process: Process) -> None:
        """End a process; another one starts some time later."""
        self.num_kills += 1
        process.is_dead = process.link.is_frozen = True
        process.notice_ticks = self.random.choice((0, 0, 0, 1, 2))
        if self.loses_messages and self.random.random() < 0.5:
            process.link.outbox.clear()
            process.notice_ticks = self.random.choice((0, 1, None))  # None: by its silence
        self.restarts.append(self.random.randrange(1, MAX_RESTART_TICKS))

    def stop(self, process: Process) -> None:
        self.num_stops += 1
        process.link.is_frozen, process.stopped_ticks = True, self.random.randrange(1, 20)

    def is_last_evidence(self, process: Process) -> bool:
        """Whether a suspect is alone there, before its second token: a kill would be blamed on it."""
        isolation = self.fleet.placement.isolation
        return isolation.replica is process.replica and bool(process.replica.open)

    def tick(self) -> None:
        """All processes make some steps, then time passes."""
        for _ in range(STEPS):
            for process in self.random.sample(self.alive, len(self.alive)):
                if not process.stopped_ticks and not self._is_poisoned(process):
                    process.link.step()
                    self.receive(process)
        for process in self.processes[:]:
            self._pass(process)
        self.fleet.num_starting = len(self.restarts)
        self.restarts = [each - 1 for each in self.restarts]
        for _ in range(self.restarts.count(0)):
            self.start()
        self.restarts = [each for each in self.restarts if each]
        self.clock.advance_to(self.clock.now() + TICK_SECONDS)
        self.fleet.tick()
        self.fleet.flush()

    def receive(self, process: Process) -> None:
        """What a process has sent arrives."""
        while process.link.outbox:
            self.fleet.receive(process.replica, process.link.outbox.pop(0))
            self.fleet.flush()

    def _pass(self, process: Process) -> None:
        if process.is_dead:
            self._notice(process)
        elif process.stopped_ticks:
            process.stopped_ticks -= 1
            if not process.stopped_ticks:
                self._continue(process)
        else:
            self.receive(process)

    def _notice(self, process: Process) -> None:
        if process.notice_ticks == 0:
            self.receive(process)
            self.fleet.receive(process.replica, [EngineStopped("its process has ended")])
            self.fleet.flush()
        if process.replica.is_gone:
            self.processes.remove(process)
        elif process.notice_ticks is not None:
            process.notice_ticks -= 1

    def _continue(self, process: Process) -> None:
        """A stopped process goes on: all that it sends late must be ignored if it was given up."""
        process.link.is_frozen = False
        process.link.answer()
        process.link.step()
        gone = process.replica.is_gone
        self.receive(process)
        if gone:
            self.processes.remove(process)
            self.connect(process.replica.name)

    def _is_poisoned(self, process: Process) -> bool:
        """Whether a poisonous request kills the process in this step."""
        process.link.read()
        for wire_id, samples in process.link.assigned.items():
            poison = self.poisons.get(wire_id.partition("~")[0])
            if poison is None:
                continue
            poison.steps[process] = poison.steps.get(process, 0) + 1
            is_there = poison.steps[process] > poison.num_steps
            if poison.at_token is not None:
                is_there = len(samples[0]) >= poison.at_token
            if is_there:
                poison.num_killed += 1
                self.kill(process)
                return True
        return False

    def finish(self, max_ticks: int) -> None:
        """Nothing fails any more, except by poison: all requests end."""
        for process in self.alive:
            process.stopped_ticks = min(1, process.stopped_ticks)
        for _ in range(max_ticks):
            if not self.fleet.requests:
                return
            self.tick()
        raise AssertionError(f"open after {max_ticks} ticks: {self.fleet.requests}")

    def check(self) -> None:
        """Every request but the poisonous ones ended once, with all of its tokens."""
        for id, samples in self.tokens.items():
            assert id not in self.refused
            assert len(self.ends[id]) == len(samples)
            for sample, tokens in enumerate(samples):
                end = self.ends[id][sample]
                if id not in self.poisons:
                    assert end.reason == "length", (id, end)
                    length = self.lengths[id] + sample
                    assert tokens == expected_tokens(id, sample, length)
                else:
                    assert end.reason == "error" and end.error_code == "replicas_failed"
                    assert tokens == expected_tokens(id, sample, len(tokens))

    def request(self, length: int, n: int = 1) -> str:
        id = self.submit(n, length)
        self.lengths[id] = length
        return id
