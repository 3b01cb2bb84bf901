"""Connections to replicas: the interface that a fleet needs, and engines in this process.

A link carries messages in both directions and knows neither requests nor routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headway.engine.async_engine import EngineClient, ThreadClient
from headway.engine.engine import Engine
from headway.engine.messages import EngineStopped, FromLoop, ToLoop
from headway.engine.queue_limits import QueueLimits

OnBatch = Callable[[list[FromLoop]], None]
OnLost = Callable[[str], None]


class ReplicaLink(Protocol):
    """The connection to one replica. All calls and callbacks are on one event loop.

    The replica's loop must have `report_load` set, so that it sends heartbeats.
    """

    name: str  # unique among the links of a fleet

    async def open(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        """Connect. `on_batch` gets every batch of messages, in order.

        `on_lost` is called at most once, with the reason, when the replica is gone; no batch
        follows it. Raises ExecutorError if the replica cannot be reached.
        """
        ...

    def send(self, messages: list[ToLoop]) -> None:
        """Send messages in order; never blocks and never raises, even if the replica is gone."""
        ...

    async def close(self) -> None:
        """Disconnect. The replica drops what this link has submitted; `on_lost` is not called."""
        ...


class ClientLink:
    """A link over any EngineClient, such as an engine behind a Unix socket."""

    def __init__(self, name: str, client: EngineClient) -> None:
        self.name = name
        self.client = client
        self._is_closed = False

    async def open(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        def receive(messages: list[FromLoop]) -> None:
            if self._is_closed:
                return
            stopped = next((each for each in messages if isinstance(each, EngineStopped)), None)
            rest: list[FromLoop] = [
                each for each in messages if not isinstance(each, EngineStopped)
            ]
            if rest:
                on_batch(rest)
            if stopped is not None:
                self._is_closed = True
                on_lost(stopped.reason)

        await self.client.open(receive)

    def send(self, messages: list[ToLoop]) -> None:
        if not self._is_closed:
            self.client.send(messages)

    async def close(self) -> None:
        self._is_closed = True
        await self.client.close()


class ThreadLink(ClientLink):
    """A replica that is an engine on a thread of this process."""

    def __init__(self, name: str, engine: Engine, limits: QueueLimits | None = None) -> None:
        client = ThreadClient(engine, limits)
        super().__init__(name, client)
        self.loop = client.loop  # add observers and queries before `open`
        self.loop.report_load = True
