"""An HTTP/1.1 client for load tests: many open streams, a few microseconds per event.

Connections are kept alive and reused. Bytes of a response are passed on as they arrive. Does not
support redirects, proxies and compression, which it does not request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from headway.errors import ConfigError

CONNECT_SECONDS = 10.0
Receive = Callable[[bytes], None]  # called with pieces of the body of a successful response


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response."""


class ConnectionLost(Exception):
    """The connection ended before the response did."""


class ResponseReader:
    """Parses one response; `feed` takes bytes and returns the part of the body in them."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_done = False
        self.stays_open = True  # the connection can be reused
        self._ends_by_itself = False  # not with the connection
        self._body: list[bytes] = []
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise BadResponse(f"not an HTTP/1.1 response: {error}") from None
        body = b"".join(self._body)
        self._body.clear()
        return body

    def end(self) -> None:
        """Note the end of the connection; ConnectionLost if the response is incomplete."""
        if self.status is None or self._ends_by_itself:
            raise ConnectionLost("the connection ended before the response did")
        self.is_done = True

    # Called by the parser.

    def on_header(self, name: bytes, _: bytes) -> None:
        self._ends_by_itself |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # after 100 Continue and the like, the final response follows
            self.status, self.stays_open = status, self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_done = self.status is not None


class EventReader:
    """Parses server-sent events; `feed` returns the data of every completed event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        events: list[bytes] = []
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class HttpResponse(NamedTuple):
    """A complete response; the body is empty if it was passed to a `Receive` callback."""

    status: int
    body: bytes


class ClientConnection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.is_used = False  # it has carried a request
        self.is_lost = False
        self.reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._receive: Receive | None = None
        self._response: asyncio.Future[HttpResponse] | None = None
        self._body = bytearray()

    @property
    def is_free(self) -> bool:
        return not self.is_lost and self._response is None

    async def send(self, request: bytes, receive: Receive | None) -> HttpResponse:
        """Send a request and return the response; with `receive`, pass on the body of a 200."""
        assert self._transport is not None and self._response is None, "one request at a time"
        self.reader, self._receive, self._body = ResponseReader(), receive, bytearray()
        response: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._response = response
        self._transport.write(request)
        try:
            return await response
        except asyncio.CancelledError:
            self.close()  # the rest of this response would be read as the next one
            raise
        finally:
            self._response, self.is_used = None, True

    def close(self) -> None:
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._response is None or self._response.done():
            self.close()  # data without a request
            return
        try:
            body = self.reader.feed(data)
            if self._receive is None or self.reader.status != 200:
                self._body += body
            elif body:
                self._receive(body)
        except Exception as error:  # invalid bytes, or an error of the receiver
            self._response.set_exception(error)
            self.close()
            return
        if self.reader.is_done:
            self._finish()

    def _finish(self) -> None:
        assert self._response is not None and self.reader.status is not None
        if not self.reader.stays_open:
            self.close()
        self._response.set_result(HttpResponse(self.reader.status, bytes(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._response is None or self._response.done():
            return
        try:
            self.reader.end()
        except ConnectionLost as lost:
            self._response.set_exception(lost)
        else:
            self._finish()


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    path: str  # in front of /v1; usually empty
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse http://host:port or https://...; a path in front of /v1 is kept. ConfigError if invalid."""
        problem = ConfigError(f"the URL must look like http://127.0.0.1:8000, not {url!r}")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise problem from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise problem
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), path, is_secure)


class Client:
    """Sends requests to one server. Connections are opened on demand and reused."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        lines = [f"Host: {address.host}:{address.port}", "Accept: */*"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        self._fields = "\r\n".join(lines)
        self._idle: list[ClientConnection] = []

    async def get(self, path: str) -> HttpResponse:
        return await self._exchange("GET", path, b"", None)

    async def post(self, path: str, body: bytes, receive: Receive | None = None) -> HttpResponse:
        """Send JSON. Raises ConnectionLost, BadResponse, OSError or TimeoutError without a response."""
        return await self._exchange("POST", path, body, receive)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _exchange(
        self, verb: str, path: str, body: bytes, receive: Receive | None
    ) -> HttpResponse:
        head = (
            f"{verb} {self.address.path}{path} HTTP/1.1\r\n{self._fields}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        while True:
            connection = await self._take()
            is_used = connection.is_used
            try:
                return await connection.send(request, receive)
            except ConnectionLost:
                if not is_used or connection.reader.status is not None:
                    raise  # otherwise the server closed an idle connection: retry with another one
            finally:
                if connection.is_free:
                    self._idle.append(connection)

    async def _take(self) -> ClientConnection:
        """A connection that is free, or a new one."""
        while self._idle:
            if (idle := self._idle.pop()).is_free:
                return idle
        secure = ssl.create_default_context() if self.address.is_secure else None
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                ClientConnection, self.address.host, self.address.port, ssl=secure
            )
        return connection
