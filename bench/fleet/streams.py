"""Streams that use every sampling feature, and a server with replicas to send them to.

bench/fleet/replicas.py and the tests of replicas on Ray use them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from bench.harness import ROOT

MODEL = "smollm2-135m"
SERVE = ("-m", "headway", "serve")
SCHEMA = {
    "type": "object", "required": ["name", "age"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
}  # fmt: skip
FEATURES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
    {"temperature": 0.8, "seed": 3, "n": 2},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.7, "seed": 5, "stop": [" the", "\n\n"], "frequency_penalty": 0.4},
]  # fmt: skip


def bodies(number: int, max_tokens: int) -> list[dict[str, Any]]:
    """Bodies of completion requests, all different, with each feature in turn."""
    return [
        {
            "model": MODEL, "prompt": f"Story {i}: once upon a time in a town of {i + 2} houses,",
            "max_tokens": max_tokens, "stream": True, **FEATURES[i % len(FEATURES)],
        }
        for i in range(number)
    ]  # fmt: skip


@dataclass
class Stream:
    """What a client received: `choices` by number, and when the events came (perf_counter)."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    id: str = ""

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def gaps_after(self, moment: float) -> list[tuple[float, float]]:
        """The times of an event and of the next one, for all that end after a moment."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [(before, after) for before, after in pairs if after > moment]

    def add(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.times.append(now)
        self.id = event["id"]
        for choice in event["choices"]:
            found = self.choices.setdefault(
                choice["index"], {"text": "", "finish": None, "logprobs": []}
            )
            found["text"] += choice["text"]
            found["finish"] = choice["finish_reason"] or found["finish"]
            if choice.get("logprobs"):
                found["logprobs"] += choice["logprobs"]["token_logprobs"]


OnEvent = Callable[[], None]


async def stream(
    client: httpx.AsyncClient, body: dict[str, Any], on_event: OnEvent = lambda: None
) -> Stream:
    """Send a request and read its events to the end."""
    found = Stream()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                found.error = f"{response.status_code} {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found.add(json.loads(line[6:]), time.perf_counter())
                    on_event()
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__}: {error}"
    return found


async def all_streams(
    url: str, bodies: Sequence[dict[str, Any]], on_event: OnEvent = lambda: None
) -> list[Stream]:
    """Send all requests at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, verify=False) as client:
        return list(await asyncio.gather(*(stream(client, body, on_event) for body in bodies)))


def streams_during(
    url: str, bodies: Sequence[dict[str, Any]], work: Callable[[], object], after: int = 1
) -> list[Stream]:
    """Send all requests at once, do `work` on a thread from this event on, and wait for both.

    Raises what `work` raises, at once. It is not done if there are fewer events.
    """
    counts, started = count(1), list[Future[object]]()

    async def run(pool: Executor) -> list[Stream]:
        loop = asyncio.get_running_loop()

        def on_event() -> None:
            if next(counts) == after:
                started.append(pool.submit(work))
                started[0].add_done_callback(end)

        def end(done: Future[object]) -> None:
            if done.exception() is not None:  # the streams may wait for what has failed
                with suppress(RuntimeError):  # they have ended
                    loop.call_soon_threadsafe(sending.cancel)

        sending = asyncio.create_task(all_streams(url, bodies, on_event))
        return await sending

    with ThreadPoolExecutor(1) as pool:
        try:
            return asyncio.run(run(pool))
        finally:
            for each in started:
                each.result()


async def one_by_one(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """Send each request alone."""
    async with httpx.AsyncClient(base_url=url, timeout=600, verify=False) as client:
        return [await stream(client, body) for body in bodies]


@dataclass
class FleetServer:
    """`headway serve` in another process."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]  # of its log
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=600, verify=False)

    def replica_pids(self) -> list[int]:
        """The processes of the replicas, oldest first."""
        return self.ray_pids("ServeReplica")

    def ray_pids(self, name: str) -> list[int]:
        """The processes of Ray actors of this class, oldest first."""
        started = descendants(self.process.pid)
        return sorted(pid for pid in started if command(pid).startswith(f"ray::{name}"))

    def num_replicas(self) -> int:
        """Replicas that the gateway can use."""
        return int(self.metric("headway_fleet:replicas"))

    def metric(self, name: str) -> float:
        """The value of a metric without labels; 0 if there is none."""
        while not (response := self.client.get("/metrics")).is_success:
            time.sleep(0.1)  # it has not answered in time
        text = response.text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def wait_for_replicas(self, *allowed: int, seconds: float = 300.0) -> float:
        """Wait until the gateway has one of these numbers of replicas; returns the seconds."""
        start = time.perf_counter()
        while (found := self.num_replicas()) not in allowed:
            if time.perf_counter() - start > seconds:
                raise TimeoutError(f"{found} replicas, not {allowed}, after {seconds} s")
            time.sleep(0.1)
        return time.perf_counter() - start


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def served(model: str) -> tuple[str, ...]:
    """The program that serves a model under the name MODEL."""
    return (*SERVE, model, "--served-model-name", MODEL, "--port", "0", "--grace", "0")


@contextmanager
def fleet_server(
    *flags: str,
    program: Sequence[str] = served(MODEL),
    environment: Mapping[str, str] | None = None,
) -> Iterator[FleetServer]:
    """A server with these flags on a free port; stopped by a signal at the end."""
    process = subprocess.Popen(
        [sys.executable, *program, *flags], stderr=subprocess.PIPE, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,  # Ray reports dead workers there
        cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )  # fmt: skip
    lines: list[str] = []
    reading: threading.Thread | None = None
    assert process.stderr is not None, "a pipe was asked for"
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r" at (http://[^;]+);", line):
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(lines))
        reading = threading.Thread(target=lines.extend, args=(process.stderr,))
        reading.start()
        server = FleetServer(process, found[1], lines)
        with server.client:
            yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reading is not None:
            reading.join()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()


def descendants(pid: int) -> list[int]:
    """All processes that this one started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            parent = int(status.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, open = [], [pid]
    while open:
        found += (new := children.get(open.pop(), []))
        open += new
    return found


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
