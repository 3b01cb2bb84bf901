"""Overhead of the server: the bundled model offline and served, and a simulated model.

    python bench/server.py --out bench/results/server.json
    python bench/server.py --part simulated --workers 0,2

overhead    The same requests offline and over HTTP, with max_num_seqs concurrent requests. share:
            served / offline output tokens/s. added_ms: from the engine's report of a step's tokens
            until the client has them. A round is offline, served, served, offline, so that a change
            of the machine's speed affects both alike; values are medians of rounds.
simulated   By number of API processes (0: in the engine's process) and duration of a step: 0 ms;
            20 ms, which is 12,800 tokens/s over 256 streams; 8 ms, which is 32,000. An event may
            contain several tokens if the engine is ahead of HTTP. cpu_us_per_token: CPU time of the
            engine's process, of all API processes, and of the load generator on the same machine.
            Then short requests: 16 input and 4 output tokens, 64 concurrent.

The engine, the server and the load generator run in separate processes (bench/server_targets.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt

from bench.server_targets import CONCURRENCY, MODEL, STREAMS, VOCAB, serve_offline
from headway.errors import ConfigError
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.http_client import Address
from headway.lab.loadgen.load import Outcome, find_model, send
from headway.lab.loadgen.requests import LengthRange, RequestFormat, random_requests
from headway.lab.workload.request import WorkloadRequest

TARGETS = Path(__file__).parent / "server_targets.py"
INPUT, OUTPUT = LengthRange(64, 128), LengthRange(32, 96)
WARMUP_SEED = 99  # used by no round
STEP_SECONDS = (0.0, 0.020, 0.008)
START_TIMEOUT = 120.0
CpuTimes = dict[str, float]  # seconds by part
Times = npt.NDArray[np.float64]  # seconds on the system's monotonic clock


class RunningServer(NamedTuple):
    """The address of a server and the id of its first process."""

    address: Address
    pid: int

    def cpu(self) -> CpuTimes:
        """CPU time so far of the engine's process, the API processes, and this process."""
        children = [pid for pid in _children(self.pid) if b"resource_tracker" not in _command(pid)]
        first, *rest = sorted(children) or [self.pid]
        return {
            "engine": _cpu_seconds(first),
            "api": sum(_cpu_seconds(pid) for pid in rest),
            "load_generator": time.process_time(),
        }


