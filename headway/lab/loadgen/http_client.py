"""An HTTP/1.1 client for load: many open streams, a few microseconds for each event.

Connections are kept open and used again. What of a response arrives is handed on at once. Knows
nothing of models. Redirects and proxies are left out.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from headway.errors import ConfigError
from headway.lab.loadgen.http_stream import ConnectionLost, ResponseReader

CONNECT_SECONDS = 10.0
Receive = Callable[[bytes], None]  # a piece of a successful response's body


class Reply(NamedTuple):
    """A whole response; the body of a successful one has gone to whoever received it."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One connection: a request at a time, its response as it comes."""

    def __init__(self) -> None:
        self.is_used = False  # it has carried a request before
        self.is_lost = False
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._receive: Receive | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._body: list[bytes] = []

    @property
    def is_free(self) -> bool:
        return not self.is_lost and self._reply is None

    async def send(self, request: bytes, receive: Receive | None) -> Reply:
        """The response; of a successful one, the body goes to `receive` where there is one."""
        assert self._transport is not None and self._reply is None, "connected, and free"
        self._reader, self._receive, self._body = ResponseReader(), receive, []
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._reply = reply
        self._transport.write(request)
        try:
            return await reply
        except asyncio.CancelledError:
            self.close()  # what is still to come would be taken for the next response
            raise
        finally:
            self._reply, self.is_used = None, True

    def close(self) -> None:
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_begun(self) -> bool:
        """Something of the response has come."""
        return self._reader.status is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            self.close()  # nobody asked
            return
        reader = self._reader
        try:
            body = reader.feed(data)
            if self._receive is not None and reader.status == 200:
                if body:
                    self._receive(body)
            elif body:
                self._body.append(body)
        except Exception as error:  # of the bytes, or of who reads them
            self._reply.set_exception(error)
            self.close()
            return
        if reader.is_done:
            self._finish()

    def _finish(self) -> None:
        assert self._reply is not None and self._reader.status is not None
        if not self._reader.stays_open:
            self.close()
        self._reply.set_result(Reply(self._reader.status, b"".join(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._reply is None or self._reply.done():
            return
        try:
            self._reader.end()
        except ConnectionLost as lost:
            self._reply.set_exception(lost)
        else:
            self._finish()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, as a URL says it."""

    host: str
    port: int
    path: str  # before /v1; mostly empty
    is_secure: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """http://host:port or https://; a path in front of /v1 is kept. ConfigError if it is none."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ConfigError(f"url must be such as http://127.0.0.1:8000, not {url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be such as http://127.0.0.1:8000, not {url!r}")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_secure else 80), path, is_secure)


class Client:
    """Requests to one server. Connections are opened as needed and used again."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        lines = [f"Host: {address.host}:{address.port}", "Accept: */*"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        self._fields = "\r\n".join(lines)
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Reply:
        return await self._exchange(self._request("GET", path, b""), None)

    async def post(self, path: str, body: bytes, receive: Receive | None = None) -> Reply:
        """Send JSON; ConnectionLost, BadResponse, OSError or TimeoutError if no response comes."""
        return await self._exchange(self._request("POST", path, body), receive)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _request(self, verb: str, path: str, body: bytes) -> bytes:
        head = (
            f"{verb} {self.address.path}{path} HTTP/1.1\r\n{self._fields}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    async def _exchange(self, request: bytes, receive: Receive | None) -> Reply:
        while True:
            connection = self._take() or await self._connect()
            is_used = connection.is_used
            try:
                return await connection.send(request, receive)
            except ConnectionLost:
                if not is_used or connection.has_begun:
                    raise  # else the server closed it for idleness as the request was sent
            finally:
                if connection.is_free:
                    self._idle.append(connection)

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_free:
                return connection
        return None

    async def _connect(self) -> Connection:
        secure = ssl.create_default_context() if self.address.is_secure else None
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self.address.host, self.address.port, ssl=secure
            )
        return connection
