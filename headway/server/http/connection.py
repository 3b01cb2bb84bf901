"""HTTP/1 connections: uvicorn's httptools protocol with limits, timeouts and direct chunk writes.

httptools is written in C: a streamed token costs 10% less than with h11, a short request 20% less.
It limits neither the size of a request head nor the time for it; this module does both. Direct
chunk writes bypass ASGI; docs/decisions/0013-direct-chunk-writes.md gives reasons and safeguards.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from http import HTTPStatus
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headway.server.http.connection_table import ConnectionTable
from headway.server.http.errors import ApiError
from headway.server.http.json_output import to_json

EXTENSION, WRITER = "headway", "chunk_writer"  # keys in a scope's extensions
MAX_HEAD_BYTES = 64 << 10
# httptools drops the body of a request with an Upgrade header, which this server ignores and which
# Java's client sends to offer HTTP/2. The replacement has the same length, so lengths still match.
UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
LINGER = 2.0  # seconds for which a refused client may continue to send


class ChunkWriter:
    """Writes response chunks directly to the transport while no ASGI message is being sent."""

    __slots__ = ("_response",)

    def __init__(self, response: RequestResponseCycle) -> None:
        self._response = response

    @property
    def is_open(self) -> bool:
        """True while the response is chunked and incomplete and the client reads it."""
        response = self._response
        return response.chunked_encoding is True and not (
            response.flow.write_paused
            or response.disconnected
            or response.response_complete
            or response.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """Write one chunk; call only while `is_open`. An empty chunk would end the response."""
        if body:
            self._response.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def chunk_writer_of(scope: Scope) -> ChunkWriter | None:
    """The chunk writer of a request's connection; None if another ASGI server runs the app."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(EXTENSION, {}).get(WRITER)
    return writer


class UnchunkedResponse(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunks: closing the connection ends the body."""

    _has_length = True  # the response has a Content-Length

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_length = b"content-length" in names
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:  # uvicorn checks the body's length; accept any
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class HttpConnection(HttpToolsProtocol):
    """One client's connection.

    Some requests are refused before the app sees them: a head that is too long, too slow or not
    HTTP, or too many connections. The error is sent after the responses that are still open, and
    the connection is closed.
    """

    def __init__(self, *arguments: Any, table: ConnectionTable, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = table.settings.keep_alive_timeout  # type: ignore[assignment]
        self._table = table
        self._open: deque[RequestResponseCycle] = deque()  # incomplete responses; the first runs
        self._part = ""  # the part of a request being read: head or body
        self._deadline = math.inf  # on the loop's clock; infinite while a response is open
        self._refusal: ApiError | None = None  # sent once no response is open
        self._is_ended = False  # the last response is written; further input is dropped
        self._num_held, self._has_progress = 0, False  # bytes since the parser's latest callback
        self._unsent, self._unsent_since = -1, 0.0  # bytes, and when their number last changed

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.time() + self._table.settings.head_timeout
        problem = self._table.admit(self)
        if problem is not None:
            self._end(problem)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.release(self)
        for response in self._open:  # uvicorn notifies only the latest of a pipeline
            _disconnect(response)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ended or self._refusal is not None:
            return
        if self._part != "body" and b"pgrade" in data:
            data = UPGRADE.sub(b"ignored", data)
        self._has_progress = False
        super().data_received(data)
        self._num_held = 0 if self._has_progress else self._num_held + len(data)
        if self._num_held > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request head is longer than {MAX_HEAD_BYTES} bytes")
        if not self._open:  # only the first byte of a request sets the deadline
            within = self._table.settings.head_timeout
            self._deadline = min(self._deadline, self.loop.time() + within)

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._has_progress, self._part = True, "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_progress = True
        super().on_headers_complete()
        self._part, self._deadline = "body", math.inf
        self._open.append(self.cycle)
        if self.scope["http_version"] == "1.0":  # the app has not been called yet
            self.cycle.__class__ = UnchunkedResponse
            self.cycle.waiting_for_100_continue = False
        self.scope["extensions"] = {EXTENSION: {WRITER: ChunkWriter(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progress, self._part = True, ""
        super().on_message_complete()

    # Called by a complete response, and periodically by the connection table.

    def on_response_complete(self) -> None:
        if self._open and self._open[0].response_complete:
            self._open.popleft()
        super().on_response_complete()
        if self._open or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._end(self._refusal)
        elif self._part:  # of the next request, or of a body that the app did not read
            self._deadline = self.loop.time() + self._table.settings.head_timeout

    def expire(self, now: float) -> None:
        """Close the connection if the client is too slow to send a request or to read a response."""
        if self._is_stalled(now):
            self.transport.abort()
        elif self.transport.is_closing() or now < self._deadline:
            return
        elif self._is_ended:
            self.transport.abort()
        elif self._part == "head":
            limit = f"{self._table.settings.head_timeout:g} seconds"
            problem = f"the request head did not arrive within {limit}"
            self._refuse(ApiError(408, problem, code="timeout"))
        else:
            self.transport.close()

    def _is_stalled(self, now: float) -> bool:
        """Whether there is something to send and the client has read nothing for too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not unsent:
            self._unsent, self._unsent_since = unsent, now
        return now - self._unsent_since > self._table.settings.stall_timeout

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Send an error for the request being read, after open responses, and close."""
        if self._part == "body":
            if not self._open or self._open[-1] is not self.cycle:
                return self.transport.close()  # the request already has its response
            broken = self._open.pop()
            _disconnect(broken)
            if self.pipeline and self.pipeline[0][0] is broken:
                self.pipeline.popleft()
            elif broken.response_started:
                return self.transport.close()
        if self._open:
            self._refusal = error
        else:
            self._end(error)
        return None

    def _end(self, error: ApiError) -> None:
        """Write the connection's last response.

        Closing immediately would reset the connection while the client still sends, and the client
        might not read the response.
        """
        self._is_ended = True
        self._unset_keepalive_if_required()
        self.transport.write(raw_response(error))
        if self._table.may_linger(self):
            self.transport.write_eof()
            self._deadline = self.loop.time() + LINGER
        else:
            self.transport.close()


def _disconnect(response: RequestResponseCycle) -> None:
    """Signal the app of a response that its client has disconnected."""
    response.disconnected = True
    response.message_event.set()


def raw_response(error: ApiError) -> bytes:
    """A complete response that closes the connection, for requests that reach no app."""
    body = to_json(error.body)
    headers = {
        **error.headers, "Content-Type": "application/json", "Content-Length": str(len(body)),
        "Connection": "close",
    }  # fmt: skip
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
