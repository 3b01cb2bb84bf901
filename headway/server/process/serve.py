"""Runs a server in one process: the engine on a thread, HTTP on an event loop.

Knows no model and no endpoints: a `ServerFactory` makes them. workers.py runs several processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.engine.gc_freeze import gc_freeze
from headway.engine.loop import EngineLoop
from headway.engine.queue_limits import QueueLimits
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError
from headway.server.http.connection_table import ConnectionTable, Listener, raise_descriptor_limit
from headway.server.process.shutdown import GracefulServer
from headway.server.settings import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger(__name__)
Ready = Callable[[Any], None]  # called with the model info once the server accepts requests


def do_nothing(*_: object) -> None:
    """The default of optional callbacks."""


def no_setup() -> Callable[[], None]:
    """The default setup of a process."""
    return do_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An engine with its limits, model info and callbacks."""

    engine: Engine
    model_info: Any  # passed to `make_app`; must be picklable
    limits: QueueLimits | None = None
    prepare: Callable[[EngineLoop], None] = do_nothing  # adds observers and queries to the loop
    close: Callable[[], None] = do_nothing  # called after the engine has stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFactory:
    """Makes the engine and the app, possibly in different processes; must be picklable."""

    make_engine: Callable[[], ServedEngine]
    make_app: Callable[[AsyncEngine, Any], Any]  # from the engine and the model info
    setup: Callable[[], Callable[[], None]] = no_setup  # of each process; returns its teardown
    grace: float = 30.0  # seconds for open requests to finish after a stop signal
    settings: Settings = field(default_factory=Settings)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; ConfigError if the address is not available.

    With SO_REUSEADDR, several sockets can be bound to one address until one of them listens. So it
    is set only if binding fails without it, as it does right after a crash.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must be from 0 (any free port) to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sets TCP_NODELAY only if the socket's protocol is given.
        bound = socket.socket(family, kind, protocol)
        try:
            try:
                bound.bind(address)
            except OSError:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise _unavailable(host, port, error) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Listen on a bound socket; close it and raise ConfigError if another process listens there."""
    host, port = bound.getsockname()[:2]
    try:
        # The connections inherit it. After a crash they must not prevent a restart.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen()
    except OSError as error:
        bound.close()
        raise _unavailable(host, port, error) from None


def _unavailable(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or "
        "--host, or stop the process that uses it"
    )


def serve_single_process(factory: ServerFactory, bound: socket.socket, ready: Ready) -> int:
    """Serve in this process until a signal; return the exit status."""
    served = factory.make_engine()
    client = ThreadClient(served.engine, served.limits)
    served.prepare(client.loop)
    listener = Listener(fileno=bound.detach())
    serving = serve_http(
        factory, AsyncEngine(client), served.model_info, listener, ready=ready,
        on_start=partial(install_signal_handlers, factory.grace),
    )  # fmt: skip
    with restored_signal_handlers():
        try:
            asyncio.run(serving)
        finally:
            served.close()
    return 0


async def serve_http(
    factory: ServerFactory,
    engine: AsyncEngine,
    model_info: Any,
    bound: socket.socket,
    *,
    ready: Ready,
    on_start: Callable[[GracefulServer], None],
) -> None:
    """Serve HTTP until `stop` is called on the server that `on_start` receives.

    ConfigError if another process listens on the address.
    """
    await engine.start()
    app = factory.make_app(engine, model_info)
    table = ConnectionTable(factory.settings, raise_descriptor_limit())
    server = GracefulServer(app, engine, factory.grace, lambda: ready(model_info), table)
    on_start(server)
    with gc_freeze():
        try:
            listen(bound)  # only now: a client that connects earlier would wait for its answer
            await server.serve(sockets=[bound])
        finally:
            await engine.close()


def log_stop(number: int, grace: float) -> None:
    """Log that a signal stops the server. Not for signal handlers: logging takes locks."""
    name = signal.Signals(number).name
    log.info("%s: stopping; open requests have %g seconds to finish", name, grace)


@contextmanager
def restored_signal_handlers() -> Iterator[None]:
    """Restore the caller's signal handlers at the end: those of a server need its event loop."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_signal_handlers(grace: float, server: GracefulServer) -> None:
    """Stop a server at a signal; open requests have `grace` seconds."""
    loop = asyncio.get_running_loop()

    def stop(number: int, _: FrameType | None) -> None:
        if server.should_exit:  # a second signal exits at once
            os._exit(128 + number)
        loop.call_soon_threadsafe(log_stop, number, grace)
        server.stop()

    for number in SIGNALS:
        signal.signal(number, stop)
