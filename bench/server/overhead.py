"""Overhead of the server: the bundled model offline and served, and a simulated model.

    python -m bench.server.overhead --out bench/results/server.json
    python -m bench.server.overhead --only simulated --workers 0,2

overhead    The same requests offline and over HTTP, with max_num_seqs concurrent requests. share:
            served / offline output tokens/s. added_ms: from the engine's report of a step's tokens
            until the client has them. A round is offline, served, served, offline, so that a change
            of the machine's speed affects both alike; values are medians of rounds.
simulated   By number of API processes (0: in the engine's process) and duration of a step: 0 ms;
            20 ms, which is 12,800 tokens/s over 256 streams; 8 ms, which is 32,000. An event may
            contain several tokens if the engine is ahead of HTTP. cpu_us_per_token: CPU time of the
            engine's process, of all API processes, and of the load generator on the same machine.
            Then short requests: 16 input and 4 output tokens, 64 concurrent.

The engine, the server and the load generator run in separate processes (bench/server/targets.py).
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness import Bench, Figures, log, medians
from bench.server.process import ServerProcess, cpu_seconds
from bench.server.targets import CONCURRENCY, MODEL, STREAMS, VOCAB, run_offline
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.load import Outcome, send
from headway.lab.loadgen.requests import LengthRange, RequestFormat, random_requests
from headway.lab.workload.request import WorkloadRequest

INPUT, OUTPUT = LengthRange(64, 128), LengthRange(32, 96)
WARMUP_SEED = 99  # used by no round
bench = Bench(__doc__)
bench.option("--quantization", default="none", help="of the bundled model")
bench.option("--num-requests", type=int, default=48, help="requests per half of a round")
bench.option("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2, 4],
             help="numbers of API processes, separated by commas")  # fmt: skip
bench.option("--rounds", type=int, help="default: 5 for overhead, 3 for simulated")
SPAWN = get_context("spawn")
STEP_SECONDS = (0.0, 0.020, 0.008)
CpuTimes = dict[str, float]  # seconds by part
Times = npt.NDArray[np.float64]  # seconds on the system's monotonic clock


def cpu_times(server: ServerProcess) -> CpuTimes:
    """CPU time so far of the engine's process, the API processes, and this process."""
    numbers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    commands = {int(n): Path(f"/proc/{n}/cmdline").read_bytes() for n in numbers}
    children = sorted(n for n, command in commands.items() if b"resource_tracker" not in command)
    first, *rest = children or [server.pid]
    return {
        "engine": cpu_seconds(first),
        "api": sum(map(cpu_seconds, rest)),
        "load_generator": time.process_time(),
    }


@contextmanager
def target(*options: str) -> Iterator[ServerProcess]:
    """Run a server of bench/server/targets.py, which logs every request, during the block."""
    program, log_file = "bench.server.targets", Path(os.devnull)
    with ServerProcess(list(options), program=program, stderr=log_file) as server:
        yield server
        server.stop()


class Measurement(NamedTuple):
    """The results of one closed loop in which every request completed."""

    report: Figures
    outcomes: list[Outcome]
    cpu_us_per_token: CpuTimes

    def figures(self) -> Figures:
        names = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms")
        num_events = sum(outcome.num_pieces for outcome in self.outcomes)
        return {
            **{name: self.report[name] for name in names},
            "events_per_second": num_events / self.report["duration"],
            "cpu_us_per_token": self.cpu_us_per_token,
        }


def measure(
    running: ServerProcess, jobs: list[WorkloadRequest], concurrency: int, seed: int
) -> Measurement:
    wording = RequestFormat(model=MODEL, vocab_size=VOCAB, seed=seed)
    before = cpu_times(running)
    done = send(running.address, wording, jobs, concurrency=concurrency, timeout=300)
    after = cpu_times(running)
    report = serve_report.report(done.outcomes, done.max_concurrency)
    assert not report.failed, report.errors
    num_tokens = report.total_output_tokens
    spent = {name: (after[name] - before[name]) * 1e6 / num_tokens for name in after}
    return Measurement(report.as_json(), done.outcomes, spent)


