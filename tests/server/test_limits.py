"""Limits on the number and duration of connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import httpx
import pytest

from headway.engine.async_engine import AsyncEngine
from headway.server.http.connection import HttpConnection
from headway.server.http.connection_table import MAX_DEFAULT, default_max_connections
from tests.server.test_connection import answer, connected
from tests.support.frozen import FrozenServer
from tests.support.lettered import letters_app
from tests.support.processes import Server
from tests.support.scripted import served
from tests.support.waiting import LIMIT, wait_until
from tests.support.wire.server import SLOWLY, parrot_served, saying

HEAD, IDLE, STALL = 2.0, 4.0, 8.0  # seconds
SWEEP = HEAD / 4  # seconds from one look at the deadlines to the next
FACTORY = "tests.support.wire.server:wire_factory"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def here() -> Iterator[FrozenServer]:
    """A server with timeouts, whose time the test advances."""
    times = {"head_timeout": HEAD, "keep_alive_timeout": IDLE, "stall_timeout": STALL}
    with FrozenServer(parrot_served(), letters_app, **times) as server:
        yield server


def read(said: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body of one response."""
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(body)


def test_a_slow_head_is_a_408(here: FrozenServer) -> None:
    with ExitStack() as stack:
        pairs = [here.connect() for _ in range(3)]
        clients = [stack.enter_context(client) for client, _ in pairs]
        heads = (b"G", b"GET / HTTP/1.1\r\nHost: a\r\n", GET + b"\r\n" + GET)
        for (client, server), sent in zip(pairs, heads, strict=True):
            client.sendall(sent)
            wait_until(lambda server=server: server._part == "head" and not server._open)  # type: ignore[misc]
        here.advance(HEAD)
        answers = [answer(client) for client in clients]
    for said in answers:
        start = said.rindex(b"HTTP/1.1 ")
        status, headers, body = read(said[start:])
        assert status == 408 and headers["connection"] == "close"
        assert body["error"]["code"] == "timeout" and f"{HEAD:g}" in body["error"]["message"]


def test_a_head_sent_byte_by_byte_has_the_same_timeout(here: FrozenServer) -> None:
    client, server = here.connect()
    with client:
        for num_sent in range(1, 11):
            assert not server._is_ended, f"after {0.1 * HEAD * (num_sent - 1):g} s"
            client.sendall(b"GET /aaaaaaaaa"[num_sent - 1 : num_sent])
            wait_until(lambda num_sent=num_sent: server._part and num_read(server) == num_sent)  # type: ignore[misc]
            here.advance(HEAD / 10)
        here.advance(SWEEP)
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


def num_read(server: HttpConnection) -> int:
    """Bytes of an incomplete head that the server has received."""
    return server._num_held + 1  # the first one begins the message


def test_a_silent_connection_is_closed_without_a_response(here: FrozenServer) -> None:
    (silent, _), (almost, server) = here.connect(), here.connect()
    with silent, almost:
        almost.sendall(b"\r\n")
        wait_until(lambda: server._num_held)
        here.advance(HEAD)
        assert answer(silent) == answer(almost) == b""


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(here: FrozenServer) -> None:
    client, server = here.connect()
    with client:
        client.sendall(GET + b"\r\n")
        wait_until(lambda: server.timeout_keep_alive_task)  # the response is complete
        here.advance(0.9 * IDLE)
        assert server in here.connections
        here.advance(0.2 * IDLE)
        assert answer(client).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server not in here.connections)


def test_an_unread_body_does_not_keep_a_connection_open(here: FrozenServer) -> None:
    client, server = here.connect()
    with client:
        client.sendall(GET + b"Content-Length: 1000\r\n\r\nabc")
        wait_until(lambda: server._part == "body" and not server._open)
        here.advance(0.9 * HEAD)
        assert server in here.connections
        here.advance(0.1 * HEAD + SWEEP)
        assert answer(client).startswith(b"HTTP/1.1 200")


