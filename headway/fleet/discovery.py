"""A fleet of the replicas that a directory announces: at the start, after restarts and scaling.

`FileDirectory` reads them from a file that another process keeps; `headway.on_ray.directory` asks Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from msgspec import Struct, json
from msgspec.structs import replace as replace_fields

from headway.engine.async_engine import OnMessages
from headway.errors import ExecutorError
from headway.fleet.client import FleetClient
from headway.fleet.routing import RouteRule, prefix_load
from headway.fleet.settings import FleetSettings
from headway.remote.auth import Identity
from headway.remote.client import SocketClient

INTERVAL = 0.5  # seconds between two looks
SILENT_SECONDS = 10.0  # a file is written every half second
log = logging.getLogger(__name__)


class Announced(Struct, frozen=True, kw_only=True):
    """What a directory knows at one moment."""

    replicas: dict[str, tuple[str, int]]  # host and port by name
    num_starting: int = 0  # replicas that are not announced yet
    problem: str | None = None  # why the list may be old; the replicas may work nevertheless


class Directory(Protocol):
    """The announced replicas; one that ends leaves it after a while. Calls may block."""

    def read(self) -> Announced:
        """All that is known now. Any exception means that the directory cannot be read."""
        ...


class FileDirectory:
    """Reads a file of `write_announced`. A process that ends does not take the list with it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Announced:
        """The list; a problem if it was not written for SILENT_SECONDS."""
        found = json.decode(self._path.read_bytes(), type=Announced)
        if found.problem is None and time.time() - self._path.stat().st_mtime > SILENT_SECONDS:
            problem = "the process that keeps the list of replicas does not answer"
            return replace_fields(found, problem=problem)
        return found


def write_announced(path: Path, announced: Announced) -> None:
    """Replace the list of a FileDirectory."""
    replace_file(path, json.encode(announced))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader gets the old content or the new one."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


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
        self._connecting: set[str] = set()
        self._failed: set[str] = set()  # replicas that could not be connected the last time

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
            except Exception as error:  # it may be away for a while; replicas do not need it
                self.announce(0, f"the list of replicas cannot be read: {error}")

    async def _look(self) -> None:
        """Connect to every announced replica that is not connected."""
        announced = await asyncio.to_thread(self._directory.read)
        self.announce(announced.num_starting, announced.problem)
        found = announced.replicas
        self._failed &= found.keys()
        for name in found.keys() - self.dispatcher.replicas.keys() - self._connecting:
            self._connecting.add(name)
            self._start(self._connect(name, found[name]), self._watching)

    async def _connect(self, name: str, address: tuple[str, int]) -> None:
        try:
            await self.add(name, SocketClient(address, replace(self._model, name=name), self._key))
        except ExecutorError as error:
            if name not in self._failed:
                log.warning("%s", error)
            self._failed.add(name)
        else:
            self._failed.discard(name)
            log.info("replica %s joined at %s:%d", name, *address)
        finally:
            self._connecting.discard(name)
