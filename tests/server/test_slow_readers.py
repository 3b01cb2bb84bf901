"""A client that stops reading a stream is disconnected, whatever the stream is."""

from __future__ import annotations

from typing import Any

from starlette.responses import StreamingResponse

from headway.engine.async_engine import AsyncEngine
from headway.server.process.serve import ServerFactory
from headway.server.settings import ConnectionSettings
from tests.server.test_connection import connected
from tests.server.test_limits import num_sockets
from tests.support.processes import Server
from tests.support.scripted import served
from tests.support.waiting import wait_until


class EndlessApp:
    """Responds with a stream that has no end and that does not watch its client."""

    def __init__(self, engine: AsyncEngine, model_info: Any) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def parts() -> Any:
            while True:
                yield b"a" * 100_000

        if scope["type"] == "http":
            await StreamingResponse(parts())(scope, receive, send)


def endless_factory(options: dict[str, Any]) -> ServerFactory:
    connections = ConnectionSettings(**options["connections"])
    return ServerFactory(make_engine=served, make_app=EndlessApp, connections=connections)


def test_a_client_that_stops_reading_an_endless_stream_is_disconnected() -> None:
    factory = f"{__name__}:{endless_factory.__name__}"
    with Server(factory=factory, stall_timeout=0.2) as here, connected(here) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(10).startswith(b"HTTP/1.1 ")
        wait_until(lambda: num_sockets(here) == 1)  # the listening socket
