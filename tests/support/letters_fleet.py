"""Replicas on Ray without a model: call `main`, with a file as the argument of the program.

Starts a local Ray, several replicas and a server, whose outputs are the prompts in capitals. Prints
the folder of its files and the address of the server. With the environment variable
HEADWAY_TEST_DEPLOY, Serve has a proxy, whose port it prints, too. A line on its standard input has
fields of FleetOptions, as JSON, with which the replicas are replaced. The file holds them: see
held.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from headway import AsyncEngine, Engine, Scheduler, preset
from headway.engine.input_processor import InputProcessor
from headway.engine.loop import EngineLoop
from headway.fleet.discovery import DiscoveredFleet
from headway.fleet.settings import FleetSettings
from headway.observe.server_metrics import ServerMetrics
from headway.on_ray import gateway
from headway.on_ray.options import FleetOptions
from headway.server import live
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.health import Watchdog, watch
from headway.server.process.log_setup import setup
from headway.server.process.serve import ServedEngine, ServerFactory, bind
from tests.support.held import Held, Hold
from tests.support.served import END, HIDDEN_SIZE, MODEL, VOCAB_SIZE, Capitals, letters
from tests.support.waiting import LIMIT

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
STEP_SECONDS = 0.005
MAX_MODEL_LEN = 2048
NUM_REPLICAS = 3  # so that several can be starting while a test goes on
# A replica may pause for less without being lost, and for less than Ray needs to replace it.
HANG_SECONDS = 10.0
SETTINGS = FleetSettings(hang_seconds=HANG_SECONDS, stall_seconds=LIMIT, no_replica_seconds=LIMIT)


@dataclass(frozen=True)
class Info:
    """What the server needs to know about the letters."""

    identity: str = MODEL
    input_processor: InputProcessor = field(
        default_factory=lambda: InputProcessor(
            tokenizer=letters(), vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE,
            eos_ids=frozenset({END}),
        )
    )  # fmt: skip


def make_engine(hold: Hold) -> ServedEngine:
    executor = Capitals()
    executor.seconds = STEP_SECONDS
    config = preset(
        "headway", max_model_len=MAX_MODEL_LEN, num_blocks=2048, block_size=16, max_num_seqs=16,
        max_num_batched_tokens=64,
    )  # fmt: skip

    def prepare(loop: EngineLoop) -> None:
        ServerMetrics(loop, MODEL)
        Watchdog(loop, max_silence=LIMIT)  # a test may hold the engine for long

    return ServedEngine(
        engine=Engine(Scheduler(config), Held(executor, hold)), model_info=Info(), prepare=prepare
    )


def make_app(engine: AsyncEngine, info: Info) -> Any:
    context = Context(
        engine=engine, input_processor=info.input_processor, model_name=MODEL,
        max_model_len=MAX_MODEL_LEN, health=watch(engine),
    )  # fmt: skip
    routes = APIRouter()

    @routes.get("/open")
    async def open() -> list[tuple[int, str | None]]:
        """Length of the prompt, and replica, of every open request."""
        assert isinstance(engine.client, DiscoveredFleet)
        requests = engine.client.dispatcher.requests.values()
        return [(len(request.submit.prompt), request.replica) for request in requests]

    @routes.get("/replicas")
    async def replicas() -> int:
        """How many replicas the gateway can use. It asks none of them, as it does for metrics."""
        assert isinstance(engine.client, DiscoveredFleet)
        return len(engine.client.dispatcher.replicas)

    return create_app(context, [live.router(context), routes])


def update(given: bytes) -> None:
    """Replace the replicas: `given` has the address of Ray, the factory and the new options."""
    from headway.on_ray.cluster import connected, run
    from headway.on_ray.serve import replica_deployment

    address, factory, options = pickle.loads(given)
    with connected(address):
        run(replica_deployment(factory, options), options, route_prefix=None)


def keep() -> None:
    """The process that keeps Ray, with proxies of Serve at a port of the environment."""
    from ray import serve

    from headway.on_ray import keeper

    def start(**given: Any) -> None:
        own = {"host": "127.0.0.1", "port": int(os.environ["HEADWAY_TEST_PROXIES"])}
        started(**{**given, "proxy_location": "HeadOnly", "http_options": own})

    started, serve.start = serve.start, start
    keeper.main()


def main() -> None:
    # The processes of Ray stay descendants of this one if the one that has started them ends.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    make = partial(make_engine, Hold(sys.argv[1]))
    factory = ServerFactory(make_engine=make, make_app=make_app, setup=setup, grace=0.0)
    # Prompts repeat, and the default rule would send all to the replica that has them cached.
    options = FleetOptions(
        replicas=NUM_REPLICAS, num_cpus=0.0, route="round_robin", settings=SETTINGS
    )
    bound, stop_logs = bind("127.0.0.1", 0), setup()
    port = bound.getsockname()[1]
    kept_socket = socket.socket()  # no other program gets the port of the proxies, which share it
    kept_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept_socket.bind(("127.0.0.1", 0))
    proxies = str(kept_socket.getsockname()[1])
    if os.environ.get("HEADWAY_TEST_DEPLOY"):
        os.environ["HEADWAY_TEST_PROXIES"] = proxies
        # Serve gives a proxy 5 s to start, and then replaces it.
        os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = str(LIMIT)
        gateway.KEEPER = ("-c", "from tests.support.letters_fleet import keep; keep()")
    kept, folders = gateway.kept, list[Path]()

    @contextmanager
    def noted(*given: Any) -> Iterator[Path]:
        with kept(*given) as folder:
            folders.append(folder)
            yield folder

    def updates() -> None:
        program = "import sys; from tests.support.letters_fleet import update; update("
        for line in sys.stdin:
            address = json.loads((folders[0] / "ray.json").read_text())["address"]
            given = pickle.dumps((address, factory, replace(options, **json.loads(line))))
            code = program + "sys.stdin.buffer.read())"
            subprocess.run([sys.executable, "-c", code], input=given, check=True)
        os.kill(os.getpid(), signal.SIGINT)  # the test has ended without stopping this server

    def ready(_: object) -> None:
        print(f"folder {folders[0]}", file=sys.stderr)
        print(f"proxies {proxies}", file=sys.stderr)
        print(f"{MODEL} at http://127.0.0.1:{port};", file=sys.stderr)
        threading.Thread(target=updates, daemon=True).start()

    gateway.kept = noted
    try:
        gateway.serve_fleet(factory, bound, ready, options, lambda _: None)
    finally:
        stop_logs()
        kept_socket.close()
