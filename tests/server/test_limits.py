"""Limits on the number and duration of connections."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.engine.async_engine import AsyncEngine
from headway.server.http.connection_table import MAX_DEFAULT, default_max_connections
from headway.server.process.serve import ServerFactory
from headway.server.settings import ConnectionSettings
from tests.server.test_connection import answer, connected
from tests.support.processes import Server
from tests.support.scripted import served
from tests.support.wire.server import SLOWLY, saying

SHORT = 0.4  # seconds
FACTORY = "tests.support.wire.server:wire_factory"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def here() -> Iterator[Server]:
    """A server with short timeouts and few connections."""
    limits = {"max_connections": 8, "max_connections_per_address": 5}
    times = {"head_timeout": SHORT, "keep_alive_timeout": 2 * SHORT, "stall_timeout": SHORT}
    with Server(factory=FACTORY, **times, **limits) as server:
        yield server


def read(said: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body of one response."""
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(body)


def test_a_slow_head_is_a_408(here: Server) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(here)) for _ in range(3)]
        heads = (b"G", b"GET / HTTP/1.1\r\nHost: a\r\n", GET + b"\r\n" + GET)
        for connection, sent in zip(connections, heads, strict=True):
            connection.sendall(sent)
        answers = [answer(connection) for connection in connections]
    for said in answers:
        start = said.rindex(b"HTTP/1.1 ")
        status, headers, body = read(said[start:])
        assert status == 408 and headers["connection"] == "close"
        assert body["error"]["code"] == "timeout" and f"{SHORT:g}" in body["error"]["message"]


def test_a_head_sent_byte_by_byte_has_the_same_timeout(here: Server) -> None:
    begun = time.monotonic()
    with connected(here) as connection:
        connection.settimeout(0.05)
        said = b""
        connection.sendall(b"GET /")
        while not said and time.monotonic() - begun < 10:
            connection.sendall(b"a")
            try:
                said = connection.recv(65536)
            except TimeoutError:
                continue
        assert said.startswith(b"HTTP/1.1 408")


def test_a_silent_connection_is_closed_without_a_response(here: Server) -> None:
    with connected(here) as silent, connected(here) as almost:
        almost.sendall(b"\r\n")
        assert answer(silent) == answer(almost) == b""


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(here: Server) -> None:
    with connected(here) as connection:
        begun = time.monotonic()
        connection.sendall(GET + b"\r\n")
        said = b""
        while piece := connection.recv(65536):
            said += piece
        assert said.startswith(b"HTTP/1.1 200")
        assert time.monotonic() - begun > 1.5 * SHORT


def test_an_unread_body_does_not_keep_a_connection_open(here: Server) -> None:
    with connected(here) as connection:
        connection.sendall(GET + b"Content-Length: 1000\r\n\r\nabc")
        said = connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 200")
        while connection.recv(65536):
            pass


def test_a_stream_may_take_longer_than_all_timeouts(here: Server) -> None:
    asked = {"prompt": SLOWLY + saying("x" * 100), "max_tokens": 200, "stream": True}  # 1 s
    response = httpx.post(f"{here.url}v1/completions", json=asked, timeout=20)
    assert response.text.count('"text":"x"') > 10 and response.text.endswith("data: [DONE]\n\n")


def test_connections_above_a_limit_get_a_503(here: Server) -> None:
    until_free(here)
    with ExitStack() as stack:
        body = json.dumps(
            {"prompt": SLOWLY + saying("x" * 1000), "max_tokens": 1000, "stream": True}
        )
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        for _ in range(5):
            running = stack.enter_context(connected(here))
            running.sendall(asked)
            assert running.recv(10)
        with connected(here) as refused:
            refused.sendall(GET + b"\r\n")
            status, headers, body = read(answer(refused))
        assert status == 503 and headers["connection"] == "close" and headers["retry-after"]
        assert body["error"]["code"] == "too_many_connections" and "5" in body["error"]["message"]
    until_free(here)


def until_free(here: Server) -> None:
    """Wait until a request succeeds, because earlier connections have been closed."""
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at:
        try:
            if httpx.get(f"{here.url}version").status_code == 200:
                return
        except httpx.HTTPError:
            continue
    pytest.fail("the server has not recovered")


class BigApp:
    """Responds with one part that is larger than all buffers of the system."""

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * (32 << 20)})


def big_factory(options: dict[str, Any]) -> ServerFactory:
    connections = ConnectionSettings(**options["connections"])
    return ServerFactory(make_engine=served, make_app=BigApp, connections=connections)


def test_a_client_that_does_not_read_its_last_response_is_disconnected() -> None:
    factory = "tests.server.test_limits:big_factory"
    with Server(factory=factory, stall_timeout=SHORT) as here, connected(here) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert connection.recv(10).startswith(b"HTTP/1.1 ") and num_sockets(here) == 2
        ends_at = time.monotonic() + 10
        while num_sockets(here) > 1:  # the listening socket
            assert time.monotonic() < ends_at, "the connection is still open"
            time.sleep(0.02)


def num_sockets(here: Server) -> int:
    """Number of TCP sockets of a server's process."""
    pid = here.process.pid
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()]
    numbers = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[9] in numbers for line in lines)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_running_out_of_descriptors_is_survived_with_few_log_lines(num_workers: int) -> None:
    max_descriptors = 160
    options = {"num_workers": num_workers, "max_descriptors": max_descriptors, "head_timeout": 1.0}
    options["is_forked"] = not num_workers  # forked workers would not inherit the limit
    with Server(max_connections=10_000, **options) as here, ExitStack() as stack:
        lines: list[str] = []
        threading.Thread(
            target=lambda: lines.extend(here.process.stderr or ()), daemon=True
        ).start()
        num_connections = (num_workers or 1) * max_descriptors * 11 // 10
        for _ in range(num_connections):
            stack.enter_context(closing(connected(here)))
        time.sleep(1.2)  # longer than the delay after a failed accept
        ends_at = time.monotonic() + 15
        while not here.is_serving():
            assert time.monotonic() < ends_at, "the server has not recovered"
        assert 0 < sum("cannot accept" in line for line in lines) < 20 * (num_workers or 1)
        assert sum(map(len, lines)) < 20_000 and not any("Traceback" in line for line in lines)


def test_the_default_limit_leaves_a_margin_of_descriptors() -> None:
    assert default_max_connections(1024) == 896
    assert default_max_connections(256) == 160
    assert default_max_connections(-1) == default_max_connections(1 << 20) == MAX_DEFAULT
    assert default_max_connections(10) == 1


def test_the_default_limit_is_reached_before_descriptors_run_out() -> None:
    with Server(max_descriptors=160, head_timeout=1.0) as here, ExitStack() as stack:
        waiting = [stack.enter_context(closing(connected(here))) for _ in range(176)]
        refused = [read(answer(each))[0] for each in waiting[100:105]]
        assert refused == [503] * 5
        ends_at = time.monotonic() + 15
        while not here.is_serving():
            assert time.monotonic() < ends_at, "the server has not recovered"
        here.process.kill()
        assert "cannot accept" not in (here.process.stderr.read() if here.process.stderr else "")
