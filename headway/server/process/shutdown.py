"""A uvicorn server that ends well: what runs may finish, what takes too long is given an end.

Minds no signals itself; whoever runs it calls `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn

from headway.engine.async_engine import AsyncEngine
from headway.server.http.connection import Connection
from headway.server.http.connections import ConnectionTable, log_accept_errors

LAST_WORDS = 2.0  # seconds for responses to end once their requests have
PAUSE = 0.05
log = logging.getLogger(__name__)


class GracefulServer(uvicorn.Server):
    """Serves an app over an engine until `stop`; `grace` seconds for what is open then."""

    def __init__(
        self,
        app: Any,
        engine: AsyncEngine,
        grace: float,
        ready: Callable[[], None],
        table: ConnectionTable,
    ) -> None:
        protocol = cast(type[asyncio.Protocol], partial(Connection, table=table))
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
            lifespan="auto", ws="none", http=protocol,
        )  # fmt: skip
        super().__init__(config)
        self._engine, self._grace, self._ready = engine, grace, ready
        self._table = table
        self._sweeping: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Take no more connections, and end once what is open has ended."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(log_accept_errors)
        self._sweeping = asyncio.create_task(self._table.sweep())
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()
        if self._sweeping is not None:
            self._sweeping.cancel()

    async def _drain(self) -> None:
        """Let the engine's requests finish, then end them, then whatever else still responds."""
        await self._until_quiet(self._grace)
        if self._engine.num_open:
            log.warning("ending %d requests that took too long", self._engine.num_open)
        self._engine.cancel_all()
        await asyncio.sleep(LAST_WORDS)
        for task in list(self.server_state.tasks):  # pages without an end, such as a live view
            task.cancel()
        await asyncio.sleep(PAUSE)
        for connection in list(self.server_state.connections):  # clients that do not read
            if connection.transport is not None:
                connection.transport.abort()

    async def _until_quiet(self, seconds: float) -> None:
        """Until no request has been open for a while: one may be on its way to the engine."""
        loop = asyncio.get_running_loop()
        ends_at, quiet_at = loop.time() + seconds, loop.time() + LAST_WORDS
        while loop.time() < min(ends_at, quiet_at):
            if self._engine.num_open:
                quiet_at = loop.time() + LAST_WORDS
            await asyncio.sleep(PAUSE)
