"""One process for the engine, several for HTTP on one listening socket, and who watches them.

The processes heed no signals: a pipe from the supervisor tells them to stop, and its end that there
is nobody to work for, so that none outlives the supervisor and keeps the port.
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
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from headway.engine.async_engine import AsyncEngine, ThreadPort
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ExecutorError, HeadwayError
from headway.server.http.connections import Listener
from headway.server.process.engine_service import Service
from headway.server.process.ipc import SocketPort
from headway.server.process.serve import SIGNALS, Ready, Recipe, serve_http
from headway.server.process.shutdown import LAST_WORDS

GO, STOP = "go", "stop"
CONTEXT = get_context("spawn")
log = logging.getLogger(__name__)


class SharedSocket(Listener):
    """A listening socket of several processes.

    Gives one connection each time it is ready. With more, the first process to wake up would take
    most of a burst.
    """

    __slots__ = ()
    max_accepts = 1


def run_engine(recipe: Recipe, path: str, control: Connection) -> None:
    """The engine's process: says that it is ready, and serves until it is told to stop."""
    _ignore_signals()
    finish = recipe.setup()
    try:
        served = recipe.make_engine()
    except HeadwayError as error:
        control.send(error)
        return

    async def serve() -> None:
        port = ThreadPort(served.engine, served.limits)
        served.prepare(port.loop)
        service = Service(port, served.facts)
        await service.start(path)
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        _obey(control, lambda: loop.call_soon_threadsafe(told.set))
        with gc_freeze():
            control.send(served.facts)
            await told.wait()
        await service.close()

    asyncio.run(serve())
    served.close()
    finish()


def run_worker(recipe: Recipe, path: str, bound: socket.socket, control: Connection) -> None:
    """A process that answers HTTP, once there is an engine to ask."""
    _ignore_signals()
    finish = recipe.setup()
    if not _is_sent_off(control):
        return
    port, shared = SocketPort(path), SharedSocket(fileno=bound.detach())
    work = serve_http(
        recipe, AsyncEngine(port), lambda: port.facts, shared,
        ready=lambda _: control.send(None),
        begin=lambda server: _obey(control, server.stop),
    )  # fmt: skip
    asyncio.run(work)
    finish()


def _is_sent_off(control: Connection) -> bool:
    """Waits for the supervisor's word; False if there is no supervisor any more."""
    try:
        return bool(control.recv() == GO)
    except EOFError:
        return False


def _ignore_signals() -> None:
    for number in SIGNALS:  # they may be sent to the whole group; the supervisor knows what to do
        signal.signal(number, signal.SIG_IGN)


def _obey(control: Connection, stop: Callable[[], object]) -> None:
    """Stop when the supervisor says so; without one, end at once."""

    def listen() -> None:
        try:
            while control.recv() == STOP:
                stop()
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, name="control", daemon=True).start()


class Child:
    """A process and the pipe to it."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.control, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=target, args=(*arguments, theirs), name=name, daemon=True
        )
        self.process.start()
        theirs.close()
        self._is_ready = False

    def first_word(self) -> Any:
        """What it says when it is ready; raises the error it says instead, or that it died."""
        try:
            word = self.control.recv()
        except EOFError:
            self.process.join()
            name, status = self.process.name, self.process.exitcode
            raise ExecutorError(
                f"the {name} ended with status {status} before it was ready"
            ) from None
        if isinstance(word, Exception):
            raise word
        self._is_ready = True
        return word

    def has_been_ready(self) -> bool:
        """Of one that is dead: whether it came so far."""
        if not self._is_ready:
            with suppress(HeadwayError):
                self.first_word()
        return self._is_ready

    def tell(self, word: str) -> None:
        with suppress(OSError):  # if it is dead, somebody will notice
            self.control.send(word)

    def end(self, seconds: float) -> None:
        """Wait for its end; after so many seconds, make it."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Supervisor:
    """Starts an engine's process and some that answer HTTP, and ends them in order."""

    def __init__(self, recipe: Recipe, bound: socket.socket, num_workers: int) -> None:
        self.engine: Child | None = None
        self.workers: list[Child] = []
        self._recipe, self._bound, self._num_workers = recipe, bound, num_workers
        self._signals: list[int] = []

    def run(self, ready: Ready) -> int:
        """Serve until a signal; the exit status."""
        with tempfile.TemporaryDirectory(prefix="headway-") as folder:  # of mode 0700
            path = str(Path(folder) / "engine")
            try:
                ready(self._start(path))
                for number in SIGNALS:
                    signal.signal(number, self._note)
                status = self._watch(path)
                self._stop()
            finally:
                self._kill()
        return status

    def _start(self, path: str) -> Any:
        """Returns the engine's facts once everybody is ready."""
        self.engine = Child("engine", run_engine, self._recipe, path)
        self.workers = [self._new_worker(path) for _ in range(self._num_workers)]
        facts = self.engine.first_word()
        for worker in self.workers:
            worker.tell(GO)
        for worker in self.workers:
            worker.first_word()
        return facts

    def _new_worker(self, path: str) -> Child:
        return Child("API worker", run_worker, self._recipe, path, self._bound)

    def _watch(self, path: str) -> int:
        """Until a signal, or until nobody is left; workers that die are replaced."""
        assert self.engine is not None, "started before"
        is_told = False
        while self.workers and not self._signals:
            if not is_told and not self.engine.process.is_alive():
                # The workers stay: they tell whoever asks that there is no engine.
                log.error("the engine ended with status %s", self.engine.process.exitcode)
                is_told = True
            gone = wait([worker.process.sentinel for worker in self.workers], timeout=0.1)
            for worker in [w for w in self.workers if w.process.sentinel in gone]:
                self._replace(worker, path)
        return 0 if self.workers and self.engine.process.is_alive() else 1

    def _replace(self, worker: Child, path: str) -> None:
        assert self.engine is not None, "started before"
        worker.process.join()
        log.error("an API worker ended with status %s", worker.process.exitcode)
        self.workers.remove(worker)
        # One that could not even start is not replaced: the next could not, either.
        if worker.has_been_ready() and self.engine.process.is_alive():
            self.workers.append(self._new_worker(path))
            self.workers[-1].tell(GO)

    def _stop(self) -> None:
        assert self.engine is not None, "started before"
        self._bound.close()  # while anybody holds it open, clients would wait at it
        for worker in self.workers:
            worker.tell(STOP)
        for worker in self.workers:
            worker.end(self._recipe.grace + 3 * LAST_WORDS)
        self.engine.tell(STOP)
        self.engine.end(LAST_WORDS)

    def _kill(self) -> None:
        for child in (*self.workers, *([self.engine] if self.engine else [])):
            child.process.kill()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._signals:  # the second one: at once
            self._kill()
            os._exit(128 + number)
        self._signals.append(number)