@bench.part
def overhead(asked: Namespace) -> Figures:
    quantization, num_requests = asked.quantization, asked.num_requests
    rounds: list[Figures] = []
    # The engine without a server, in a process of its own that stays loaded.
    with tempfile.NamedTemporaryFile() as steps, ProcessPoolExecutor(1, SPAWN) as offline:
        options = ("real", "--quantization", quantization, "--steps", steps.name)

        def run(jobs: list[WorkloadRequest], seed: int) -> dict[str, float]:
            return offline.submit(run_offline, quantization, jobs, seed).result()

        with target(*options) as running:
            run(random_requests(8, INPUT, OUTPUT, WARMUP_SEED), WARMUP_SEED)
            measure(running, random_requests(8, INPUT, OUTPUT, WARMUP_SEED), 8, WARMUP_SEED)
            for number in range(asked.rounds or 5):
                seeds = (2 * number, 2 * number + 1)
                first, second = (random_requests(num_requests, INPUT, OUTPUT, s) for s in seeds)
                alone = [run(first, seeds[0])]
                served = [measure(running, first, CONCURRENCY, seeds[0])]
                served.append(measure(running, second, CONCURRENCY, seeds[1]))
                alone.append(run(second, seeds[1]))
                rounds.append(compare(alone, served, step_times(steps.name)))
                log(json.dumps(rounds[-1]))
    return {
        "quantization": quantization, "requests_per_round": 2 * num_requests, "concurrency": CONCURRENCY,
        **medians(rounds), "rounds": rounds,
    }  # fmt: skip


def compare(
    alone: list[dict[str, float]], served: list[Measurement], steps: Times
) -> dict[str, float]:
    """The results of one round: the same requests offline and served."""
    num_tokens = sum(each.report["total_output_tokens"] for each in served)
    offline_seconds = sum(each["seconds"] for each in alone)
    served_seconds = sum(each.report["duration"] for each in served)
    return {
        "offline_tokens_per_second": num_tokens / offline_seconds,
        "served_tokens_per_second": num_tokens / served_seconds,
        "share": offline_seconds / served_seconds,
        "offline_itl_ms": statistics.mean(each["median_itl_ms"] for each in alone),
        "served_itl_ms": statistics.mean(each.report["median_itl_ms"] for each in served),
        **added([outcome for each in served for outcome in each.outcomes], steps),
    }


def step_times(path: str) -> Times:
    """When the engine reported each step so far."""
    times = np.fromfile(path)
    return times[times > 0]


def added(outcomes: list[Outcome], steps: Times) -> dict[str, float]:
    """Delay between the report of a step and the arrival of its tokens; far below a step."""
    arrivals = np.concatenate([o.first + np.cumsum([0.0, *o.gaps]) for o in outcomes])
    delays = (arrivals - steps[np.searchsorted(steps, arrivals) - 1]) * 1e3
    return {"added_ms": float(np.median(delays)), "added_p99_ms": float(np.percentile(delays, 99))}


def costs(num_workers: int, num_rounds: int) -> Figures:
    result: Figures = {}
    for seconds in STEP_SECONDS:
        options = ("simulated", "--seconds", str(seconds), "--api-server-count", str(num_workers))
        with target(*options) as running:
            warmup = random_requests(64, LengthRange(8, 8), LengthRange(4, 4), WARMUP_SEED)
            measure(running, warmup, 64, WARMUP_SEED)
            long = random_requests(2 * STREAMS, LengthRange(16, 16), LengthRange(256, 256), 0)
            found = [measure(running, long, STREAMS, seed).figures() for seed in range(num_rounds)]
            result[f"step_{seconds * 1e3:g}_ms"] = medians(found)
            if seconds == 0:
                short = random_requests(2000, LengthRange(16, 16), LengthRange(4, 4), 0)
                done = [measure(running, short, 64, 10 + seed) for seed in range(num_rounds)]
                result["short"] = medians([_short(each) for each in done])
    return result


def _short(measurement: Measurement) -> Figures:
    report, spent = measurement.report, measurement.cpu_us_per_token
    per_request = report["total_output_tokens"] / report["completed"]
    return {
        "requests_per_second": report["request_throughput"],
        "median_e2el_ms": report["median_e2el_ms"],
        "cpu_us_per_request": {name: each * per_request for name, each in spent.items()},
    }


@bench.part
def simulated(asked: Namespace) -> Figures:
    return {f"{n}_workers": costs(n, asked.rounds or 3) for n in asked.workers}


if __name__ == "__main__":
    bench.main()
