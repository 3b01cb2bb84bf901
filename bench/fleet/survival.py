"""Streams through faults of a fleet: each must end as the same request did without a fault.

    python -m bench.fleet.survival --only kills pair all    prints one JSON object

24 clients keep sending requests of 18 kinds (greedy, seeded, schema, regex, tools, log probabilities,
n = 2, stop strings and more, over completions, chat, responses and messages) until a part has had
all its faults and at least --streams requests have ended.

kills     one of two replicas is killed, 12 times
pair      two of four replicas are killed at once, 3 times
all       all three replicas are killed at once, 3 times
stops     four of six replicas are stopped with SIGSTOP for 5 s, 3 times
gcs       Ray's GCS is killed and kept away for --outage seconds
gateway   one of two gateways is killed, 6 times; its clients connect again with Last-Event-ID
node      a node of a Ray cluster with two nodes is removed
update    `headway deploy` with another max_model_len, twice

failed: requests that ended with an error, or without an end. different: another text, finish reason,
tool call or log probability than without faults. The part is `ok` if both are 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from bench.fleet.streams import (
    MODEL,
    SCHEMA,
    FleetServer,
    command,
    descendants,
    fleet_server,
    stopped,
)
from bench.harness import ROOT, Bench, Figures, log

bench = Bench(__doc__)
bench.option("--streams", type=int, default=100, help="requests of a part, at least")
bench.option("--max-tokens", type=int, default=24)
bench.option("--outage", type=float, default=300.0, help="seconds without Ray's GCS")
NUM_CLIENTS, TIMEOUT, PAUSE = 24, 300.0, 3.0
FLAGS = ("--tool-call-parser", "hermes")
MAX_ATTEMPTS = 20  # connections of one request
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "required": ["town"], "additionalProperties": False,
    "properties": {"town": {"type": "string", "maxLength": 12}}}}}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
KINDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"temperature": 0}),
    (COMPLETIONS, {"temperature": 0.9, "seed": 7, "top_p": 0.9}),
    (COMPLETIONS, {"temperature": 0, "response_format": FORMAT}),
    (COMPLETIONS, {"temperature": 1, "seed": 1, "structured_outputs": {"regex": "[a-z]{4}( [a-z]{2,6}){3}"}}),
    (COMPLETIONS, {"temperature": 0.8, "seed": 3, "n": 2}),
    (COMPLETIONS, {"temperature": 0, "logprobs": 3}),
    (COMPLETIONS, {"temperature": 0.7, "seed": 5, "stop": [" the", "\n\n"], "frequency_penalty": 0.4}),
    (COMPLETIONS, {"temperature": 0.6, "seed": 6, "presence_penalty": 0.5, "min_tokens": 8}),
    (COMPLETIONS, {"temperature": 0, "return_token_ids": True, "ignore_eos": True}),
    (CHAT, {"temperature": 0}),
    (CHAT, {"temperature": 1.1, "seed": 11, "top_k": 40, "min_p": 0.05}),
    (CHAT, {"temperature": 0, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"temperature": 0.5, "seed": 2, "response_format": FORMAT}),
    (CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"temperature": 0.9, "seed": 4, "n": 2, "stop": ["."]}),
    ("/v1/responses", {"temperature": 0}),
    ("/v1/messages", {"temperature": 0}),
    ("/v1/messages", {"temperature": 0, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One request."""

    path: str
    body: dict[str, Any]


def jobs(max_tokens: int) -> list[Job]:
    """Two requests of each kind."""
    return [_job(path, more, number, max_tokens) for number in (0, 1) for path, more in KINDS]


def _job(path: str, more: dict[str, Any], number: int, max_tokens: int) -> Job:
    text = f"Story {number}: once upon a time in a town of {number + 2} houses,"
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == COMPLETIONS:
        prompt = {"prompt": text}
    elif path == "/v1/responses":
        prompt = {"input": text}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return Job(path, {"model": MODEL, "stream": True, limit: max_tokens, **prompt, **more})


