"""One engine client over many replicas. No request is lost with a replica.

The client keeps prompt, params and tokens so far of every open request. If a replica is lost, hangs
or is drained, its requests continue elsewhere from the tokens already made, and the caller sees a
pause. Knows no Ray and no sockets: a `ReplicaLink` carries the messages.

    fleet = FleetClient([ThreadLink("a", engine), ThreadLink("b", other)], block_size=16)
    engine = AsyncEngine(fleet, input_processor=llm.input_processor)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from headway.engine.async_engine import OnMessages
from headway.engine.clock import Clock, RealClock
from headway.engine.messages import Cancel, EngineStopped, FromLoop, Query, Submit, ToLoop
from headway.errors import ExecutorError
from headway.fleet.dispatcher import Dispatcher
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.router import Router
from headway.fleet.routing import RouteRule, prefix_load
from headway.fleet.settings import FleetSettings
from headway.fleet.transport.links import ReplicaLink

DRAIN_SECONDS = 2.0  # for a drained replica to report that it has no work
CLOSE_SECONDS = 2.0  # for a link to close
NO_ANSWER = -1  # number of queries whose answers are not used
log = logging.getLogger(__name__)


class FleetClient:
    """An EngineClient over links that come and go."""

    def __init__(
        self,
        links: Iterable[ReplicaLink] = (),
        *,
        block_size: int,
        route: RouteRule = prefix_load,
        settings: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`block_size` is that of all replicas. Deadlines of requests are on the fleet's `clock`."""
        clock = clock or RealClock()
        self.dispatcher = Dispatcher(
            Router(route, block_size), settings or FleetSettings(), clock, self._emit, self._on_gone
        )
        self.dispatcher.queries.local |= {"now": clock.now, "fleet": self.describe}
        self._links = list(links)
        self._outbox: list[FromLoop] = []
        self._on_messages: OnMessages = lambda _: None
        self._is_sending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._monitor: asyncio.Task[None] | None = None

    async def open(self, on_messages: OnMessages) -> None:
        """Open all links. A link that cannot be opened is skipped with a warning."""
        self._on_messages = on_messages
        for link in self._links:
            try:
                await self.add(link)
            except ExecutorError as error:
                log.warning("replica %s was skipped: %s", link.name, error)
        self._monitor = asyncio.create_task(self._tick())

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
                else:
                    dispatcher.queries.ask(message)
            dispatcher.flush()
        finally:
            self._is_sending = False

    async def close(self) -> None:
        """Close all links; open requests fail."""
        if self._monitor is not None:
            self._monitor.cancel()
        replicas = list(self.dispatcher.replicas.values())
        for replica in replicas:
            replica.is_gone = True
        await asyncio.gather(*(_close(replica.link) for replica in replicas), *self._tasks)
        self._emit(EngineStopped("close() was called"))
        self._deliver()

    async def add(self, link: ReplicaLink) -> None:
        """Open a link and route requests to it; replaces one of the same name.

        ExecutorError if the replica cannot be reached.
        """
        replica = Replica(link)
        await link.open(partial(self._receive, replica), partial(self._lost, replica))
        if replica.is_gone:
            raise ExecutorError(f"replica {link.name} was lost while it was added")
        replica.post(Query(NO_ANSWER, "report_cache"))
        self.dispatcher.add(replica)
        self._send_and_deliver()

    async def drain(self, name: str) -> None:
        """Move the requests of a replica elsewhere at once; then close its link.

        Returns when the replica reports no work, or after DRAIN_SECONDS. Nothing happens if there
        is no replica of this name.
        """
        replica = self.dispatcher.replicas.get(name)
        if replica is None:
            return
        self.dispatcher.drain(replica)
        self._send_and_deliver()
        before = replica.num_reports
        for _ in range(int(DRAIN_SECONDS / 0.01)):
            is_idle = not (replica.load.num_running or replica.load.num_waiting)
            if replica.is_gone or (is_idle and replica.num_reports > before):
                break
            await asyncio.sleep(0.01)
        await self.remove(name, replica)

    async def remove(self, name: str, replica: Replica | None = None) -> None:
        """Close a link without waiting; its requests move as if it were drained."""
        found = self.dispatcher.replicas.get(name)
        if found is not None and replica in (None, found):
            self.dispatcher.remove(found)
            self._send_and_deliver()

    def describe(self) -> dict[str, Any]:
        """Counters, and state and load of every replica; also the answer to the query "fleet"."""
        dispatcher = self.dispatcher
        return {
            **asdict(dispatcher.counters), "num_open": len(dispatcher.requests),
            "num_without_replica": len(dispatcher.table.waiting),
            "replicas": [each.describe() for each in dispatcher.replicas.values()],
        }  # fmt: skip

    # On the event loop.

    def _receive(self, replica: Replica, messages: list[FromLoop]) -> None:
        self.dispatcher.receive(replica, messages)
        if not self._is_sending:  # an answer to a query may come while it is sent
            self._send_and_deliver()

    def _lost(self, replica: Replica, reason: str) -> None:
        if self.dispatcher.replicas.get(replica.name) is replica:
            self.dispatcher.lose(replica, reason)
            self._send_and_deliver()
        replica.is_gone = True  # also if it was lost before it was added

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = next_tick(due, loop.time())
            await asyncio.sleep(due - loop.time())
            try:
                self.dispatcher.tick()
                self._send_and_deliver()
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

    def _on_gone(self, replica: Replica) -> None:
        self._start(_close(replica.link))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def next_tick(due: float, now: float) -> float:
    """When the tick after the one that was due must come.

    Ticks that are late do not delay later ones, so that a hang is noticed in time. Ticks that were
    missed, because this process was stopped, are left out.
    """
    return max(due + TICK_SECONDS, now)


async def _close(link: ReplicaLink) -> None:
    """Close a link; one that does not close in time, or not at all, is left alone."""
    with suppress(Exception):
        await asyncio.wait_for(link.close(), CLOSE_SECONDS)
