"""What a page that follows a server costs the server: the bundled model on the CPU.

    python bench/lab_live.py [--rounds N]    prints one JSON object

tokens_per_second   of the server with 8 concurrent requests, without and with a reader of its film
cost                median over the rounds of 1 - with / without; a round is without, with, with,
                    without, so that a change of the machine's speed affects both alike
cpu_us_per_token    CPU time of the server's process, in the same windows
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NUM_CLIENTS, MAX_TOKENS, SECONDS, SETTLE = 8, 256, 4.0, 0.5
START_TIMEOUT = 120.0
COUNTER = re.compile(r"^headway:generation_tokens_total\S* ([\d.e+]+)$", re.MULTILINE)


class Window(NamedTuple):
    tokens_per_second: float
    cpu_us_per_token: float


class Served:
    """A running server, and what is read from it."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        assert response.status == 200, data[:300]
        return data

    def now(self) -> tuple[float, float, float]:
        """The time, generated tokens, and CPU seconds of the process."""
        found = COUNTER.search(self.ask("GET", "/metrics").decode())
        assert found, "the server has no counter of generated tokens"
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), float(found[1]), cpu

    def window(self) -> Window:
        """The speed of the server over a few seconds."""
        time.sleep(SETTLE)
        start, tokens, cpu = self.now()
        time.sleep(SECONDS)
        end, more_tokens, more_cpu = self.now()
        num_tokens = more_tokens - tokens
        return Window(num_tokens / (end - start), (more_cpu - cpu) / num_tokens * 1e6)

    @contextmanager
    def follower(self) -> Iterator[None]:
        """A reader of the live film, as `headway lab --attach` is one."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/lab/api/live")
        response = connection.getresponse()
        assert response.status == 200, response.status
        is_done = threading.Event()

        def read() -> None:
            while not is_done.is_set() and response.read1(1 << 16):
                pass

        thread = threading.Thread(target=read)
        thread.start()
        yield
        is_done.set()
        thread.join()
        connection.close()


@contextmanager
def served() -> Iterator[Served]:
    """`headway serve` with the bundled model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "headway", "serve", "--port", str(port)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--no-engine-process"], cwd=ROOT, **quiet)
    try:
        server, ends_at = Served(port, process.pid), time.monotonic() + START_TIMEOUT
        while True:
            try:
                server.ask("GET", "/health")
                break
            except (OSError, AssertionError):
                assert process.poll() is None and time.monotonic() < ends_at, "no server"
                time.sleep(0.2)
        yield server
    finally:
        process.kill()
        process.wait()


@contextmanager
def loaded(server: Served) -> Iterator[None]:
    """Clients that send one request after the other."""
    is_done = threading.Event()

    def send(number: int) -> None:
        while not is_done.is_set():
            body = {
                "model": "smollm2-135m", "prompt": f"Client {number} counts: one, two,",
                "max_tokens": MAX_TOKENS, "ignore_eos": True,
            }  # fmt: skip
            server.ask("POST", "/v1/completions", body)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    yield
    is_done.set()
    for thread in threads:
        thread.join()


def measure(num_rounds: int) -> dict[str, Any]:
    without, following, costs = list[Window](), list[Window](), list[float]()
    with served() as server, loaded(server):
        server.window()  # warm up
        for _ in range(num_rounds):
            first = server.window()
            with server.follower():
                both = [server.window(), server.window()]
            last = server.window()
            without += [first, last]
            following += both
            speeds = [
                sum(each.tokens_per_second for each in pair) for pair in (both, [first, last])
            ]
            costs.append(1 - speeds[0] / speeds[1])
    return {
        "tokens_per_second": _medians(without, following, "tokens_per_second"),
        "cost": round(statistics.median(costs), 4),
        "costs": [round(each, 4) for each in costs],
        "cpu_us_per_token": _medians(without, following, "cpu_us_per_token"),
    }


def _medians(without: list[Window], following: list[Window], name: str) -> dict[str, float]:
    both = {"without": without, "following": following}
    return {
        key: round(statistics.median(getattr(each, name) for each in windows), 1)
        for key, windows in both.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    print(json.dumps(measure(parser.parse_args().rounds), indent=2))


if __name__ == "__main__":
    main()
