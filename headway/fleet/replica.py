"""A replica as its fleet sees it: its client, the latest load, and the requests assigned to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from headway.engine.async_engine import EngineClient
from headway.engine.messages import LoadReport, QueryResult, ToLoop
from headway.engine.queries import Document
from headway.fleet.open_requests import OpenRequest
from headway.fleet.router import ReplicaLoad
from headway.fleet.settings import FleetSettings

UseResult = Callable[[QueryResult], None]
TICK_SECONDS = 0.25
PROBE_TICKS = 4  # from a failed step to the next request
NO_LOAD = LoadReport(0, 0, 0, 0, 0, 0)
REPORTS_TO_COUNT = 2  # a report may have been sent before the replica read the latest request


@dataclass(slots=True, eq=False)
class Replica:
    """One replica, from the time its client is opened until it is lost or drained.

    Its engine loop must have `report_load`, so that it sends heartbeats.
    """

    name: str  # unique in a fleet
    client: EngineClient
    load: LoadReport = NO_LOAD
    is_draining: bool = False
    is_gone: bool = False  # lost, or its client was closed; later messages are ignored
    open: dict[str, OpenRequest] = field(default_factory=dict)  # by their ids at the replica
    asked: dict[int, UseResult] = field(default_factory=dict)  # queries, by number
    answered: int = 0  # the largest number of a query that it has answered
    problem: str | None = None  # of its engine, such as a failed step
    probe_ticks: int = 0  # until it gets one request although it has a problem
    is_unconfirmed: bool = False  # a request was queued without a query after it
    num_reports: int = 0
    quiet_ticks: int = 0  # in a row without any message
    idle_ticks: int = 0  # in a row without a step, with requests assigned
    outgoing: list[ToLoop] = field(default_factory=list)  # until the next `flush`
    unsent: dict[Replica, None] = field(default_factory=dict)  # replicas of the fleet with outgoing
    # Prompt tokens of requests that the load may not include, and the number of reports before.
    _unreported: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def takes_requests(self) -> bool:
        return not (self.is_gone or self.is_draining)

    @property
    def is_trusted(self) -> bool:
        """Whether new requests should go there; with a problem, one at a time from time to time."""
        return self.problem is None or not (self.open or self.probe_ticks)

    def fail_step(self, reason: str) -> None:
        self.problem, self.probe_ticks = reason, PROBE_TICKS

    def post(self, message: ToLoop) -> None:
        """Queue a message for the next `flush`."""
        self.outgoing.append(message)
        self.unsent[self] = None

    def flush(self) -> None:
        """Send all queued messages at once."""
        self.unsent.pop(self, None)
        messages, self.outgoing = self.outgoing, []
        if messages and not self.is_gone:
            self.client.send(messages)

    def assign(self, request: OpenRequest, num_new: int) -> None:
        """Assign a request, with `num_new` tokens to compute first."""
        self.open[request.replica_id] = request
        self._unreported[request.replica_id] = num_new, self.num_reports
        request.replica, self.is_unconfirmed = self.name, True

    def report(self, load: LoadReport) -> None:
        """Use a newer load; a heartbeat may repeat an old one."""
        if load.step > self.load.step:
            self.idle_ticks = 0
        if load.step >= self.load.step:
            self.load = load
        self.num_reports += 1
        self._unreported = {
            id: (num_new, before) for id, (num_new, before) in self._unreported.items()
            if self.num_reports - before < REPORTS_TO_COUNT and id in self.open
        }  # fmt: skip

    def tick(self, settings: FleetSettings) -> str | None:
        """Why the replica counts as lost; None if it does not. Call it every TICK_SECONDS.

        Counts ticks and not seconds: if this process itself was stopped, no replica is to blame.
        """
        self.quiet_ticks += 1
        self.probe_ticks = max(0, self.probe_ticks - 1)
        self.idle_ticks = self.idle_ticks + 1 if self.open else 0
        if self.quiet_ticks * TICK_SECONDS >= settings.hang_seconds:
            return f"it sent nothing for {settings.hang_seconds:g} s"
        if self.idle_ticks * TICK_SECONDS >= settings.stall_seconds:
            return f"it made no step for {settings.stall_seconds:g} s"
        return None

    def router_load(self) -> ReplicaLoad:
        """The load with the requests that were sent since the latest report."""
        load, new = self.load, self._unreported.values()
        return ReplicaLoad(
            self.name, load.waiting_tokens + sum([num_new for num_new, _ in new]),
            load.num_running, load.num_waiting + len(new), load.num_free_blocks, load.num_blocks,
        )  # fmt: skip

    def describe(self) -> Document:
        load = {key: value for key, value in structs.asdict(self.load).items() if key != "step"}
        return {
            "name": self.name, "is_draining": self.is_draining, "problem": self.problem,
            "num_open": len(self.open), **load,
        }  # fmt: skip
