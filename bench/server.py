"""What the server costs: the bundled model offline and served, and a model that costs nothing.

    python bench/server.py                     both parts, one JSON object
    python bench/server.py --part simulated    offline: the first part; simulated: the second

offline     output tokens/s and the median time between two tokens, engine in this process
served      the same requests through HTTP, so many at once as the engine has seats
share       served / offline tokens/s, the median of three rounds
added_ms    median time between two tokens, served less offline, likewise
simulated   by API processes: streamed tokens/s and events/s over 256 streams, short requests/s; an
            event may hold several tokens where the engine is faster than HTTP, so in `paced` a step
            takes 20 ms: 12,800 tokens/s, of which each should be an event of its own. ..._cpu_us
            is processor time of all the server's processes, the engine's included

The load generator runs on the same machine and takes its part of it. The simulated model is the
bundled one's tokenizer over an executor that makes a token of any request in no time, or asleep.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from headway import LLM, SamplingParams
from headway.cli import live
from headway.engine.asking import Asking
from headway.engine.async_engine import AsyncEngine
from headway.engine.clock import RealClock
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.errors import ConfigError
from headway.lab import serve_report
from headway.lab.asks import Wording, random_jobs
from headway.lab.bench import Span
from headway.lab.http_client import Address
from headway.lab.jobs import Job
from headway.lab.load import find_model, send
from headway.loading import find_tokenizer
from headway.model.names import resolve
from headway.plan import Column, Plan, StepResult
from headway.scheduler import Scheduler, preset
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.metrics import ServerMetrics
from headway.server.serving import Recipe, Served, bind, serve_here
from headway.server.workers import Supervisor

MODEL, VOCAB = "smollm2-135m", 49_152
SEATS, INPUT, OUTPUT = 32, Span(64, 128), Span(32, 96)
STREAMS, LONG, SHORT = 256, 256, 4
PACE = 0.020  # seconds of a step
NUM_ROUNDS = 3
STARTS_WITHIN = 120.0


class Asleep:
    """An executor that has the tokens of a plan after so many seconds of sleep."""

    def __init__(self, clock: RealClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._column = 0
        self._result = StepResult()

    def launch(self, plan: Plan) -> Asleep:
        now = self._clock.now()
        columns: list[Column] = []
        for _ in range(plan.num_steps if plan.decodes else 0):
            self._column = (self._column + 1) % 1000
            columns.append(np.full(len(plan.decodes), 1000 + self._column, dtype=np.intc))
        firsts = [1000 for chunk in plan.chunks if chunk.is_last]
        # Depth 0: one plan at a time.
        self._result = StepResult(columns, firsts, now, now + self._seconds)
        return self

    def wait(self) -> StepResult:
        if self._seconds:
            time.sleep(max(0.0, self._result.ended - self._clock.now()))
        return self._result


# The two halves of a server; functions of this module, so that each may run in its own process.


def simulated(seconds: float) -> Served:
    config = preset(
        "headway", block_size=16, num_blocks=STREAMS * 64, max_requests=STREAMS, max_tokens=8192,
        max_length=2048, decode_steps=1,
    )  # fmt: skip
    clock = RealClock()
    engine = Engine(Scheduler(config), Asleep(clock, seconds), clock, depth=0)
    return Served(engine=engine, facts=config.max_length, prepare=watch)


def real(precision: str) -> Served:
    llm = load(precision)
    return Served(engine=llm.engine, facts=llm.config.max_length, prepare=watch)


def watch(loop: EngineLoop) -> None:
    ServerMetrics(loop, MODEL)


def make_app(engine: AsyncEngine, max_length: Any) -> Any:
    tokenizer = find_tokenizer(resolve(MODEL))
    asking = Asking(tokenizer=tokenizer, vocab_size=VOCAB, eos_ids=frozenset({2}))
    return create_app(
        Context(engine=engine, asking=asking, model_name=MODEL, max_length=max_length)
    )


def load(precision: str) -> LLM:
    return LLM(MODEL, device="cpu", precision=precision, max_requests=SEATS, num_blocks=1024)


def serve(kind: str, how: str, num_workers: int, port: int) -> int:
    make = partial(simulated, float(how)) if kind == "simulated" else partial(real, how)
    recipe = Recipe(make_engine=make, make_app=make_app)
    bound = bind("127.0.0.1", port)
    if num_workers:
        return Supervisor(recipe, bound, num_workers).run(lambda _: None)
    return serve_here(recipe, bound, lambda _: None)


# The measurements.


class Running(NamedTuple):
    """A server, and its process."""

    address: Address
    pid: int

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far; 0 where the system does not tell."""
        try:
            return sum(_cpu_seconds(pid) for pid in _family(self.pid))
        except OSError:
            return 0.0


