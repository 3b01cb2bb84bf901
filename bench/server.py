"""What the server costs: the bundled model offline and served, and a model that costs nothing.

    python bench/server.py --out bench/results/server.json
    python bench/server.py --part simulated --workers 0,2

overhead    The same requests by the engine alone and through HTTP, as many at once as it has seats.
            share: served / offline output tokens/s. added_ms: from when the engine has told of a
            step's tokens until the client has them. A round is offline, served, served, offline, so
            that a machine that gets slower or faster favours nobody; figures are medians of rounds.
simulated   By API processes (0: in the engine's process), by how long the model takes for a step:
            0 ms; 20 ms, which is 12,800 tokens/s over 256 streams; 8 ms, which is 32,000. An event
            may hold several tokens where the engine is ahead of HTTP. cpu_us_per_token: processor
            time of the engine's process, of all API processes, and of the load generator, which
            runs on the same machine. Then requests of 16 tokens in and 4 out, 64 at once.

Engine, server and load generator are processes of their own (bench/server_halves.py).
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

from bench.server_halves import MODEL, SEATS, STREAMS, VOCAB, answer_offline
from headway.errors import ConfigError
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.http_client import Address
from headway.lab.loadgen.load import Outcome, find_model, send
from headway.lab.loadgen.requests import LengthRange, RequestFormat, random_requests
from headway.lab.workload.request import WorkloadRequest

HALVES = Path(__file__).parent / "server_halves.py"
INPUT, OUTPUT = LengthRange(64, 128), LengthRange(32, 96)
WARM = 99  # a seed no round has
PACES = (0.0, 0.020, 0.008)  # seconds of a step
STARTS_WITHIN = 120.0
Cpu = dict[str, float]  # seconds by part
Moments = npt.NDArray[np.float64]  # seconds on the system's monotonic clock


class Running(NamedTuple):
    """A server, and its first process."""

    address: Address
    pid: int

    def cpu(self) -> Cpu:
        """Processor time so far of the engine's process, the others', and this one's."""
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
def server(*options: str) -> Iterator[Running]:
    """A server in a process of its own, while the block runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HALVES), *options, "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # a line for every request
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


class Measured(NamedTuple):
    """One closed loop, of which every request completed."""

    report: dict[str, Any]
    outcomes: list[Outcome]
    cpu_us_per_token: Cpu

    def figures(self) -> dict[str, Any]:
        names = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms")
        num_events = sum(outcome.num_pieces for outcome in self.outcomes)
        return {
            **{name: self.report[name] for name in names},
            "events_per_second": num_events / self.report["duration"],
            "cpu_us_per_token": self.cpu_us_per_token,
        }


def measure(running: Running, jobs: list[WorkloadRequest], concurrency: int, seed: int) -> Measured:
    wording = RequestFormat(model=MODEL, vocab_size=VOCAB, seed=seed)
    before = running.cpu()
    done = send(running.address, wording, jobs, concurrency=concurrency, timeout=300)
    after = running.cpu()
    report = serve_report.report(done.outcomes, done.max_concurrency)
    assert not report["failed"], report["errors"]
    num_tokens = report["total_output_tokens"]
    spent = {name: (after[name] - before[name]) * 1e6 / num_tokens for name in after}
    return Measured(report, done.outcomes, spent)


# The bundled model.


@contextmanager
def offline(quantization: str) -> Iterator[Any]:
    """The engine alone in a process of its own; what it is sent, it runs."""
    context = get_context("spawn")
    control, theirs = context.Pipe()
    process = context.Process(target=answer_offline, args=(quantization, theirs), daemon=True)
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
            run(random_requests(8, INPUT, OUTPUT, WARM), WARM)
            measure(running, random_requests(8, INPUT, OUTPUT, WARM), 8, WARM)
            for number in range(num_rounds):
                seeds = (2 * number, 2 * number + 1)
                first, second = (random_requests(num_requests, INPUT, OUTPUT, s) for s in seeds)
                alone = [run(first, seeds[0])]
                served = [measure(running, first, SEATS, seeds[0])]
                served.append(measure(running, second, SEATS, seeds[1]))
                alone.append(run(second, seeds[1]))
                rounds.append(compared(alone, served, told(steps.name)))
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    return {
        "quantization": quantization, "requests_per_round": 2 * num_requests, "concurrency": SEATS,
        **medians(rounds), "rounds": rounds,
    }  # fmt: skip


def compared(
    alone: list[dict[str, float]], served: list[Measured], steps: Moments
) -> dict[str, float]:
    """One round: the same requests both ways."""
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


def told(path: str) -> Moments:
    """When the engine told of each step so far."""
    moments = np.fromfile(path)
    return moments[moments > 0]


def added(outcomes: list[Outcome], steps: Moments) -> dict[str, float]:
    """How long after the end of a step its tokens came; a step is far longer than that."""
    came = np.concatenate([o.first + np.cumsum([0.0, *o.gaps]) for o in outcomes])
    delays = (came - steps[np.searchsorted(steps, came) - 1]) * 1e3
    return {
        "added_ms": float(np.median(delays)),
        "added_p99_ms": float(np.percentile(delays, 99)),
    }


# A model that costs nothing.


def costs(num_workers: int, num_rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for pace in PACES:
        options = ("simulated", "--seconds", str(pace), "--api-workers", str(num_workers))
        with server(*options) as running:
            measure(
                running, random_requests(64, LengthRange(8, 8), LengthRange(4, 4), WARM), 64, WARM
            )
            long = random_requests(2 * STREAMS, LengthRange(16, 16), LengthRange(256, 256), 0)
            found = [measure(running, long, STREAMS, seed).figures() for seed in range(num_rounds)]
            result[f"step_{pace * 1e3:g}_ms"] = medians(found)
            if pace == 0:
                short = random_requests(2000, LengthRange(16, 16), LengthRange(4, 4), 0)
                done = [measure(running, short, 64, 10 + seed) for seed in range(num_rounds)]
                result["short"] = medians([_short(each) for each in done])
    return result


def _short(measured: Measured) -> dict[str, float]:
    report, spent = measured.report, measured.cpu_us_per_token
    per_request = report["total_output_tokens"] / report["completed"]
    return {
        "requests_per_second": report["request_throughput"],
        "median_e2el_ms": report["median_e2el_ms"],
        "cpu_us_per_request": {name: each * per_request for name, each in spent.items()},
    }


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure."""
    return {
        name: medians([each[name] for each in found])
        if isinstance(value, dict)
        else statistics.median(each[name] for each in found)
        for name, value in found[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("both", "overhead", "simulated"), default="both")
    parser.add_argument("--quantization", default="none", help="of the bundled model")
    parser.add_argument("--num-requests", type=int, default=48, help="twice in a round")
    parser.add_argument("--workers", default="0,1,2,4", help="API processes, in turn")
    parser.add_argument("--rounds", type=int, help="default: 5 of the bundled model, else 3")
    parser.add_argument("--out", type=Path, help="also write it here, beside the other part")
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
    """Beside what the file has of the other part, and of other numbers of workers."""
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get(name, {}) if name == "simulated" else {}
    path.write_text(json.dumps(before | {name: kept | part}, indent=2) + "\n")


if __name__ == "__main__":
    main()
