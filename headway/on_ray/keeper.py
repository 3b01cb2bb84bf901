"""Keeps a fleet on Ray for a gateway: starts or joins Ray, deploys replicas, publishes their list.

    python -m headway.on_ray.keeper FOLDER

A program of its own, because Ray ends its processes if the GCS or the raylet is away for long. The
standard input has the pickled factory and options, and closes when the gateway ends. A keeper that
is started again in the same folder joins the Ray of the one before.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

import ray
from msgspec import json
from msgspec.structs import replace
from ray import serve

from headway.errors import ConfigError, ExecutorError, HeadwayError
from headway.fleet.discovery import Announced, replace_file, write_announced
from headway.on_ray.cluster import check_resources, connected, remove, run, serve_is_used
from headway.on_ray.directory import RayDirectory
from headway.on_ray.gateway import LIST, MODEL, Published
from headway.on_ray.options import FleetOptions
from headway.on_ray.private import PrivateRay, is_running, start
from headway.on_ray.reaper import end_all
from headway.on_ray.serve import QUIET, replica_deployment, status, wait_until_ready
from headway.server.process.serve import ServerFactory

INTERVAL = 0.5  # seconds between two looks
SILENT_SECONDS = 5.0  # without an answer of the GCS: a problem
HUNG_SECONDS = 60.0  # without an answer of the GCS: it is started again, or joined again
START_ATTEMPTS = 4  # Ray gives its processes 30 s, which a busy machine may exceed
SLOW_START = "timed out during startup"  # in the message of Ray's exception
NO_PLACE = "to be scheduled"  # in Serve's message about replicas that Ray cannot place
NO_RAYLET = "Ray's raylet has ended, and with it the replicas"
log = logging.getLogger(__name__)


class Keeper:
    """The fleet of one gateway."""

    def __init__(self, folder: Path, factory: ServerFactory, options: FleetOptions) -> None:
        self._folder, self._factory, self._options = folder, factory, options
        self._ray: PrivateRay | None = None
        self._answered_at = time.monotonic()  # the GCS
        self._num_lost = 0  # machines of Ray that have ended
        self._known = Announced(replicas={})
        with suppress(FileNotFoundError):  # of the keeper before
            self._known = json.decode((folder / LIST).read_bytes(), type=Announced)

    def run(self) -> None:
        """Keep the fleet until the gateway ends or Ray is lost."""
        try:
            with connected(self._address()):
                self._directory = RayDirectory.of(self._options)
                try:
                    self._deploy()
                    threading.Thread(target=self._probe, daemon=True).start()
                    while True:
                        self._publish(self._ray_problem())
                        time.sleep(INTERVAL)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt) or not (self._folder / MODEL).exists():
                        self._remove()
                    raise
        except Exception as error:
            self._fail(error)

    def _remove(self) -> None:
        """Leave an existing Ray as it was; a private one ends with the gateway."""
        if self._options.address is not None:
            starts_serve = (self._folder / "serve").exists()
            remove(self._options.name, self._directory, stops_serve=starts_serve)

    def _address(self) -> str:
        """The address of the Ray to join, which is started unless it runs."""
        if self._options.address is not None:
            return self._options.address
        state = self._folder / "ray.json"
        if state.exists():
            self._ray = json.decode(state.read_bytes(), type=PrivateRay)
            if is_running(self._ray.raylet):
                self._ray_problem()
                return self._ray.address
            log.warning("%s; a new Ray is started", NO_RAYLET)
            self._known = Announced(replicas={}, num_starting=self._options.replicas)
            self._write(NO_RAYLET)
            end_all("", str(self._folder))  # what is left of it
        num_left = START_ATTEMPTS
        while True:
            num_left -= 1
            try:  # a short name in a folder that was not used: there are sockets in it
                return self._use(start(str(self._folder / str(len([*self._folder.iterdir()])))))
            except Exception as error:
                if not num_left or SLOW_START not in str(error):
                    raise
                end_all("", str(self._folder))

    def _use(self, ray: PrivateRay) -> str:
        """Note a Ray for this keeper and the next ones; returns its address."""
        self._ray = ray
        replace_file(self._folder / "ray.json", json.encode(ray))
        return ray.address

    def _deploy(self) -> None:
        """Deploy the replicas unless they are, and wait until all were ready once."""
        options = self._options
        if options.name not in serve.status().applications:
            check_resources(options)
            if not serve_is_used():
                (self._folder / "serve").touch()
            serve.start(proxy_location="Disabled", logging_config=QUIET)
            run(replica_deployment(self._factory, options), options, route_prefix=None)
        if not (self._folder / MODEL).exists():
            directory = self._directory
            model = wait_until_ready(
                directory, options, lambda: len(directory.read().replicas),
                lambda _: self._publish(None),
            )  # fmt: skip
            replace_file(self._folder / MODEL, model)

    def _publish(self, problem: str | None) -> None:
        try:
            found = self._directory.read()
            num_missing = self._options.replicas - len(found.replicas) if not found.error else 0
            num_starting = max(found.num_starting, num_missing)  # Serve replaces what is missing
            self._known = Announced(replicas=found.replicas, num_starting=num_starting)
        except Exception as error:
            problem = problem or f"the directory of the replicas does not answer: {error}"
        self._write(problem)

    def _write(self, problem: str | None) -> None:
        write_announced(self._folder / LIST, replace(self._known, problem=problem))

    def _probe(self) -> None:
        """Note what the GCS and Serve say. A thread, because their calls may not return."""
        seen, logged = set[str](), ""
        while True:
            with suppress(Exception):
                nodes = {node["NodeID"]: node["Alive"] for node in ray.nodes()}
                self._answered_at = time.monotonic()
                seen |= {id for id, is_alive in nodes.items() if is_alive}
                self._num_lost = sum(not nodes.get(id) for id in seen)
                if NO_PLACE in (said := status(self._options.name)) and said != logged:
                    log.warning("%s", said)
                logged = said
            time.sleep(1.0)

    def _ray_problem(self) -> str | None:
        """What is wrong with Ray; starts the GCS of a private Ray again. ExecutorError if Ray is lost."""
        silent, own = time.monotonic() - self._answered_at, self._ray
        if own is not None and not is_running(own.raylet):
            raise ExecutorError(NO_RAYLET)
        if own is not None and (silent > HUNG_SECONDS or not is_running(own.gcs)):
            log.warning("Ray's GCS has ended or does not answer; it is started again")
            with suppress(ProcessLookupError):
                os.kill(own.gcs, signal.SIGKILL)
            self._use(own.restart_gcs())
            self._answered_at = time.monotonic()
            return "Ray's GCS has ended and is started again"
        if silent > HUNG_SECONDS:
            raise ExecutorError(f"Ray's GCS has not answered for {silent:.0f} s")
        if silent > SILENT_SECONDS:
            return f"Ray's GCS has not answered for {silent:.0f} s"
        if self._num_lost and len(self._known.replicas) < self._options.replicas:
            return f"replicas are missing since {self._num_lost} machines of Ray have ended"
        return None

    def _fail(self, error: Exception) -> None:
        """Report an error: of the start to the gateway, which ends; later as a problem."""
        text = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        if (self._folder / MODEL).exists():
            self._write(text)
            raise SystemExit(text)
        is_usage = isinstance(error, ConfigError)
        failed = Published(replicas={}, error=text, is_usage=is_usage)
        write_announced(self._folder / LIST, failed)
        threading.Event().wait()  # until the gateway ends


def _end_with_gateway() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    folder = Path(sys.argv[1])
    factory, options = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_gateway, daemon=True).start()
    stop_logs = factory.setup()
    try:
        Keeper(folder, factory, options).run()
    except KeyboardInterrupt:
        rmtree(folder, ignore_errors=True)  # the gateway may have been killed
    finally:
        stop_logs()


if __name__ == "__main__":
    main()
