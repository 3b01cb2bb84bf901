"""Connections: limits on the request head, and bounded buffering for slow readers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from select import select
from typing import Any

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.server.http.connection import MAX_HEAD_BYTES, chunk_writer_of
from tests.server.test_faults import Listening, listening
from tests.support.processes import Server
from tests.support.scripted import make_engine
from tests.support.waiting import LIMIT, on_loop, until

PIECE = b"a" * 16384
FAR = 64  # parts; one megabyte in total
CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n"
ASKED = b'{"id": "a", "prompt": [1, 2, 3], "num_output": 2}'


@pytest.fixture(scope="module")
def here() -> Iterator[Server]:
    with Server() as server:
        yield server


def connected(here: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", here.port), timeout=LIMIT)


def answer(connection: socket.socket) -> bytes:
    """All data until the server closes the connection."""
    said = b""
    while piece := connection.recv(65536):
        said += piece
    return said


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nHost: here\r\nLong: ",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\nTrailer: ",
    ],
    ids=["line", "header", "trailer"],
)
def test_an_endless_head_is_refused_with_the_limit(here: Server, begin: bytes) -> None:
    num_allowed = MAX_HEAD_BYTES // len(PIECE) - 1
    with connected(here) as connection:
        connection.sendall(begin + PIECE * num_allowed)
        assert here.is_serving()
        assert not select([connection], [], [], 0)[0], "it is not refused yet"
        connection.sendall(PIECE * FAR)
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 400") and str(MAX_HEAD_BYTES).encode() in said
    assert here.is_serving()


def test_many_short_headers_count_like_a_long_one(here: Server) -> None:
    with connected(here) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n")
        for number in range(FAR):
            connection.sendall(b"X-%d: %s\r\n" % (number, PIECE))
        assert answer(connection).startswith(b"HTTP/1.1 400")


def test_a_body_may_consist_of_tiny_chunks(here: Server) -> None:
    body = ASKED + b" " * (MAX_HEAD_BYTES // 2)  # each byte has five bytes of framing
    with connected(here) as connection:
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n")
        connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 200") and b'"end": "stop"' in said


def test_a_request_may_start_in_the_packet_that_ends_a_long_body(here: Server) -> None:
    body = ASKED + b" " * (3 * MAX_HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n" % len(body)
    with connected(here) as connection:
        connection.sendall(head + b"\r\n" + body + b"GET / HTTP/1.1\r\nHost:")
        said = b""
        while b'"end": "stop"' not in said:
            said += connection.recv(65536)
        connection.sendall(b" here\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in answer(connection)


class Flood:
    """Writes to the chunk writer while it is open, and the rest through ASGI."""

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None:
        self.num_written, self.has_written = 0, False
        self.was_open: list[bool] = []  # before the start, at the start, after the end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = chunk_writer_of(scope)
        if writer is None:  # lifespan messages
            return
        self.was_open.append(writer.is_open)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.was_open.append(writer.is_open)
        while writer.is_open and self.num_written < 4 * FAR:
            writer.write(b"")  # an empty chunk would end the response
            writer.write(PIECE)
            self.num_written += 1
            await asyncio.sleep(0)
        self.has_written = True
        await send({"type": "http.response.body", "body": b"rest", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.was_open.append(writer.is_open)


async def flooded(server: Listening, app: Flood) -> socket.socket:
    """A connection whose client does not read, once all buffers are full."""
    port = server.client.base_url.port
    with socket.socket() as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", port))
        small.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        await until(lambda: app.has_written)
        return small.dup()


@on_loop
async def test_a_chunk_writer_closes_before_much_is_buffered() -> None:
    apps: list[Flood] = []

    def make(engine: AsyncEngine, model_info: Any) -> Flood:
        apps.append(Flood(engine, model_info))
        return apps[0]

    async with listening(make_engine(), make, {}) as server:
        with await flooded(server, apps[0]) as small:
            transports = [c.transport for c in server.http.server_state.connections]
            assert max(each.get_write_buffer_size() for each in transports) < 200_000
            assert apps[0].num_written < 4 * FAR
            said = await asyncio.to_thread(answer, small)
        assert apps[0].was_open == [False, True, False]
        assert said.count(PIECE) == apps[0].num_written and said.endswith(b"4\r\nrest\r\n0\r\n\r\n")
        assert said.count(b"\r\n0\r\n") == 1


@on_loop
async def test_a_chunk_writer_closes_when_the_client_disconnects() -> None:
    async with listening(make_engine(), Leaver, {}) as server:
        async with server.client.stream("GET", "/"):
            assert not Leaver.has_closed.is_set()
        await Leaver.has_closed.wait()


class Leaver:
    """Responds only after its client has disconnected."""

    has_closed: asyncio.Event

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None:
        Leaver.has_closed = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = chunk_writer_of(scope)
        if writer is None:
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while writer.is_open:
            await asyncio.sleep(0.01)
        self.has_closed.set()
