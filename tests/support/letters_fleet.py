"""Replicas on Ray without a model: call `main`.

Starts a local Ray, three replicas and a server, whose outputs are the prompts in capitals. Prints the
addresses of Ray and of the server. A number on its standard input sets the number of replicas.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from headway import Engine, Scheduler, preset
from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.engine.loop import EngineLoop
from headway.fleet.options import FleetOptions
from headway.observe.server_metrics import ServerMetrics
from headway.server import live
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.health import Watchdog, watch
from headway.server.process.log_setup import setup
from headway.server.process.serve import ServedEngine, ServerFactory, bind
from tests.support.served import END, HIDDEN_SIZE, MODEL, VOCAB_SIZE, Capitals, letters

STEP_SECONDS = 0.02


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


def make_engine() -> ServedEngine:
    executor = Capitals()
    executor.seconds = STEP_SECONDS
    config = preset("headway", max_model_len=512, num_blocks=2048, block_size=16)

    def prepare(loop: EngineLoop) -> None:
        ServerMetrics(loop, MODEL)
        Watchdog(loop)

    return ServedEngine(
        engine=Engine(Scheduler(config), executor), model_info=Info(), prepare=prepare
    )


def make_app(engine: AsyncEngine, info: Info) -> Any:
    context = Context(
        engine=engine, input_processor=info.input_processor, model_name=MODEL, max_model_len=512,
        health=watch(engine),
    )  # fmt: skip
    return create_app(context, [live.router(context)])


def main() -> None:
    import ray
    from ray import serve

    from headway.fleet.ray_cluster import serve_fleet
    from headway.fleet.ray_serve import replica_deployment

    factory = ServerFactory(make_engine=make_engine, make_app=make_app, setup=setup, grace=0.0)
    # Prompts repeat, and the default rule would send all to the replica that has them cached.
    options = FleetOptions(replicas=3, num_cpus=0.0, route="round_robin")
    bound = bind("127.0.0.1", 0)
    stop_logs = setup()

    def scale() -> None:
        for line in sys.stdin:
            app = replica_deployment(factory, replace(options, replicas=int(line)))
            target = serve.RunTarget(app, name=options.name, route_prefix=None)
            serve.run_many([target], wait_for_applications_running=False)
        os.kill(os.getpid(), signal.SIGINT)  # the test has ended without stopping this server

    def ready(_: object) -> None:
        print(f"ray {ray.get_runtime_context().gcs_address}", file=sys.stderr)
        print(f"{MODEL} at http://127.0.0.1:{port};", file=sys.stderr)
        threading.Thread(target=scale, daemon=True).start()

    port = bound.getsockname()[1]
    try:
        serve_fleet(factory, bound, ready, options, lambda _: None)
    finally:
        stop_logs()