def test_a_stream_may_take_longer_than_all_timeouts(here: FrozenServer) -> None:
    client, _ = here.connect()
    with client:
        client.sendall(completion(SLOWLY + saying("x" * 100)))
        said = client.recv(65536)
        assert said.startswith(b"HTTP/1.1 200")
        here.advance(10 * (HEAD + IDLE + STALL))
        while not said.endswith(b"0\r\n\r\n"):
            said += client.recv(65536)
        assert said.count(b'"text":"x"') > 10 and b"data: [DONE]\n\n" in said


def completion(prompt: str) -> bytes:
    """A request for a stream."""
    body = json.dumps({"prompt": prompt, "max_tokens": 2000, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def test_connections_above_a_limit_get_a_503() -> None:
    limits = {"max_connections": 8, "max_connections_per_address": 5}
    with Server(factory=FACTORY, **limits) as here:
        with ExitStack() as stack:
            running = [stack.enter_context(connected(here)) for _ in range(5)]
            for each in running:
                each.sendall(completion(10 * SLOWLY + saying("x" * 1900)))  # 190 s
            assert all(each.recv(10) for each in running)
            with connected(here) as refused:
                refused.sendall(GET + b"\r\n")
                status, headers, body = read(answer(refused))
            assert status == 503 and headers["connection"] == "close" and headers["retry-after"]
            assert body["error"]["code"] == "too_many_connections"
            assert "5" in body["error"]["message"]
        wait_until(lambda: httpx.get(f"{here.url}version", timeout=LIMIT).status_code == 200)


class BigApp:
    """Responds with one part that is larger than all buffers of the system."""

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a" * (32 << 20)})


def test_a_client_that_does_not_read_its_last_response_is_disconnected() -> None:
    with FrozenServer(served(), BigApp, stall_timeout=STALL) as here:
        client, server = here.connect()
        with client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(10).startswith(b"HTTP/1.1 ")
            wait_until(server.transport.is_closing)
            here.advance(STALL / 2)  # it notices how much is unsent
            assert server in here.connections
            # The system may take some more bytes meanwhile.
            wait_until(lambda: here.advance(2 * STALL) or server not in here.connections)
            with suppress(ConnectionResetError):
                assert len(answer(client)) < 32 << 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_running_out_of_descriptors_is_survived_with_few_log_lines(num_workers: int) -> None:
    max_descriptors, num_processes = 160, num_workers or 1
    options = {"num_workers": num_workers, "max_descriptors": max_descriptors}
    options["is_forked"] = not num_workers  # forked workers would not inherit the limit
    with Server(max_connections=10_000, **options) as here:
        lines: list[str] = []
        threading.Thread(
            target=lambda: lines.extend(here.process.stderr or ()), daemon=True
        ).start()
        begun = time.monotonic()
        with ExitStack() as stack:
            for _ in range(num_processes * max_descriptors * 11 // 10):
                stack.enter_context(closing(connected(here)))
            # A process tries again after a second: wait until one has.
            wait_until(lambda: num_failures(lines) > num_processes)
        wait_until(here.is_serving)
        most = num_processes * (20 + time.monotonic() - begun)  # a line in a second
        assert num_failures(lines) < most and sum(map(len, lines)) < 1000 * most
        assert not any("Traceback" in line for line in lines)


def num_failures(lines: list[str]) -> int:
    return sum("cannot accept" in line for line in lines)


def test_the_default_limit_leaves_a_margin_of_descriptors() -> None:
    assert default_max_connections(1024) == 896
    assert default_max_connections(256) == 160
    assert default_max_connections(-1) == default_max_connections(1 << 20) == MAX_DEFAULT
    assert default_max_connections(10) == 1


def test_the_default_limit_is_reached_before_descriptors_run_out() -> None:
    with Server(max_descriptors=160) as here:
        with ExitStack() as stack:
            waiting = [stack.enter_context(closing(connected(here))) for _ in range(176)]
            refused = [read(answer(each))[0] for each in waiting[100:105]]
            assert refused == [503] * 5
        wait_until(here.is_serving)
        here.process.kill()
        assert "cannot accept" not in (here.process.stderr.read() if here.process.stderr else "")
