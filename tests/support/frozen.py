"""A server in this process whose time stands still until a test advances it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from headway.engine.async_engine import AsyncEngine
from headway.engine.thread_client import ThreadClient
from headway.server.http.connection import HttpConnection
from headway.server.process.serve import ServedEngine, ServerFactory, bind, serve_http
from headway.server.process.shutdown import GracefulServer
from headway.server.settings import Settings
from tests.support.waiting import LIMIT, wait_until

ROUNDS = 20  # of an event loop; more than any chain of callbacks that time sets off


class FrozenLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that moves only by assignment."""

    now = 0.0

    def time(self) -> float:
        return self.now


class FrozenServer:
    """A server on a thread; connections and times are read and changed by the test's thread."""

    def __init__(
        self, served: ServedEngine, make_app: Callable[[AsyncEngine, Any], Any], **connections: Any
    ) -> None:
        self._loop = FrozenLoop()
        self._bound = bind("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        self._http: list[GracefulServer] = []
        self._is_ready = threading.Event()
        factory = ServerFactory(
            make_engine=lambda: served, make_app=make_app,
            settings=Settings(**connections),
        )  # fmt: skip
        serving = serve_http(
            factory, AsyncEngine(ThreadClient(served.engine)), served.model_info,
            self._bound, ready=lambda _: self._is_ready.set(), on_start=self._http.append,
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(serving,), daemon=True
        )

    def __enter__(self) -> FrozenServer:
        self._thread.start()
        assert self._is_ready.wait(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._http[0].stop()
        wait_until(self._has_ended)
        self._loop.close()

    def _has_ended(self) -> bool:
        """Advance the clock of a server that stops: it waits for its responses to end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._move, 1.0)
        return not self._thread.is_alive()

    def connect(self) -> tuple[socket.socket, HttpConnection]:
        """Both ends of a new connection."""
        before = self.connections
        client = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        [server] = wait_until(lambda: self.connections - before)
        return client, server

    @property
    def connections(self) -> set[HttpConnection]:
        return set(self._http[0].server_state.connections)

    def advance(self, seconds: float) -> None:
        """Let time pass; returns when everything that was due by then has been done."""
        moving = asyncio.run_coroutine_threadsafe(self._advance(seconds), self._loop)
        moving.result(LIMIT)

    async def _advance(self, seconds: float) -> None:
        self._move(seconds)
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    def _move(self, seconds: float) -> None:
        self._loop.now += seconds
