"""A uvicorn server with graceful shutdown: open requests may finish within a time limit.

Installs no signal handlers; the caller calls `stop`.
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
from headway.server.http.connection import HttpConnection
from headway.server.http.connection_table import ConnectionTable, log_accept_errors

DRAIN_TIMEOUT = 2.0  # seconds for responses to end after their requests have ended
ERROR_TIMEOUT = 0.5  # seconds for the error events of the others
PAUSE = 0.05
log = logging.getLogger(__name__)


async def end_requests(engine: AsyncEngine) -> None:
    """Cancel and then fail all requests; each gets an error event, also if a step takes longer."""
    if engine.num_open:
        log.warning("cancelling %d requests that did not finish", engine.num_open)
    engine.cancel_all()
    await asyncio.sleep(DRAIN_TIMEOUT)
    engine.fail_all()


class GracefulServer(uvicorn.Server):
    """Serves an app until `stop`; open requests then have `grace` seconds to finish."""

    def __init__(
        self,
        app: Any,
        engine: AsyncEngine,
        grace: float,
        ready: Callable[[], None],
        table: ConnectionTable,
    ) -> None:
        protocol = cast(type[asyncio.Protocol], partial(HttpConnection, table=table))
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
            lifespan="auto", ws="none", http=protocol,
        )  # fmt: skip
        super().__init__(config)
        self._engine, self._grace, self._ready = engine, grace, ready
        self._table = table
        self._sweeping: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Stop accepting connections, and exit when the open requests have ended."""
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
        """Wait for the engine's requests, end the rest, then cancel responses."""
        await self._until_quiet(self._grace)
        await end_requests(self._engine)
        await asyncio.sleep(ERROR_TIMEOUT)
        for task in list(self.server_state.tasks):  # responses without an end
            task.cancel()
        await asyncio.sleep(PAUSE)
        for connection in list(self.server_state.connections):  # clients that do not read
            if connection.transport is not None:
                connection.transport.abort()

    async def _until_quiet(self, seconds: float) -> None:
        """Wait until no request has been open for DRAIN_TIMEOUT, or for at most `seconds`.

        A request that has just been read may not have reached the engine yet.
        """
        loop = asyncio.get_running_loop()
        ends_at, quiet_at = loop.time() + seconds, loop.time() + DRAIN_TIMEOUT
        while loop.time() < min(ends_at, quiet_at):
            if self._engine.num_open:
                quiet_at = loop.time() + DRAIN_TIMEOUT
            await asyncio.sleep(PAUSE)
