"""HTTP/1 connections: uvicorn's with httptools, with limits, timeouts and a direct way to write.

httptools is written in C: a streamed token costs a tenth less than with h11, a short request a
fifth. It bounds neither the size of a head nor the time a client takes for it; this module does.
Direct writes skip ASGI: docs/decisions/0013-direct-chunk-writes.md says why, and what guards them.
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

from headway.server.http.connections import ConnectionTable
from headway.server.http.errors import ApiError, to_json

NAME, OUTLET = "headway", "outlet"  # among a scope's extensions
MAX_HEAD_BYTES = 64 << 10  # bytes that end no head and are no part of a body
# A header that this server ignores, and that makes httptools drop the request's body. Java's client
# offers HTTP/2 this way. The name in its place is as long, as the body must keep its length.
UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
LINGER = 2.0  # seconds in which a refused client can still send what it had begun to send


class Outlet:
    """Writes chunks of a response at once, past ASGI, while no ASGI message is under way."""

    __slots__ = ("_response",)

    def __init__(self, response: RequestResponseCycle) -> None:
        self._response = response

    @property
    def is_open(self) -> bool:
        """True while the response is sent in chunks, is incomplete, and its client reads it."""
        response = self._response
        return response.chunked_encoding is True and not (
            response.flow.write_paused
            or response.disconnected
            or response.response_complete
            or response.transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """Write one chunk, only while the outlet is open. An empty one would end the response."""
        if body:
            self._response.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def outlet_of(scope: Scope) -> Outlet | None:
    """The outlet of a request's connection; None under another server than ours."""
    found: Outlet | None = scope.get("extensions", {}).get(NAME, {}).get(OUTLET)
    return found


class UnchunkedResponse(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunks: the end of the connection ends the body."""

    _is_sized = True  # has a Content-Length

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_sized = b"content-length" in names
            if not self._is_sized:
                self.chunked_encoding = False
        elif not self._is_sized:  # let each piece be as long as it is
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """One client's connection.

    Refusals that the app never sees (a head that is too long, too slow or not HTTP; too many
    connections) are sent after the responses that are still open, and close the connection.
    """

    def __init__(self, *arguments: Any, table: ConnectionTable, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = table.settings.keep_alive_timeout  # type: ignore[assignment]
        self._table = table
        self._open: deque[RequestResponseCycle] = deque()  # incomplete ones; the first one runs
        self._part = ""  # of the message being read: head or body
        self._deadline = math.inf  # on the loop's clock; infinite while a response is open
        self._refusal: ApiError | None = None  # to be sent once no response is open
        self._is_ended = False  # the last response is written; what still comes is dropped
        self._num_held, self._has_moved = 0, False  # bytes since the parser's latest callback
        self._unsent, self._unsent_since = -1, 0.0  # bytes of a connection that is closing

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.time() + self._table.settings.head_timeout
        problem = self._table.admit(self)
        if problem is not None:
            self._end(problem)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.release(self)
        for response in self._open:  # uvicorn tells only the latest of a pipeline
            _disconnect(response)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ended or self._refusal is not None:
            return
        if self._part != "body" and b"pgrade" in data:
            data = UPGRADE.sub(b"ignored", data)
        self._has_moved = False
        super().data_received(data)
        self._num_held = 0 if self._has_moved else self._num_held + len(data)
        if self._num_held > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the head is longer than the limit of {MAX_HEAD_BYTES} bytes")
        if not self._open:  # the first byte of a message starts the clock, later ones do not
            within = self._table.settings.head_timeout
            self._deadline = min(self._deadline, self.loop.time() + within)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._has_moved, self._part = True, "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_moved = True
        super().on_headers_complete()
        self._part, self._deadline = "body", math.inf
        self._open.append(self.cycle)
        if self.scope["http_version"] == "1.0":  # its app has not run yet
            self.cycle.__class__ = UnchunkedResponse
            self.cycle.waiting_for_100_continue = False
        self.scope["extensions"] = {NAME: {OUTLET: Outlet(self.cycle)}}

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_moved, self._part = True, ""
        super().on_message_complete()

    # What a response calls when it is complete, and the table once in a while.

    def on_response_complete(self) -> None:
        if self._open and self._open[0].response_complete:
            self._open.popleft()
        super().on_response_complete()
        if self._open or self.transport.is_closing():
            return
        if self._refusal is not None:
            self._end(self._refusal)
        elif self._part:  # of the next message, or of a body that the app did not read
            self._deadline = self.loop.time() + self._table.settings.head_timeout

    def expire(self, now: float) -> None:
        """Close the connection if its client takes too long for its request or its response."""
        if self.transport.is_closing():
            self._expire_unsent(now)
        elif now < self._deadline:
            return
        elif self._is_ended:
            self.transport.abort()
        elif self._part == "head":
            limit = f"{self._table.settings.head_timeout:g} seconds"
            self._refuse(ApiError(408, f"the head did not arrive within {limit}", code="timeout"))
        else:
            self.transport.close()

    def _expire_unsent(self, now: float) -> None:
        """A closing connection stays open until all is sent: abort it when nothing moves."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > self._table.settings.stall_timeout:
            self.transport.abort()

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Send an error in place of the message being read, after what is open, and close."""
        if self._part == "body":
            if not self._open or self._open[-1] is not self.cycle:
                return self.transport.close()  # it has been answered already
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

        To close at once would reset the connection while the client still sends, and the client
        might never read the response.
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
    """Tell a response's app that its client has gone."""
    response.disconnected = True
    response.message_event.set()


def raw_response(error: ApiError) -> bytes:
    """A whole response that closes its connection, for clients that no app answers."""
    body = to_json(error.body)
    headers = {
        **error.headers, "Content-Type": "application/json", "Content-Length": str(len(body)),
        "Connection": "close",
    }  # fmt: skip
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
