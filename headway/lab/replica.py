"""One replica of a simulated cluster: an engine with its own clock, and what a router knows of it.

A router learns the outcome of a step when the step ends. An arrival during a step is routed with
the state before it, and with the requests that were sent to the replica since.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.config import Config
from headway.engine.engine import Observer
from headway.errors import ConfigError
from headway.events import Completed, Event, ended_by
from headway.fleet.prefixes.tracker import PrefixTracker
from headway.fleet.router import ReplicaLoad
from headway.lab.cost import Profile
from headway.lab.simulate import SimulatedEngine
from headway.lab.workload.request import WorkloadRequest
from headway.request import Request


class SimulatedReplica(SimulatedEngine):
    """An engine, its open requests as the router knows them, and its link to other replicas."""

    def __init__(
        self,
        name: str,
        tracker: PrefixTracker,
        config: Config,
        profile: Profile,
        async_scheduling: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        super().__init__(config, profile, async_scheduling, observers)
        self.name, self.tracker, self.link_free_at = name, tracker, 0.0
        self.ended: list[tuple[Request, float]] = []  # in the latest step
        self._uncomputed: dict[str, int] = {}  # prompt tokens, of requests without a first token
        self._num_open, self._num_free = 0, config.num_blocks
        self._events: list[Event] = []  # that the router has not seen
        self._journal = self.engine.scheduler.kv.pool.index.start_journal()
        self.engine.observers.append(self._observe)

    def _observe(self, event: Event) -> None:
        self._events.append(event)
        now = event.result.ended if isinstance(event, Completed) else event.time
        self.ended += [(request, now) for request in ended_by(event)]

    def add(self, request: WorkloadRequest, now: float, num_new: int) -> None:
        """Queue a request that arrives now; RequestError if it can never run."""
        self.clock.advance_to(now)  # an idle replica; a busy one is never behind
        self.engine.add(request.id, request.prompt(), request.params(), now)
        self._uncomputed[request.id] = num_new
        self._num_open += request.n

    def step(self) -> list[tuple[Request, float]]:
        """One step; the requests that ended with it, and when."""
        self._tell()
        self.ended = []
        self.engine.step()
        if self.engine.fault:  # only a user's policy can fail here
            raise ConfigError(f"the simulation failed: {self.engine.fault}")
        return self.ended

    def load(self, now: float) -> ReplicaLoad:
        """What the router knows at this time."""
        if self.clock.now() <= now:
            self._tell()
        num_waiting = len(self._uncomputed)
        return ReplicaLoad(
            self.name, sum(self._uncomputed.values()), self._num_open - num_waiting, num_waiting,
            self._num_free, self.config.num_blocks,
        )  # fmt: skip

    def _tell(self) -> None:
        """Let the router see the outcome of all steps so far."""
        uncomputed = self._uncomputed
        for event in self._events:
            for chunk in event.plan.chunks if isinstance(event, Completed) else ():
                id, left = chunk.request.id, uncomputed.get(chunk.request.id, 0)
                if left and chunk.is_last:
                    del uncomputed[id]
                elif left:
                    uncomputed[id] = max(1, left - (chunk.end - chunk.start))
            for request in ended_by(event):
                uncomputed.pop(request.id, None)
                self._num_open -= 1
        self._events.clear()
        self._num_free = self.engine.scheduler.kv.num_free
        if self._journal.has_changes:
            self.tracker.apply(self.name, *self._journal.drain())