@dataclass
class Answer:
    """What a client has received, joined: by choice or block and kind of part."""

    parts: dict[str, Any] = field(default_factory=dict)
    event_id: str = ""  # of the latest event
    is_complete: bool = False
    error: str = ""

    def add(self, event: dict[str, Any]) -> None:
        if event.get("error") or event.get("type") == "error":
            self.error = json.dumps(event)
        for choice in event.get("choices", ()):
            self._choice(choice, f"{choice['index']}")
        match event:
            case {"type": "response.output_text.delta", "delta": text}:
                self._join("text", text)
            case {"type": "response.completed" | "response.incomplete" as kind}:
                self._end("", kind)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                self._join(f"{index}", delta.get("text") or delta.get("partial_json") or "")
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                self._end("", reason)

    def _choice(self, choice: dict[str, Any], name: str) -> None:
        delta = choice.get("delta", choice)
        self._join(f"{name} text", delta.get("text") or delta.get("content") or "")
        for call in delta.get("tool_calls", ()):
            made = call.get("function", {})
            self._join(f"{name} call", (made.get("name") or "") + (made.get("arguments") or ""))
        scores = choice.get("logprobs") or {}
        found = scores.get("token_logprobs") or [e["logprob"] for e in scores.get("content") or ()]
        self._join(f"{name} logprobs", found)
        self._join(f"{name} ids", choice.get("token_ids") or [])
        if choice.get("finish_reason"):
            self._end(name, choice["finish_reason"])

    def _join(self, name: str, gained: Any) -> None:
        if gained:
            self.parts[name] = self.parts.get(name, type(gained)()) + gained

    def _end(self, name: str, reason: str) -> None:
        self.parts[f"{name} end"] = reason


async def ask(client: httpx.AsyncClient, job: Job, *, can_resume: bool = False) -> Answer:
    """Send a request and read its events; a lost connection is made again and continued."""
    answer, problem = Answer(), ""
    for _ in range(MAX_ATTEMPTS if can_resume else 1):
        headers = {"Accept": "text/event-stream"}
        if answer.event_id:
            headers["Last-Event-ID"] = answer.event_id
        try:
            await _read(client, job, headers, answer)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if answer.is_complete or answer.error:
            return answer
        await asyncio.sleep(0.2)
    answer.error = f"the stream ended early: {problem}"
    return answer


async def _read(
    client: httpx.AsyncClient, job: Job, headers: dict[str, str], answer: Answer
) -> None:
    async with client.stream("POST", job.path, json=job.body, headers=headers) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code} {(await response.aread()).decode()}"
            return
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                answer.event_id = value
            elif name == "data" and value == "[DONE]":
                answer.is_complete = True
            elif name == "data":
                answer.add(event := json.loads(value))
                kind = str(event.get("type"))
                if kind == "message_stop" or kind in ("response.completed", "response.incomplete"):
                    answer.is_complete = True


