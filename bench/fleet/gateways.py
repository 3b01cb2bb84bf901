"""CPU time of a fleet's gateway for each streamed token.

    python -m bench.fleet.gateways [--replicas 2] [--rounds 3]    prints one JSON object

Replicas with an executor that only sleeps generate one token per request and step for 256 streams,
which the gateway sends as server-sent events. By duration of a step:
cpu_us_per_token    of the gateway, of all replicas, and of the load generator
output_throughput   tokens/s
events_per_second   below it if the gateway is behind, and events have several tokens
All processes share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.harness import Bench, Figures, medians
from bench.server.process import ServerProcess, cpu_seconds
from bench.server.targets import MODEL, STREAMS, VOCAB, simulated
from headway.engine.async_engine import AsyncEngine
from headway.engine.thread_client import ThreadClient
from headway.fleet.client import FleetClient
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.load import send
from headway.lab.loadgen.requests import LengthRange, RequestFormat, random_requests
from headway.remote.auth import Identity
from headway.remote.client import SocketClient
from headway.remote.service import EngineService
from headway.server.http.connection_table import Listener
from headway.server.process.log_setup import setup
from headway.server.process.serve import (
    ServerFactory,
    bind,
    do_nothing,
    install_signal_handlers,
    serve_http,
)
from headway.server.serving import make_app
from headway.server.settings import Settings

KEY, BLOCK_SIZE = b"k" * 32, 16
STEP_SECONDS = (0.020, 0.008)
SPAWN = get_context("spawn")
bench = Bench(__doc__)
bench.option("--replicas", type=int, default=2)
bench.option("--rounds", type=int, default=3)


def identity(name: str) -> Identity:
    return Identity(name=name, model=MODEL, block_size=BLOCK_SIZE)


def run_replica(name: str, seconds: float, parent: Connection) -> None:
    """A replica until its parent ends."""

    async def serve() -> None:
        served = simulated(seconds)
        client = ThreadClient(served.engine, served.limits, report_load=True)
        served.prepare(client.loop)
        parent.send(await EngineService(client, identity(name), KEY).start(("127.0.0.1", 0)))
        await asyncio.to_thread(_until_closed, parent)
        os._exit(0)

    asyncio.run(serve())


def _until_closed(parent: Connection) -> None:
    with suppress(EOFError):
        parent.recv()


def serve_gateway(num_replicas: int, seconds: float, port: int) -> None:
    """Main function of the gateway's process, which starts the replicas."""
    clients, pipes = {}, []
    for number in range(num_replicas):
        name, (ours, theirs) = f"replica-{number}", SPAWN.Pipe()
        SPAWN.Process(target=run_replica, args=(name, seconds, theirs), daemon=True).start()
        theirs.close()
        clients[name] = SocketClient(ours.recv(), identity(name), KEY)
        pipes.append(ours)
    factory = ServerFactory(
        make_engine=partial(simulated, seconds), make_app=partial(make_app, Settings()),
        setup=partial(setup, "human", "info"), grace=0.0,
    )  # fmt: skip
    factory.setup()
    listener = Listener(fileno=bind("127.0.0.1", port).detach())
    engine = AsyncEngine(FleetClient(clients, block_size=BLOCK_SIZE))
    asyncio.run(serve_http(
        factory, engine, simulated(seconds).model_info, listener, ready=do_nothing,
        on_start=partial(install_signal_handlers, 0.0),
    ))  # fmt: skip


def cpu_times(server: ServerProcess) -> dict[str, float]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return {
        "gateway": cpu_seconds(server.pid), "replicas": sum(cpu_seconds(int(n)) for n in children),
        "load_generator": time.process_time(),
    }  # fmt: skip


def measure(server: ServerProcess, num_requests: int, num_tokens: int, seed: int) -> Figures:
    wording = RequestFormat(model=MODEL, vocab_size=VOCAB, seed=seed)
    lengths = LengthRange(16, 16), LengthRange(num_tokens, num_tokens)
    before = cpu_times(server)
    done = send(
        server.address, wording, random_requests(num_requests, *lengths, seed),
        concurrency=STREAMS, timeout=300,
    )  # fmt: skip
    after = cpu_times(server)
    report = serve_report.report(done.outcomes, done.max_concurrency)
    assert not report.failed, report.errors
    tokens, events = report.total_output_tokens, sum(each.num_pieces for each in done.outcomes)
    return {
        "cpu_us_per_token": {name: (after[name] - before[name]) * 1e6 / tokens for name in after},
        "output_throughput": report.output_throughput,
        "events_per_second": events / report.duration,
    }


def whole(asked: Namespace) -> Figures:
    found: Figures = {"num_replicas": asked.replicas, "num_streams": STREAMS}
    for seconds in STEP_SECONDS:
        options = ["--serve", str(asked.replicas), str(seconds)]
        program, log_file = "bench.fleet.gateways", Path(os.devnull)
        with ServerProcess(options, program=program, stderr=log_file) as server:
            measure(server, 64, 4, 99)
            runs = [measure(server, 2 * STREAMS, 256, seed) for seed in range(asked.rounds)]
            found[f"step_{seconds * 1e3:g}_ms"] = medians(runs)
            server.stop()
    return found


if __name__ == "__main__":
    if "--serve" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve", nargs=2)
        parser.add_argument("--port", type=int)
        asked = parser.parse_args()
        serve_gateway(int(asked.serve[0]), float(asked.serve[1]), asked.port)
    else:
        bench.main(whole)
