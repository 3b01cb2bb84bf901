"""Runs a server in several processes: a backend, several API workers and a supervisor.

The backend is one engine in a process of its own, or the replicas of a fleet. The workers share one
listening socket. Child processes ignore signals: the supervisor stops them through a pipe. They
exit when the pipe closes, so none outlives the supervisor and keeps the port.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from headway.engine.async_engine import AsyncEngine, EngineClient
from headway.engine.gc_freeze import gc_freeze
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError, ExecutorError, HeadwayError
from headway.remote.client import SocketClient
from headway.remote.service import EngineService
from headway.server.http.connection_table import Listener
from headway.server.process.serve import (
    SIGNALS,
    Ready,
    ServerFactory,
    log_stop,
    restored_signal_handlers,
    serve_http,
)
from headway.server.process.shutdown import DRAIN_TIMEOUT

STOP = "stop"
MakeClient = Callable[[int], EngineClient]  # of the worker with this number; must be picklable
CONTEXT = get_context("spawn")
log = logging.getLogger(__name__)


class SharedListener(Listener):
    """A listening socket that several processes share.

    Accepts one connection per wakeup. With more, the first process to wake up would take most
    connections of a burst.
    """

    __slots__ = ()
    max_accepts = 1


def run_engine(factory: ServerFactory, path: Path, control: Connection) -> None:
    """Main function of the engine's process: report readiness, then serve until stopped."""
    _ignore_signals()
    teardown = factory.setup()
    try:
        served = factory.make_engine()
    except HeadwayError as error:
        control.send(error)
        return

    async def serve() -> None:
        client = ThreadClient(served.engine, served.limits)
        served.prepare(client.loop)
        service = EngineService(client)
        await service.start(path)
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        _listen_for_stop(control, lambda: loop.call_soon_threadsafe(stopped.set))
        with gc_freeze():
            control.send(served.model_info)
            await stopped.wait()
        await service.close()

    asyncio.run(serve())
    served.close()
    teardown()


def run_worker(
    factory: ServerFactory, number: int, bound: socket.socket, control: Connection
) -> None:
    """Main function of an API worker: serve HTTP once the supervisor sends what it needs."""
    _ignore_signals()
    teardown = factory.setup()
    try:
        make_client, model_info = control.recv()
    except EOFError:  # the supervisor has exited
        return
    shared = SharedListener(fileno=bound.detach())
    serving = serve_http(
        factory, AsyncEngine(make_client(number)), model_info, shared,
        ready=lambda _: control.send(None),
        on_start=lambda server: _listen_for_stop(control, server.stop),
    )  # fmt: skip
    try:
        asyncio.run(serving)
    except ConfigError as error:
        control.send(error)
    teardown()


def _ignore_signals() -> None:
    for number in SIGNALS:  # a signal may go to the whole process group; the supervisor handles it
        signal.signal(number, signal.SIG_IGN)


def _listen_for_stop(control: Connection, stop: Callable[[], object]) -> None:
    """Call `stop` on the supervisor's STOP message; exit at once if the supervisor has exited."""

    def listen() -> None:
        try:
            while control.recv() == STOP:
                stop()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, name="control", daemon=True).start()


class ChildProcess:
    """A child process and the pipe to it."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.control, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=target, args=(*arguments, theirs), name=name, daemon=True
        )
        self.process.start()
        theirs.close()
        self._is_ready = False

    def wait_until_ready(self) -> Any:
        """The message that reports readiness; raises the child's error, or if it has exited."""
        try:
            message = self.control.recv()
        except EOFError:
            self.process.join()
            exited = f"the {self.process.name} exited with status {self.process.exitcode}"
            raise ExecutorError(f"{exited} before it was ready") from None
        if isinstance(message, Exception):
            raise message
        self._is_ready = True
        return message

    def was_ready(self) -> bool:
        """Whether a child that has exited had reported readiness."""
        if not self._is_ready:
            with suppress(HeadwayError):
                self.wait_until_ready()
        return self._is_ready

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the supervisor notices the exit of a child elsewhere
            self.control.send(message)

    def join_or_kill(self, seconds: float) -> None:
        """Wait for the exit; kill the process after `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Backend(Protocol):
    """What the clients of the workers connect to."""

    def start(self) -> tuple[MakeClient, Any]:
        """Wait until it is ready; returns what makes a worker's client, and the model info."""
        ...

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        ...

    def stop(self) -> None: ...
    def kill(self) -> None: ...


