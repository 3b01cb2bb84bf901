"""One engine client over many replicas. No request is lost with a replica.

The client keeps prompt, params and tokens so far of every open request. If a replica is lost, hangs
or is drained, its requests continue elsewhere from the tokens already made, and the caller sees a
pause. Knows no Ray and no sockets: each replica is behind an EngineClient of its own.

    engines = {"a": ThreadClient(one, report_load=True), "b": ThreadClient(two, report_load=True)}
    fleet = FleetClient(engines, block_size=16)
    engine = AsyncEngine(fleet, input_processor=llm.input_processor)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from headway.engine.async_engine import EngineClient, OnMessages
from headway.engine.clock import Clock, RealClock
from headway.engine.messages import Cancel, EngineStopped, FromLoop, Query, Resume, Submit, ToLoop
from headway.engine.queries import DescribeFleet, Document, GetTime
from headway.errors import ExecutorError
from headway.fleet.dispatcher import Dispatcher
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.router import Router
from headway.fleet.routing import RouteRule, prefix_load
from headway.fleet.settings import FleetSettings
from headway.fleet.shared_counters import Numbers, SharedCounters

DRAIN_SECONDS = 2.0  # for a drained replica to report that it has no work
CLOSE_SECONDS = 2.0  # for a client to close
Task = asyncio.Task[None]
log = logging.getLogger(__name__)


class FleetClient:
    """An EngineClient over replicas that come and go."""

    def __init__(
        self,
        replicas: Mapping[str, EngineClient] | None = None,
        *,
        block_size: int,
        route: RouteRule = prefix_load,
        settings: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`block_size` is that of all replicas. Deadlines of requests are on the fleet's `clock`."""
        clock = clock or RealClock()
        self.dispatcher = Dispatcher(
            Router(route, block_size), settings or FleetSettings(), clock, self._emit,
            on_gone=lambda replica: self._start(_close(replica.client), self._ending),
            on_drain=lambda replica: self._start(self.drain(replica.name), self._ending),
        )  # fmt: skip
        self.dispatcher.queries.local = {GetTime: clock.now, DescribeFleet: self.describe}
        self.dispatcher.queries.numbers = self._metrics
        self.shared: SharedCounters | None = None  # with other gateways
        self._initial = dict(replicas or {})
        self._outbox: list[FromLoop] = []
        self._on_messages: OnMessages = lambda _: None
        self._is_sending = False
        self._ending: set[Task] = set()  # `close` waits for these tasks
        self._watching: set[Task] = set()  # `close` cancels these
        self.problem: str | None = None

    async def open(self, on_messages: OnMessages) -> None:
        """Connect to all replicas. One that cannot be reached is skipped with a warning."""
        self._on_messages = on_messages
        for name, client in self._initial.items():
            try:
                await self.add(name, client)
            except ExecutorError as error:
                log.warning("replica %s was skipped: %s", name, error)
        self._start(self._tick(), self._watching)

    def send(self, messages: list[ToLoop]) -> None:
        """Route requests, and pass cancellations and queries on.

        What the caller gets at once, such as refusals, comes in a later call of `on_messages`.
        """
        dispatcher, self._is_sending = self.dispatcher, True
        try:
            for message in messages:
                if isinstance(message, Submit):
                    dispatcher.submit(message)
                elif isinstance(message, Cancel):
                    dispatcher.cancel(message)
                elif isinstance(message, Resume):
                    dispatcher.resume(message)
                elif isinstance(message, Query):
                    dispatcher.queries.ask(message)
            dispatcher.flush()
        finally:
            self._is_sending = False

    async def close(self) -> None:
        """Disconnect from all replicas; open requests fail."""
        for task in self._watching:
            task.cancel()
        replicas = list(self.dispatcher.replicas.values())
        for replica in replicas:
            replica.is_gone = True
        await asyncio.gather(*(_close(replica.client) for replica in replicas), *self._ending)
        self._emit(EngineStopped("close() was called"))
        self._deliver()

    async def add(self, name: str, client: EngineClient) -> None:
        """Open a client and route requests to it; replaces a replica of the same name.

        ExecutorError if the replica cannot be reached.
        """
        replica = Replica(name, client)
        await client.open(partial(self._receive, replica))
        if replica.is_gone:
            raise ExecutorError(f"replica {name} was lost while it was added")
        self.dispatcher.add(replica)
        self._send_and_deliver()

    async def drain(self, name: str) -> None:
        """Move the requests of a replica elsewhere at once; then close its client.

        Without another replica they end where they are, for at most `drain_seconds`. Returns when
        the replica reports no work, or after DRAIN_SECONDS. Nothing happens if there is no replica
        of this name.
        """
        replica = self.dispatcher.replicas.get(name)
        if replica is None:
            return
        self.dispatcher.drain(replica)
        self._send_and_deliver()
        before, loop = replica.num_reports, asyncio.get_running_loop()
        began, limit = loop.time(), self.dispatcher.settings.drain_seconds
        while loop.time() - began < (limit if replica.open else DRAIN_SECONDS):
            is_idle = not (replica.open or replica.load.num_running or replica.load.num_waiting)
            if replica.is_gone or (is_idle and replica.num_reports > before):
                break
            await asyncio.sleep(0.01)
        if not replica.is_gone:
            await self.remove(name)

    async def remove(self, name: str) -> None:
        """Disconnect from a replica without waiting; its requests move as if it were drained."""
        if (replica := self.dispatcher.replicas.get(name)) is not None:
            self.dispatcher.remove(replica)
            self._send_and_deliver()

    def announce(self, num_starting: int, problem: str | None) -> None:
        """Note what the directory says: replicas that start, for which requests wait; a problem."""
        if problem != self.problem:
            log.warning("%s", problem or "the list of replicas is up to date again")
        self.problem, self.dispatcher.num_starting = problem, num_starting

    def describe(self) -> Document:
        """Counters, and state and load of every replica; also the answer to DescribeFleet."""
        dispatcher = self.dispatcher
        return {
            **self._numbers(),
            "num_starting": dispatcher.num_starting,
            "replicas": [each.describe() for each in dispatcher.replicas.values()],
        }  # fmt: skip

    def _numbers(self) -> Numbers:
        """Counters and numbers of requests, of all gateways if they share them."""
        dispatcher = self.dispatcher
        own = {
            **asdict(dispatcher.counters), "num_open": len(dispatcher.requests),
            "num_without_replica": len(dispatcher.table.waiting),
        }  # fmt: skip
        return own if self.shared is None else self.shared.sums(own)

    def _metrics(self) -> Numbers:
        own, dispatcher = self._numbers(), self.dispatcher
        return own | {
            "replicas": len(dispatcher.replicas), "starting": dispatcher.num_starting,
            "directory_ok": self.problem is None, "deaths": own["num_losses"],
        }  # fmt: skip

    # On the event loop.

    def _receive(self, replica: Replica, messages: list[FromLoop]) -> None:
        self.dispatcher.receive(replica, messages)
        if not self._is_sending:  # an answer to a query may come while it is sent
            self._send_and_deliver()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = next_tick(due, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                self.dispatcher.tick()
                self._send_and_deliver()
                self._numbers()  # for other gateways
            except Exception:  # the monitor must outlive a bug
                log.exception("the fleet could not be checked")

    def _send_and_deliver(self) -> None:
        self.dispatcher.flush()
        self._deliver()

    def _emit(self, message: FromLoop) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._outbox.append(message)

    def _deliver(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._on_messages(messages)

    @staticmethod
    def _start(work: Coroutine[Any, Any, None], tasks: set[Task]) -> None:
        """Run `work` as one of these tasks; if it fails, the error is logged."""

        def end(task: Task) -> None:
            tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a replica could not be connected or closed", exc_info=error)

        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(end)


def next_tick(due: float, now: float) -> float:
    """When the tick after the one that was due must come.

    Ticks that are late do not delay later ones, so that a hang is noticed in time. Ticks that were
    missed, because this process was stopped, are left out.
    """
    return max(due + TICK_SECONDS, now)


async def _close(client: EngineClient) -> None:
    """Close a client; one that does not close in time, or not at all, is left alone."""
    with suppress(Exception):
        await asyncio.wait_for(client.close(), CLOSE_SECONDS)