def _children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _cpu_seconds(pid: int) -> float:
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(*options: str) -> Iterator[RunningServer]:
    """Run a server in a separate process during the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(TARGETS), *options, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # it logs every request
    address = Address("127.0.0.1", port, "", False)
    try:
        _wait_for(address, process)
        yield RunningServer(address, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(address: Address, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + START_TIMEOUT
    while True:
        try:
            find_model(address)
            return
        except ConfigError:
            if process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit("the server did not start") from None
            time.sleep(0.1)


class Measurement(NamedTuple):
    """The results of one closed loop in which every request completed."""

    report: dict[str, Any]
    outcomes: list[Outcome]
    cpu_us_per_token: CpuTimes

    def figures(self) -> dict[str, Any]:
        names = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms")
        num_events = sum(outcome.num_pieces for outcome in self.outcomes)
        return {
            **{name: self.report[name] for name in names},
            "events_per_second": num_events / self.report["duration"],
            "cpu_us_per_token": self.cpu_us_per_token,
        }


def measure(
    running: RunningServer, jobs: list[WorkloadRequest], concurrency: int, seed: int
) -> Measurement:
    wording = RequestFormat(model=MODEL, vocab_size=VOCAB, seed=seed)
    before = running.cpu()
    done = send(running.address, wording, jobs, concurrency=concurrency, timeout=300)
    after = running.cpu()
    report = serve_report.report(done.outcomes, done.max_concurrency)
    assert not report["failed"], report["errors"]
    num_tokens = report["total_output_tokens"]
    spent = {name: (after[name] - before[name]) * 1e6 / num_tokens for name in after}
    return Measurement(report, done.outcomes, spent)


# The bundled model.


@contextmanager
def offline(quantization: str) -> Iterator[Any]:
    """Run the engine without a server in a separate process; yields a function that runs jobs."""
    context = get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=serve_offline, args=(quantization, theirs), daemon=True)
    process.start()
    assert control.recv() == "ready"

    def run(jobs: list[WorkloadRequest], seed: int) -> dict[str, float]:
        control.send((jobs, seed))
        found: dict[str, float] = control.recv()
        return found

    yield run
    control.send(None)
    process.join()


def overhead(quantization: str, num_requests: int, num_rounds: int) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile() as steps, offline(quantization) as run:
        options = ("real", "--quantization", quantization, "--steps", steps.name)
        with server(*options) as running:
            run(random_requests(8, INPUT, OUTPUT, WARMUP_SEED), WARMUP_SEED)
            measure(running, random_requests(8, INPUT, OUTPUT, WARMUP_SEED), 8, WARMUP_SEED)
            for number in range(num_rounds):
                seeds = (2 * number, 2 * number + 1)
                first, second = (random_requests(num_requests, INPUT, OUTPUT, s) for s in seeds)
                alone = [run(first, seeds[0])]
                served = [measure(running, first, CONCURRENCY, seeds[0])]
                served.append(measure(running, second, CONCURRENCY, seeds[1]))
                alone.append(run(second, seeds[1]))
                rounds.append(compare(alone, served, step_times(steps.name)))
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
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
    return {
        "added_ms": float(np.median(delays)),
        "added_p99_ms": float(np.percentile(delays, 99)),
    }


# The simulated model.


def costs(num_workers: int, num_rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for seconds in STEP_SECONDS:
        options = ("simulated", "--seconds", str(seconds), "--api-server-count", str(num_workers))
        with server(*options) as running:
            measure(
                running,
                random_requests(64, LengthRange(8, 8), LengthRange(4, 4), WARMUP_SEED),
                64,
                WARMUP_SEED,
            )
            long = random_requests(2 * STREAMS, LengthRange(16, 16), LengthRange(256, 256), 0)
            found = [measure(running, long, STREAMS, seed).figures() for seed in range(num_rounds)]
            result[f"step_{seconds * 1e3:g}_ms"] = medians(found)
            if seconds == 0:
                short = random_requests(2000, LengthRange(16, 16), LengthRange(4, 4), 0)
                done = [measure(running, short, 64, 10 + seed) for seed in range(num_rounds)]
                result["short"] = medians([_short(each) for each in done])
    return result


def _short(measurement: Measurement) -> dict[str, Any]:
    report, spent = measurement.report, measurement.cpu_us_per_token
    per_request = report["total_output_tokens"] / report["completed"]
    return {
        "requests_per_second": report["request_throughput"],
        "median_e2el_ms": report["median_e2el_ms"],
        "cpu_us_per_request": {name: each * per_request for name, each in spent.items()},
    }


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each value."""
    return {
        name: medians([each[name] for each in found])
        if isinstance(value, dict)
        else statistics.median(each[name] for each in found)
        for name, value in found[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--part", choices=("both", "overhead", "simulated"), default="both", help="Part to run."
    )
    parser.add_argument("--quantization", default="none", help="Quantization of the bundled model.")
    parser.add_argument(
        "--num-requests", type=int, default=48, help="Requests per half of a round."
    )
    parser.add_argument(
        "--workers", default="0,1,2,4", help="Numbers of API processes, separated by commas."
    )
    parser.add_argument(
        "--rounds", type=int, help="Number of rounds; default: 5 for overhead, 3 for simulated."
    )
    parser.add_argument(
        "--out", type=Path, help="Also write the results to this file, keeping its other parts."
    )
    asked = parser.parse_args()
    command = shlex.join(["python", "bench/server.py", *sys.argv[1:]])
    result: dict[str, Any] = {}
    if asked.part != "simulated":
        result["overhead"] = overhead(asked.quantization, asked.num_requests, asked.rounds or 5)
    if asked.part != "overhead":
        numbers = [int(number) for number in asked.workers.split(",")]
        result["simulated"] = {f"{n}_workers": costs(n, asked.rounds or 3) for n in numbers}
    for name, part in result.items():
        part |= {"command": command, "num_cpus": os.cpu_count()}
        if asked.out is not None:
            save(asked.out, name, part)
    print(json.dumps(result, indent=2))


def save(path: Path, name: str, part: dict[str, Any]) -> None:
    """Write a part to the file; keep its other parts and results for other worker counts."""
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get(name, {}) if name == "simulated" else {}
    path.write_text(json.dumps(before | {name: kept | part}, indent=2) + "\n")


if __name__ == "__main__":
    main()