class EngineProcess:
    """An engine in a process of its own, behind a Unix socket in a folder of mode 0700."""

    def __init__(self, factory: ServerFactory) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self._path = Path(self._folder.name) / "engine"
        self._child = ChildProcess("engine", run_engine, factory, self._path)

    def start(self) -> tuple[MakeClient, Any]:
        model_info = self._child.wait_until_ready()
        return partial(_engine_client, self._path), model_info

    @property
    def exit_status(self) -> int | None:
        return self._child.process.exitcode

    def stop(self) -> None:
        self._child.send(STOP)
        self._child.join_or_kill(DRAIN_TIMEOUT)

    def kill(self) -> None:
        self._child.process.kill()
        self._folder.cleanup()


def _engine_client(path: Path, _: int) -> SocketClient:
    return SocketClient(path)


class Supervisor:
    """Starts the backend and the API workers, replaces workers, and stops all in order."""

    def __init__(
        self,
        factory: ServerFactory,
        bound: socket.socket,
        num_workers: int,
        make_backend: Callable[[ServerFactory], Backend] = EngineProcess,
    ) -> None:
        self.workers: dict[int, ChildProcess] = {}  # by number
        self._make_backend, self._num_workers = make_backend, num_workers
        self._factory, self._bound = factory, bound
        self._signals: list[int] = []

    def run(self, ready: Ready) -> int:
        """Serve until a signal; return the exit status."""
        with restored_signal_handlers():
            self.backend = self._make_backend(self._factory)
            try:
                given = self._start()
                ready(given[1])
                status = self._watch(given)
                if self._signals:
                    log_stop(self._signals[0], self._factory.grace)
                self._stop()
            finally:
                self._kill()
        return status

    def _start(self) -> tuple[MakeClient, Any]:
        """Start the workers; return what they need once all processes are ready."""
        self.workers = {number: self._new_worker(number) for number in range(self._num_workers)}
        given = self.backend.start()
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        for worker in self.workers.values():
            worker.send(given)
        for worker in self.workers.values():
            worker.wait_until_ready()
        return given

    def _new_worker(self, number: int) -> ChildProcess:
        return ChildProcess("API worker", run_worker, self._factory, number, self._bound)

    def _watch(self, given: tuple[MakeClient, Any]) -> int:
        """Replace workers that exit, until a signal arrives or no worker is left."""
        is_logged = False
        while self.workers and not self._signals:
            status = self.backend.exit_status
            if not is_logged and status is not None:
                # The workers continue: they answer with an error that says the engine has stopped.
                log.error("the engine exited with status %s", status)
                is_logged = True
            exited = wait([each.process.sentinel for each in self.workers.values()], timeout=0.1)
            for number, worker in list(self.workers.items()):
                if worker.process.sentinel not in exited:
                    continue
                worker.process.join()
                log.error("an API worker exited with status %s", worker.process.exitcode)
                del self.workers[number]
                # A worker that failed to start is not replaced: the next one would fail, too.
                if worker.was_ready() and self.backend.exit_status is None:
                    self.workers[number] = self._new_worker(number)
                    self.workers[number].send(given)
        return 0 if self.workers and self.backend.exit_status is None else 1

    def _stop(self) -> None:
        self._bound.close()  # clients would connect and wait as long as any process has it open
        for worker in self.workers.values():
            worker.send(STOP)
        for worker in self.workers.values():
            worker.join_or_kill(self._factory.grace + 3 * DRAIN_TIMEOUT)
        self.backend.stop()

    def _kill(self) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        self.backend.kill()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signals:  # a second signal exits at once
            self._kill()
            os._exit(128 + number)
        self._signals.append(number)
