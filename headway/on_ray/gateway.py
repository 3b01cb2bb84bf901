"""The gateway of a fleet on Ray. Ray is in another process, which may end without effect on streams.

That process is `headway.on_ray.keeper`. It writes the list of replicas to a file; this one reads
the file, and starts the keeper again if it ends.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import json

from headway.engine.async_engine import AsyncEngine
from headway.errors import ConfigError, ExecutorError
from headway.fleet.client import FleetClient
from headway.fleet.discovery import (
    Announced,
    Directory,
    DiscoveredFleet,
    FileDirectory,
    write_announced,
)
from headway.fleet.routing import parse_route
from headway.fleet.shared_counters import SharedCounters
from headway.on_ray.options import FleetOptions
from headway.on_ray.reaper import reaper
from headway.remote.auth import Identity
from headway.server.http.connection_table import Listener
from headway.server.process.serve import (
    Ready,
    ServerFactory,
    install_signal_handlers,
    restored_signal_handlers,
    serve_http,
)
from headway.server.process.workers import MakeClient, Supervisor

KEEPER = ("-m", "headway.on_ray.keeper")
LIST, MODEL = "fleet.json", "model"  # files of the keeper: a `Published`, and a pickle
COUNTERS = "counters"  # file of the gateways
MAX_STARTS = 3  # of a keeper that ends without a report before the replicas are ready
PAUSE = 1.0  # seconds until a keeper that has ended is started again
END_SECONDS = 60.0  # for a keeper to remove the replicas from a cluster
log = logging.getLogger(__name__)


class Published(Announced, frozen=True, kw_only=True):
    """The replicas, and why they cannot start."""

    error: str | None = None
    is_usage: bool = False  # the user can correct it


def serve_fleet(
    factory: ServerFactory,
    bound: socket.socket,
    ready: Ready,
    options: FleetOptions,
    on_ready: Callable[[int], None],
    num_gateways: int = 1,
) -> int:
    """Serve over replicas on Ray until a signal; return the exit status.

    `on_ready` gets the number of replicas that are ready, each time it changes.
    """
    with restored_signal_handlers(), kept(factory, options) as folder:
        if num_gateways > 1:
            SharedCounters.create(folder / COUNTERS, num_gateways)
            backend = KeptFleet(folder, options, on_ready)
            return Supervisor(factory, bound, num_gateways, lambda _: backend).run(ready)
        info, identity = wait_for_model(folder, on_ready)
        engine = AsyncEngine(fleet_client(FileDirectory(folder / LIST), identity, options))
        serving = serve_http(
            factory, engine, info, Listener(fileno=bound.detach()), ready=ready,
            on_start=partial(install_signal_handlers, factory.grace),
        )  # fmt: skip
        asyncio.run(serving)
    return 0


@dataclass
class KeptFleet:
    """The replicas of a keeper, as the backend of several gateways. `kept` ends them."""

    folder: Path
    options: FleetOptions
    on_ready: Callable[[int], None]
    exit_status = None

    def start(self) -> tuple[MakeClient, Any]:
        info, identity = wait_for_model(self.folder, self.on_ready)
        return partial(_gateway_client, self.folder, identity, self.options), info

    def stop(self) -> None: ...
    def kill(self) -> None: ...


def _gateway_client(
    folder: Path, identity: Identity, options: FleetOptions, number: int
) -> FleetClient:
    fleet = fleet_client(FileDirectory(folder / LIST), identity, options)
    fleet.shared = SharedCounters(folder / COUNTERS, number)
    return fleet


@contextmanager
def kept(factory: ServerFactory, options: FleetOptions) -> Iterator[Path]:
    """A keeper, and the private folder of its files. At the end all that it has started ends."""
    with ExitStack() as stack:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        files = TemporaryDirectory(prefix="headway-ray-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(files))
        if options.address is None:
            stack.enter_context(reaper(str(folder)))
        seconds = END_SECONDS if options.address else 0.0
        stack.enter_context(_running(folder, pickle.dumps((factory, options)), seconds))
        yield folder


@contextmanager
def _running(folder: Path, given: bytes, end_seconds: float) -> Iterator[None]:
    """A keeper while this context runs; the closed pipe tells it also if this process is killed."""
    ended = threading.Event()

    def run() -> None:
        for attempt in count(1):
            with subprocess.Popen(
                [sys.executable, *KEEPER, folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            ) as process:  # fmt: skip
                assert process.stdin is not None, "a pipe was asked for"
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(given)
                    pipe.flush()
                    while process.poll() is None and not ended.wait(0.05):
                        pass
                with suppress(subprocess.TimeoutExpired):
                    process.wait(end_seconds)
                process.kill()
            if ended.is_set():
                return
            if attempt >= MAX_STARTS and not (folder / MODEL).exists():
                error = f"the process that keeps Ray ended with status {process.returncode}"
                write_announced(folder / LIST, Published(replicas={}, error=error))
                return
            log.warning("the process that keeps Ray has ended; it is started again")
            ended.wait(PAUSE)

    thread = threading.Thread(target=run, name="keeper")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_for_model(folder: Path, on_ready: Callable[[int], None]) -> tuple[Any, Identity]:
    """Model info and identity, once all replicas are ready. Raises what the keeper reports."""
    known = -1
    while True:
        with suppress(FileNotFoundError):
            found = json.decode((folder / LIST).read_bytes(), type=Published)
            if found.error is not None:
                raise (ConfigError if found.is_usage else ExecutorError)(found.error)
            if len(found.replicas) != known:
                on_ready(known := len(found.replicas))
            model: tuple[Any, Identity] = pickle.loads((folder / MODEL).read_bytes())
            return model
        time.sleep(0.05)


def fleet_client(directory: Directory, identity: Identity, options: FleetOptions) -> FleetClient:
    """All replicas behind one client."""
    return DiscoveredFleet(
        directory, identity, options.key, route=parse_route(options.route),
        settings=options.settings,
    )  # fmt: skip
