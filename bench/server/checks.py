"""Attacks with their own servers and their own criteria.

Each function starts the servers that it needs and returns its measurements; `ok` says whether the
criterion in its docstring holds. With --quick it sends less and waits for less.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Figures
from bench.server.attack_bodies import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    WORDS,
    post,
    random_bodies,
    status,
    user,
)
from bench.server.process import ServerProcess
from headway.errors import FormatError
from headway.lab.loadgen.http_client import Client
from headway.record.reader import read_journal

Check = Callable[[Namespace], Awaitable[Figures]]
NUM_SLOW = 12
NUM_BODIES = 300  # for each path
NUM_CLIENTS = 8  # that send random bodies
MAX_GROWTH_MB = 100  # of the resident memory, because of slow readers
MAX_PAUSE_MS = 200  # of a stream, beyond three of its usual gaps
KEY = "the-key"
MODEL = ["--quantization", "int8", "--num-blocks", "1024"]
SERVE = [sys.executable, "-m", "headway", "serve", *MODEL]
# Short steps, and few blocks, because the first use of a block adds to the resident memory.
SLOW_MODEL = [*MODEL[:2], "--num-blocks", "256", "--max-num-batched-tokens", "64"]
SLOW_SECONDS = 420.0  # after which all slow readers must be disconnected
FILE_LIMIT = 20_000  # bytes of a trace
# Paths that need no key; those below /lab/ are the files of the page.
OPEN = {"/", "/docs", "/health", "/lab", "/lab/", "/lab/index.html", "/ping", "/version"}
HIDDEN = (  # paths that the schema does not list, and variants that a router might accept
    "/", "/docs", "/redoc", "/openapi.json", "/lab", "/lab/", "/lab/index.html", "/lab/api/catalog",
    "/lab/api/live", "/lab//api/live", "/lab/../live", "/lab/%2e%2e/live", "/lab/%61pi/live",
    "/lab/api", "//live", "/live/", "/LIVE", "/metrics/", "/static/x", "/doctor/",
)  # fmt: skip


async def _gaps(client: Client, started: asyncio.Event | None = None, **fields: Any) -> list[float]:
    """Milliseconds between the tokens of a stream; sets `started` at the first token."""
    times: list[float] = []

    def receive(_: bytes) -> None:
        times.append(1000 * time.monotonic())
        if started is not None:
            started.set()

    path, body = post(COMPLETIONS, stream=True, ignore_eos=True, temperature=0, **fields)
    response = await client.post(path, body, receive)
    assert response.status == 200, response
    return [later - earlier for earlier, later in pairwise(times)]


async def slow_readers(asked: Namespace) -> Figures:
    """Streams with log probabilities and large responses, of which a byte is read in 20 s.

    ok: all are disconnected and all their requests and blocks are freed while the clients still
    hold their sockets open, memory grows by at most MAX_GROWTH_MB, and other requests succeed.
    """
    stall = 10 if asked.quick else 60
    times = ["--stall-timeout", str(stall), "--timeout-keep-alive", str(stall)]
    with ServerProcess([*SLOW_MODEL, *times]) as server:
        client, health = Client(server.address), Counter[str]()
        prompts = [f"{number} {WORDS * 40}" for number in range(10)]  # the first use of all blocks
        await status(client, *post(COMPLETIONS, prompt=prompts, max_tokens=1))
        client.close()
        await asyncio.sleep(1)
        files, resident, gaps = server.num_files(), [server.resident_bytes()], list[float]()
        sockets = [await _slow(server, number) for number in range(NUM_SLOW)]

        async def others() -> None:
            while True:
                gaps.extend(await _gaps(client, prompt="Once", max_tokens=20))
                health[await status(client, "/health")] += 1

        tasks = [asyncio.create_task(each) for each in (others(), _read_slowly(sockets, stall / 3))]
        start, most = time.monotonic(), 0
        while most < NUM_SLOW or server.num_files() > files + 2:  # two of the other clients
            most = max(most, server.num_files() - files)
            resident.append(server.resident_bytes())
            await asyncio.sleep(0.2)
            if time.monotonic() > start + SLOW_SECONDS:
                break
        seconds, is_going = round(time.monotonic() - start), not tasks[0].done()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        held = await server.holds_after(15, files)
        for each in sockets:
            each.close()
        growth = max(resident) - resident[0]
        found: Figures = {
            "clients": NUM_SLOW, "stall_timeout_s": stall, "all_disconnected_after_s": seconds,
            "held": held,
            "memory_mb": _megabytes(resident[0], max(resident), server.resident_bytes()),
            "health": dict(health), "gap_ms_max": round(max(gaps, default=0)), "tokens": len(gaps),
            "log_errors": server.log_errors(), "exit_code": server.stop(),
        }  # fmt: skip
    is_well = set(health) == {"200"} and is_going and not found["exit_code"]
    return found | {"ok": is_well and not held and growth <= MAX_GROWTH_MB * 1e6}


def _megabytes(*sizes: float) -> list[int]:
    return [round(size / 1e6) for size in sizes]


async def _slow(server: ServerProcess, number: int) -> socket.socket:
    """A socket with a small buffer that has sent a request with a long response."""
    fields = {"max_tokens": 1500, "stream": True, "ignore_eos": True}
    chat = {"messages": [user(f"{number}: Tell a long story.")], "logprobs": True}
    echoed = {"prompt": f"{number} {WORDS * 40}", "max_tokens": 1, "echo": True}
    kinds = (
        post(CHAT, **chat, **fields, top_logprobs=20),
        post(COMPLETIONS, prompt=f"{number}", **fields, logprobs=100),
        post(COMPLETIONS, **echoed, logprobs=100),
    )
    path, body = kinds[number % len(kinds)]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    opened = socket.socket()
    # Small segments, because the system's buffer at the server has space for ten at least.
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(opened, (server.address.host, server.address.port))
    await loop.sock_sendall(opened, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return opened


async def _read_slowly(sockets: list[socket.socket], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        for each in sockets:
            try:
                each.recv(1)
            except OSError:  # nothing has arrived, or the server has disconnected
                continue


async def many_samples(asked: Namespace) -> Figures:
    """One request with n = 128 beside a stream: the longest gap between the stream's tokens.

    ok: the stream has a token in every step: its longest gap is at most three times the median gap
    beside the samples, which share the steps, plus MAX_PAUSE_MS.
    """
    fields = {"prompt": "Once upon a time", "max_tokens": 60 if asked.quick else 200}
    with ServerProcess(MODEL) as server:
        client, started = Client(server.address), asyncio.Event()
        samples = post(COMPLETIONS, n=128, ignore_eos=True, **fields)
        await asyncio.gather(_gaps(client, **fields), status(client, *samples))  # first use
        alone = await _gaps(client, **fields)
        stream = asyncio.create_task(_gaps(client, started, **fields))
        await started.wait()
        sampled = asyncio.create_task(status(client, *samples))
        beside = await stream
        is_first = not sampled.done()
        found: Figures = {"status": await sampled, "stream_ends_first": is_first}
        client.close()
        found["exit_code"] = server.stop()
    for name, gaps in (("alone", alone), ("beside", beside)):
        found[f"gap_ms_{name}"] = {
            "median": round(statistics.median(gaps)), "max": round(max(gaps))
        }  # fmt: skip
    limit = 3 * found["gap_ms_beside"]["median"] + MAX_PAUSE_MS
    is_even = found["gap_ms_beside"]["max"] <= limit
    return found | {"limit_ms": limit, "ok": is_even and found["status"] == "200"}


async def wrong_bodies(asked: Namespace) -> Figures:
    """Random bodies for /v1/messages and /v1/responses.

    ok: no response is 5xx, every request has one, and /health succeeds afterwards.
    """
    count, found = NUM_BODIES // 5 if asked.quick else NUM_BODIES, Figures()
    options = ["--max-model-len", "512", "--tool-call-parser", "hermes"]
    with ServerProcess([*MODEL, *options]) as server:
        client = Client(server.address)
        for path in (MESSAGES, RESPONSES):
            statuses, bodies = Counter[str](), list(random_bodies(path, count, seed=0))

            async def send(bodies: Iterable[bytes], path: str, statuses: Counter[str]) -> None:
                for body in bodies:
                    statuses[await status(client, path, body)] += 1

            parts = [bodies[number::NUM_CLIENTS] for number in range(NUM_CLIENTS)]
            await asyncio.gather(*(send(part, path, statuses) for part in parts))
            found[path] = dict(statuses)
        found["health"] = await status(client, "/health")
        client.close()
        found["log_errors"], found["exit_code"] = server.log_errors(), server.stop()
    statuses = {each for path in (MESSAGES, RESPONSES) for each in found[path]}
    is_well = all(each.startswith(("2", "4")) for each in statuses)
    return found | {"ok": is_well and found["health"] == "200" and not found["exit_code"]}


async def route_keys(asked: Namespace) -> Figures:
    """Every path without a key, with a wrong key and with the key.

    ok: without the key and with a wrong one, all paths except the documented ones respond with 401
    or, if they do not exist, 404; with the key, no path responds with 401.
    """
    with ServerProcess([*MODEL, "--api-key", KEY]) as server:
        clients = [Client(server.address, key) for key in (None, "wrong", KEY)]
        schema = json.loads((await clients[-1].get("/openapi.json")).body)
        routes = [
            (method.upper(), path.replace("{model}", "smollm2-135m"))
            for path, methods in schema["paths"].items() for method in methods
        ]  # fmt: skip
        routes += [("GET", path) for path in HIDDEN] + [("POST", "/ping"), ("HEAD", "/metrics")]
        table: dict[str, list[int]] = {}
        for method, path in sorted(set(routes)):
            table[f"{method} {path}"] = [
                _ask(server, method, path, key) for key in (None, "wrong", KEY)
            ]
        for client in clients:
            client.close()
        log_errors, exit_code = server.log_errors(), server.stop()
    leaks = [
        route for route, (without, wrong, right) in table.items()
        if (route.split()[1] not in OPEN and not {without, wrong} <= {401, 404}) or right == 401
    ]  # fmt: skip
    opened = sorted(route for route, (without, *_) in table.items() if without not in (401, 404))
    return {
        "routes": table, "open": opened, "leaks": leaks, "log_errors": log_errors,
        "exit_code": exit_code, "ok": not leaks and not exit_code,
    }  # fmt: skip


def _ask(server: ServerProcess, method: str, path: str, key: str | None) -> int:
    """The status of a request whose path is sent as it is; a recording has no end."""
    credential = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{credential}"
    body = "{}" if method == "POST" else ""
    with socket.create_connection((server.address.host, server.address.port), 30) as connection:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        connection.sendall(head.encode())
        return int(connection.makefile("rb").readline().split()[1])


async def same_port(asked: Namespace) -> Figures:
    """A second server on the port of the first, also on all addresses and with several processes.

    ok: each second server exits with an error of one line that names the port, and the first one
    responds all the time.
    """
    found, is_well = Figures(), True
    with ServerProcess(MODEL) as server:
        client, port = Client(server.address), str(server.address.port)
        for options in ([], ["--host", "0.0.0.0"], ["--api-server-count", "2"]):
            command = [*SERVE, "--port", port, *options]
            second = await asyncio.create_subprocess_exec(
                *command, stderr=subprocess.PIPE, cwd=ROOT
            )
            asked = asyncio.create_task(second.communicate())
            statuses = Counter[str]()
            while not asked.done():
                statuses[await status(client, "/health")] += 1
                await asyncio.sleep(0.05)
            said = (await asked)[1].decode().strip()
            found[" ".join(options) or "same options"] = {
                "exit_code": second.returncode, "said": said, "first": dict(statuses)
            }  # fmt: skip
            is_clear = "\n" not in said and port in said
            is_well &= bool(second.returncode) and is_clear and set(statuses) == {"200"}
        client.close()
        found["exit_code"] = server.stop()
    return found | {"ok": is_well and not found["exit_code"]}


async def full_disk(asked: Namespace) -> Figures:
    """A trace that exceeds the size of a file, a log on a full disk, and a trace on one from start.

    ok: all requests and /health succeed, the trace is readable, the log has one line about it, and
    the exit code is 0; a server that cannot begin its trace exits with one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        found = {"trace": await _served(["--trace-out", str(trace)], max_file_bytes=FILE_LIMIT)}
        try:
            num_lines: int | str = sum(1 for _ in read_journal(trace))
        except FormatError as error:
            num_lines = str(error)
        found["trace"] |= {"bytes": trace.stat().st_size, "lines": num_lines}
    found["log"] = await _served(["--log-level", "info"], stderr=Path("/dev/full"))
    command = [*SERVE, "--port", "0", "--trace-out", "/dev/full"]
    started = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    said = started.stderr.strip()
    found["start"] = {"exit_code": started.returncode, "said": said}
    is_well = all(
        set(found[name]["statuses"]) == {"200"} and found[name]["exit_code"] == 0
        for name in ("trace", "log")
    )
    is_well &= isinstance(num_lines, int) and len(found["trace"]["log"]) == 1
    is_clear = "/dev/full" in said and "\n" not in said and started.returncode != 0
    return found | {"ok": is_well and is_clear}


async def _served(options: list[str], **settings: Any) -> Figures:
    """Statuses of some requests to a server, its log, and its exit code."""
    statuses = Counter[str]()
    with ServerProcess([*MODEL, *options], **settings) as server:
        client = Client(server.address)
        for number in range(6):
            body = post(COMPLETIONS, prompt=f"{number}", max_tokens=40, ignore_eos=True)
            statuses[await status(client, *body)] += 1
            statuses[await status(client, "/health")] += 1
        client.close()
        return {"statuses": dict(statuses), "exit_code": server.stop(), "log": server.log_errors()}


EVERY: tuple[Check, ...] = (
    slow_readers, many_samples, wrong_bodies, route_keys, same_port, full_disk,
)  # fmt: skip