async def alone(url: str, all_jobs: list[Job]) -> list[Answer]:
    """The answer to each request without a fault."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        answers = list(await asyncio.gather(*(ask(client, job) for job in all_jobs)))
    for job, answer in zip(all_jobs, answers, strict=True):
        assert answer.is_complete and not answer.error, f"{job}: {answer.error}"
    return answers


Expected = tuple[list[Job], list[Answer]]


class Load:
    """Clients that send requests on a thread until they are stopped."""

    def __init__(self, url: str, expected: Expected, *, can_resume: bool = False) -> None:
        self._url, self._jobs, self._expected = url, *expected
        self._can_resume = can_resume
        self._numbers = cycle(range(len(self._jobs)))
        self.is_stopping = False
        self.num_ended = 0
        self.failed: list[str] = []
        self.different: list[str] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_stopping = True
        self._thread.join()

    def wait_for(self, number: int) -> None:
        """Wait until this many requests have ended."""
        while self.num_ended < number and self._thread.is_alive():
            time.sleep(0.1)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(NUM_CLIENTS)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self.is_stopping:
            number = next(self._numbers)
            job = self._jobs[number]
            answer = await ask(client, job, can_resume=self._can_resume)
            self.num_ended += 1
            if answer.error:
                self.failed.append(f"{job.path}: {answer.error}")
            elif answer.parts != self._expected[number].parts:
                wanted = self._expected[number].parts
                self.different.append(f"{job.path}: {answer.parts} instead of {wanted}")

    def figures(self) -> Figures:
        return {
            "streams": self.num_ended, "failed": len(self.failed), "different": len(self.different),
            "first_failed": self.failed[:3], "first_different": self.different[:3],
            "ok": not (self.failed or self.different),
        }  # fmt: skip


Fault = Callable[[FleetServer], object]


def under(
    asked: Namespace, num_replicas: int, fault: Fault, times: int, *flags: str, resume: bool = False
) -> Figures:
    """Streams through a server with these flags while a fault happens several times."""
    flags = ("--replicas", str(num_replicas), *FLAGS, *flags)
    with fleet_server(*flags) as server:

        def once() -> None:
            server.wait_for_replicas(num_replicas)
            fault(server)

        return faults(asked, server.url, once, times, resume=resume)


def faults(
    asked: Namespace, url: str, fault: Callable[[], object], times: int, *, resume: bool = False
) -> Figures:
    """Streams to a URL while a fault happens several times."""
    all_jobs = jobs(asked.max_tokens)
    expected = all_jobs, asyncio.run(alone(url, all_jobs))
    with Load(url, expected, can_resume=resume) as load:
        for number in range(times):
            load.wait_for(load.num_ended + 6)  # between the faults some requests end
            log(f"fault {number + 1} of {times} after {load.num_ended} streams")
            fault()
            time.sleep(PAUSE)
        load.wait_for(asked.streams)
    return {**load.figures(), "faults": times}


def killed(number: int) -> Fault:
    def kill(server: FleetServer) -> None:
        for pid in server.replica_pids()[:number]:
            os.kill(pid, signal.SIGKILL)

    return kill


@bench.part
def kills(asked: Namespace) -> Figures:
    return under(asked, 2, killed(1), 12)


@bench.part
def pair(asked: Namespace) -> Figures:
    return under(asked, 4, killed(2), 3)


@bench.part
def all(asked: Namespace) -> Figures:  # the name of the part
    return under(asked, 3, killed(3), 3)


@bench.part
def stops(asked: Namespace) -> Figures:
    def stop(server: FleetServer) -> None:
        with stopped(server.replica_pids()[:4]):
            time.sleep(5.0)

    return under(asked, 6, stop, 3)


@bench.part
def gcs(asked: Namespace) -> Figures:
    def outage(server: FleetServer) -> None:
        ends_at = time.monotonic() + asked.outage
        while time.monotonic() < ends_at:
            for pid in pids_of(server, "gcs_server"):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    return under(asked, 2, outage, 1)


def pids_of(server: FleetServer, program: str) -> list[int]:
    """The processes of a server that run a program."""
    started = descendants(server.process.pid)
    return [pid for pid in started if Path(command(pid).partition(" ")[0]).name == program]


@bench.part
def gateway(asked: Namespace) -> Figures:
    killed_pids: list[int] = []

    def kill(server: FleetServer) -> None:
        first = next(pid for pid in workers(server) if pid not in killed_pids)
        killed_pids.append(first)
        os.kill(first, signal.SIGKILL)

    return under(asked, 2, kill, 6, "--api-server-count", "2", resume=True)


def workers(server: FleetServer) -> list[int]:
    """The gateway processes: they listen on the server's port."""
    port = f":{httpx.URL(server.url).port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {line.split()[9] for line in lines if line.split()[1].endswith(port)}
    return [pid for pid in descendants(server.process.pid) if inodes & set(_inodes(pid))]


def _inodes(pid: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            yield os.readlink(entry).removeprefix("socket:[").removesuffix("]")
    except OSError:  # it has ended, or a file was closed
        return


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray with a head, which has no room for replicas, and nodes that have."""
    os.environ.update(RAY_worker_niceness="0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield cluster, [cluster.add_node(num_cpus=4) for _ in range(num_nodes)]
    finally:
        cluster.shutdown()


@bench.part
def node(asked: Namespace) -> Figures:
    with ray_cluster(2) as (cluster, nodes):

        def remove(_: FleetServer) -> None:
            cluster.remove_node(nodes.pop(), allow_graceful=False)

        return under(asked, 2, remove, 1, "--ray-address", cluster.address)


@bench.part
def update(asked: Namespace) -> Figures:
    lengths = iter((2048, 1536, 1024))
    with ray_cluster(1) as (cluster, _), socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()

        def deploy() -> None:
            flags = ("--replicas", "2", *FLAGS, "--max-model-len", str(next(lengths)))
            at = ("--ray-address", cluster.address, "--port", port, "--name", "survival")
            subprocess.run(
                [sys.executable, "-m", "headway", "deploy", MODEL, *flags, *at],
                check=True,
                cwd=ROOT,
            )

        deploy()
        return faults(asked, f"http://127.0.0.1:{port}", deploy, 2)


if __name__ == "__main__":
    bench.main()