def _family(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _family(int(child))


def _cpu_seconds(pid: int) -> float:
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(kind: str, how: str, num_workers: int = 0) -> Iterator[Running]:
    """A server in a process of its own, while the block runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", kind, "--how", how]
    command += ["--api-workers", str(num_workers), "--port", str(port)]
    process = subprocess.Popen(command)
    address = Address("127.0.0.1", port, "", False)
    try:
        _wait_for(address, process)
        yield Running(address, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(address: Address, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + STARTS_WITHIN
    while True:
        try:
            find_model(address)
            return
        except ConfigError:
            if process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit("the server did not start") from None
            time.sleep(0.1)


def measure(running: Running, jobs: list[Job], concurrency: int, seed: int) -> dict[str, Any]:
    """One closed loop; every request must complete."""
    wording = Wording(model=MODEL, vocab_size=VOCAB, seed=seed)
    before = running.cpu_seconds()
    done = send(running.address, wording, jobs, concurrency=concurrency, timeout=300)
    result = serve_report.report(done.outcomes, done.most_open)
    assert not result["failed"], result["errors"]
    num_events = sum(outcome.num_pieces for outcome in done.outcomes)
    cpu = (running.cpu_seconds() - before) * 1e6
    return result | {
        "events_per_second": num_events / result["duration"],
        "event_cpu_us": cpu / num_events,
        "request_cpu_us": cpu / len(jobs),
    }


def overhead(precision: str, num_requests: int) -> dict[str, Any]:
    """The bundled model, offline and served in turn: a slow moment of the machine hits both."""
    rounds = []
    with load(precision) as llm, server("real", precision) as running:
        run_offline(llm, random_jobs(2, INPUT, OUTPUT, 0), 99)
        measure(running, random_jobs(2, INPUT, OUTPUT, 0), 2, seed=99)
        for number in range(NUM_ROUNDS):
            jobs = random_jobs(num_requests, INPUT, OUTPUT, number)
            offline = run_offline(llm, jobs, number)
            served = measure(running, jobs, SEATS, number)
            rounds.append((offline, {name: served[name] for name in offline}))
    pairs = [(a["output_throughput"], b["output_throughput"]) for a, b in rounds]
    added = [b["median_itl_ms"] - a["median_itl_ms"] for a, b in rounds]
    return {
        "precision": precision, "num_requests": num_requests, "concurrency": SEATS,
        "offline": [a for a, _ in rounds], "served": [b for _, b in rounds],
        "share": statistics.median(served / offline for offline, served in pairs),
        "added_ms": statistics.median(added),
    }  # fmt: skip


def run_offline(llm: LLM, jobs: list[Job], seed: int) -> dict[str, float]:
    wording = Wording(model=MODEL, vocab_size=VOCAB, seed=seed)
    metrics = live.measure(llm)
    begun = time.perf_counter()
    results = llm.generate(
        [wording.tokens(job) for job in jobs],
        [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
         for job in jobs],
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    assert not any(result.error for result in results)
    return {
        "output_throughput": sum(job.num_output for job in jobs) / seconds,
        "median_itl_ms": metrics.gap_percentile(50) * 1e3,
    }


def costs(num_workers: int) -> dict[str, Any]:
    """The server alone: tokens of many streams, then requests of a few tokens."""
    with server("simulated", "0", num_workers) as running:
        warm(running)
        streams = measure(running, long_jobs(), STREAMS, seed=0)
        jobs = random_jobs(2000, Span(16, 16), Span(SHORT, SHORT), 0)
        short = measure(running, jobs, 64, seed=1)
    with server("simulated", str(PACE), num_workers) as running:
        warm(running)
        paced = measure(running, long_jobs(), STREAMS, seed=0)
    return {
        "api_workers": num_workers,
        "streams": _streamed(streams),
        "paced": _streamed(paced),
        "short_requests_per_second": short["request_throughput"],
        "short_median_e2el_ms": short["median_e2el_ms"],
        "short_request_cpu_us": short["request_cpu_us"],
    }


def warm(running: Running) -> None:
    measure(running, random_jobs(64, Span(8, 8), Span(4, 4), 0), 64, seed=99)


def long_jobs() -> list[Job]:
    return random_jobs(2 * STREAMS, Span(16, 16), Span(LONG, LONG), 0)


def _streamed(result: dict[str, Any]) -> dict[str, float]:
    return {
        "tokens_per_second": result["output_throughput"],
        "events_per_second": result["events_per_second"],
        "median_itl_ms": result["median_itl_ms"],
        "p99_itl_ms": result["p99_itl_ms"],
        "event_cpu_us": result["event_cpu_us"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("both", "offline", "simulated"), default="both")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--workers", default="0,1,2", help="API processes; 0: with the engine")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--how", default="", help=argparse.SUPPRESS)
    parser.add_argument("--api-workers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        sys.exit(serve(asked.serve, asked.how, asked.api_workers, asked.port))
    result: dict[str, Any] = {"num_cpus": os.cpu_count()}
    if asked.part != "simulated":
        result["overhead"] = overhead(asked.precision, asked.num_requests)
    if asked.part != "offline":
        result["simulated"] = [costs(int(number)) for number in asked.workers.split(",")]
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
