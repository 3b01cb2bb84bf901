"""Engine and HTTP in one process: how the two halves of a server are made, and run together.

Knows no model and no endpoint: a recipe makes them. Several processes are in workers.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from headway.engine.async_engine import AsyncEngine, ThreadPort
from headway.engine.engine import Engine
from headway.engine.gc_freeze import gc_freeze
from headway.engine.loop import EngineLoop, Limits
from headway.errors import ConfigError
from headway.server.http.connections import ConnectionTable, Listener, raise_descriptor_limit
from headway.server.process.shutdown import GracefulServer
from headway.server.settings import ConnectionSettings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Ready = Callable[[Any], None]  # told the engine's facts once requests are taken


def nothing(*_: object) -> None:
    """For who has nothing to prepare or to close."""


def set_up_nothing() -> Callable[[], None]:
    return nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An engine to serve, and what goes with it."""

    engine: Engine
    facts: Any  # what an app must know of the model; picklable
    limits: Limits | None = None
    prepare: Callable[[EngineLoop], None] = nothing  # adds observers and answers
    close: Callable[[], None] = nothing  # called once the engine has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make the two halves of a server; picklable, as each may be made in its own process."""

    make_engine: Callable[[], Served]
    make_app: Callable[[AsyncEngine, Any], Any]  # from the engine and its facts
    setup: Callable[[], Callable[[], None]] = set_up_nothing  # of a process; gives what ends it
    grace: float = 30.0  # seconds for open requests after a signal to stop
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; ConfigError if the address cannot be had."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must be from 0 (any that is free) to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With its protocol named, asyncio lets small writes out at once.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # at once after a crash
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"cannot serve at {host}:{port}: {why}; choose another --port or --host, or end what "
            "is there"
        ) from None
    return bound


def serve_here(recipe: Recipe, bound: socket.socket, ready: Ready) -> int:
    """Engine on a thread, HTTP beside it, until a signal; the exit status."""
    served = recipe.make_engine()
    port = ThreadPort(served.engine, served.limits)
    served.prepare(port.loop)
    listener = Listener(fileno=bound.detach())
    work = serve_http(
        recipe, AsyncEngine(port), lambda: served.facts, listener, ready=ready, begin=_mind_signals
    )
    try:
        asyncio.run(work)
    finally:
        served.close()
    return 0


async def serve_http(
    recipe: Recipe,
    engine: AsyncEngine,
    facts: Callable[[], Any],
    bound: socket.socket,
    *,
    ready: Ready,
    begin: Callable[[GracefulServer], None],
) -> None:
    """Serve until somebody calls `stop` of the server that `begin` is given."""
    await engine.start()  # the facts may come with it
    app = recipe.make_app(engine, facts())
    table = ConnectionTable(recipe.connections, raise_descriptor_limit())
    server = GracefulServer(app, engine, recipe.grace, lambda: ready(facts()), table)
    begin(server)
    with gc_freeze():
        await server.serve(sockets=[bound])
        await engine.close()


def _mind_signals(server: GracefulServer) -> None:
    def stop(number: int, _: FrameType | None) -> None:
        if server.should_exit:  # the second one: at once
            os._exit(128 + number)
        server.stop()

    for number in SIGNALS:
        signal.signal(number, stop)
