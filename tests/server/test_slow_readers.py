"""A client that stops reading a stream is disconnected, whatever the stream is."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import StreamingResponse

from headway.engine.async_engine import AsyncEngine
from tests.support.frozen import FrozenServer
from tests.support.scripted import served
from tests.support.waiting import wait_until

STALL = 8.0  # seconds


class EndlessApp:
    """Responds with a stream that has no end and that does not watch its client."""

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def parts() -> Any:
            while True:
                yield b"a" * 100_000
                await asyncio.sleep(0)  # a disconnect cancels the stream here

        if scope["type"] == "http":
            await StreamingResponse(parts())(scope, receive, send)


def test_a_client_that_stops_reading_an_endless_stream_is_disconnected() -> None:
    with FrozenServer(served(), EndlessApp, stall_timeout=STALL) as here:
        client, server = here.connect()
        with client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(10).startswith(b"HTTP/1.1 ")
            wait_until(server.transport.get_write_buffer_size)

            def is_closed() -> bool:
                here.advance(STALL)  # the system may still move bytes into the client's buffer
                return server not in here.connections

            wait_until(is_closed)
