"""A fleet of the replicas that a directory announces: at the start, after restarts and scaling.

`headway.on_ray.directory` is such a directory.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Protocol

from headway.engine.async_engine import OnMessages
from headway.errors import ExecutorError
from headway.fleet.client import FleetClient
from headway.fleet.routing import RouteRule, prefix_load
from headway.fleet.settings import FleetSettings
from headway.remote.auth import Identity
from headway.remote.client import SocketClient

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


class DiscoveredFleet(FleetClient):
    """A FleetClient whose replicas follow a directory."""

    def __init__(
        self,
        directory: Directory,
        model: Identity,
        key: bytes,
        *,
        route: RouteRule = prefix_load,
        settings: FleetSettings | None = None,
    ) -> None:
        """All replicas have the identity `model`, except for the name, and the same key."""
        super().__init__(block_size=model.block_size, route=route, settings=settings)
        self._directory, self._model, self._key = directory, model, key
        self._failures: dict[str, int] = {}
        self._connecting: set[str] = set()

    async def open(self, on_messages: OnMessages) -> None:
        """Open the fleet, and connect to every replica that is announced now."""
        await super().open(on_messages)
        await self._look()
        while self._connecting:
            await asyncio.sleep(0.005)
        self._start(self._follow(), self._watching)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._look()
            except Exception:  # the directory may be away for a while; replicas do not need it
                log.exception("the list of replicas could not be read")

    async def _look(self) -> None:
        """Connect to every announced replica that is not connected."""
        found = await asyncio.to_thread(self._directory.addresses)
        for name in found.keys() - self.dispatcher.replicas.keys() - self._connecting:
            self._connecting.add(name)
            self._start(self._connect(name, found[name]), self._watching)

    async def _connect(self, name: str, address: tuple[str, int]) -> None:
        try:
            await self.add(name, SocketClient(address, replace(self._model, name=name), self._key))
        except ExecutorError as error:
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            if failures == 1:
                log.warning("%s", error)
            if failures >= MAX_FAILURES:
                del self._failures[name]
                await asyncio.to_thread(self._directory.forget, name)
        else:
            self._failures.pop(name, None)
            log.info("replica %s joined at %s:%d", name, *address)
        finally:
            self._connecting.discard(name)
