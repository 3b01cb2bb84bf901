"""Finds replicas and links them to a fleet: at the start, after restarts and after scaling.

Where addresses come from is a function; `headway.fleet.on_ray.serve` reads them from Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from headway.engine.async_engine import OnMessages
from headway.engine.messages import ToLoop
from headway.errors import ExecutorError
from headway.fleet.client import FleetClient
from headway.fleet.transport.sockets import Identity, SocketLink

INTERVAL = 0.5  # seconds between two looks
MAX_FAILURES = 8  # failed connections in a row until an address is dropped
log = logging.getLogger(__name__)


class Directory(Protocol):
    """The announced replicas. Calls may block and come from any thread."""

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Host and port of every announced replica, by name."""
        ...

    def forget(self, name: str) -> None:
        """Drop an entry whose replica is gone. A live replica announces itself again."""
        ...


class DiscoveredFleet:
    """An EngineClient: a FleetClient whose links follow a directory."""

    def __init__(
        self, client: FleetClient, directory: Directory, model: Identity, key: bytes
    ) -> None:
        self.client, self.links = client, dict[str, SocketLink]()
        self._directory, self._model, self._key = directory, model, key
        self._failures: dict[str, int] = {}
        self._num_old_frames = 0  # of links that are closed
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: set[str] = set()

    async def open(self, on_messages: OnMessages) -> None:
        """Open the fleet, and link every replica that is announced now."""
        await self.client.open(on_messages)
        await self._look()
        while self._connecting:
            await asyncio.sleep(0.005)
        self._start(self._follow())

    def send(self, messages: list[ToLoop]) -> None:
        self.client.send(messages)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.client.close()

    def counters(self) -> dict[str, float]:
        """What has happened since the fleet started, by the names of `merge.FLEET_TEXTS`."""
        found = asdict(self.client.dispatcher.counters)
        named = {name.removeprefix("num_"): value for name, value in found.items()}
        num_frames = self._num_old_frames + sum(link.num_frames for link in self.links.values())
        num_replicas = len(self.client.dispatcher.replicas)
        return {**named, "replicas": num_replicas, "frames": num_frames}

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._look()
            except Exception:  # the directory may be away for a while; links do not need it
                log.exception("the list of replicas could not be read")

    async def _look(self) -> None:
        """Connect to every announced replica that has no link."""
        found = await asyncio.to_thread(self._directory.addresses)
        for name in self.links.keys() - found.keys():
            if not self.links[name].is_open:
                self._num_old_frames += self.links.pop(name).num_frames
        for name, address in found.items():
            link = self.links.get(name)
            if name not in self._connecting and (link is None or not link.is_open):
                self._connecting.add(name)
                self._start(self._connect(name, address))

    async def _connect(self, name: str, address: tuple[str, int]) -> None:
        identity = Identity(name=name, model=self._model.model, block_size=self._model.block_size)
        link = SocketLink(identity, address, self._key, self._drain)
        try:
            await self.client.add(link)
        except ExecutorError as error:
            await self._failed(name, error)
        else:
            self._failures.pop(name, None)
            if (before := self.links.get(name)) is not None:
                self._num_old_frames += before.num_frames
            self.links[name] = link
            log.info("replica %s joined at %s:%d", name, *address)
        finally:
            self._connecting.discard(name)

    async def _failed(self, name: str, error: ExecutorError) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        if failures == 1:
            log.warning("%s", error)
        if failures >= MAX_FAILURES:
            del self._failures[name]
            await asyncio.to_thread(self._directory.forget, name)

    def _drain(self, name: str) -> None:
        """A replica is about to stop."""
        self._start(self.client.drain(name))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                log.error("a replica could not be linked", exc_info=error)
