"""ASGI middleware: API keys, foreign web pages, request bodies, the access log and trace context.

`SecurityMiddleware` runs before any endpoint, so refused requests cost no parsing. It reads request
bodies completely, so endpoints never wait for a client.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.http.errors import ApiError, format_value
from headway.server.http.offload import LARGE, return_memory
from headway.server.http.origins import check_host, check_origin
from headway.server.settings import Settings

# Paths that reveal nothing that needs a key.
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/lab", "/ping", "/version"})
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
CLOSE = {"Connection": "close"}  # the rest of the body is not read
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
ID_PATTERN = re.compile(rb"[A-Za-z0-9._-]{1,64}")
UNLOGGED_PATHS = ("/health", "/metrics", "/live", "/doctor")  # polled all the time
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
# Version 00 of the W3C header. A later version may add fields after a dash. Ids of zeros are invalid.
TRACEPARENT_PATTERN = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?"
)
access_log = logging.getLogger("headway.access")


def _is_open(path: str) -> bool:
    """Whether a path needs no API key: it shows nothing of the engine."""
    return path in OPEN_PATHS or (path.startswith("/lab/") and not path.startswith("/lab/api/"))


class SecurityMiddleware:
    """Refuses requests with a wrong host, origin, API key or body; buffers the body."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode("ascii") for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_large = False
        try:
            headers = Headers(scope=scope)
            check_host(headers, self._settings.allowed_hosts)
            if not self._keys:  # with keys, a foreign page is refused because it has none
                check_origin(scope["method"], headers, self._settings.allowed_origins)
            if self._keys and not _is_open(scope["path"]):
                self._check_key(headers)
            if scope["method"] in METHODS_WITH_BODY:
                body = await self._read_body(headers, receive)
                if body is None:
                    return None  # the client disconnected
                is_large = len(body) > LARGE
                receive = _replay(body, receive)
                del body  # free it as soon as it is parsed; it may be large
        except ApiError as error:
            return await error.response_at(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)
        return await return_memory() if is_large else None

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # sent by Anthropic's clients
        key = given.strip().encode("utf-8", "surrogateescape")
        # Compare with all keys in constant time, so that the duration reveals nothing about them.
        if not sum(hmac.compare_digest(key, known) for known in self._keys):
            ways = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            problem = f"the API key is missing or wrong; send it as {ways}"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, problem, code="invalid_api_key", headers=challenge)

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The complete body; None if the client disconnects first."""
        length, limit = headers.get("content-length", ""), self._settings.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes", headers=CLOSE)
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        _check_type(headers, body)
                        return bytes(body)
        except TimeoutError:
            seconds = self._settings.body_timeout
            problem = f"the body did not arrive within {seconds} seconds"
            raise ApiError(408, problem, code="timeout", headers=CLOSE) from None
        return None


def _check_type(headers: Headers, body: bytearray) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and not re.fullmatch(r"application/(json|.*\+json)", kind, re.DOTALL):
        problem = f"Content-Type must be application/json, not {format_value(kind)}"
        raise ApiError(415, problem, param="Content-Type")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if body and encoding != "identity":
        problem = f"Content-Encoding {format_value(encoding)} is not supported; send the plain body"
        raise ApiError(415, problem, param="Content-Encoding")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body as one message first."""
    message: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(message, None) or await receive()

    return replay


class RequestContextMiddleware:
    """Sets REQUEST_ID and TRACEPARENT for each HTTP request, and logs its status and duration.

    The id, which is returned as X-Request-Id, is the client's if that is a plain word, else new.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        id = given.decode() if ID_PATTERN.fullmatch(given) else uuid.uuid4().hex
        start, status = time.perf_counter(), 0
        tokens = REQUEST_ID.set(id), TRACEPARENT.set(traceparent_of(scope))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if scope["path"] not in UNLOGGED_PATHS or status >= 500:
                milliseconds = round((time.perf_counter() - start) * 1e3, 1)
                # Status 0: the client disconnected or the server failed before a response.
                line = "%s %s" if status else "%s %s unanswered"
                extra = {"status": status, "ms": milliseconds}
                access_log.info(line, scope["method"], scope["path"], extra=extra)
            for token in tokens:
                token.var.reset(token)


def traceparent_of(scope: Scope) -> str:
    """The W3C `traceparent` header; empty if it is absent, repeated or malformed."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    is_valid = len(given) == 1 and TRACEPARENT_PATTERN.fullmatch(given[0])
    return given[0].decode("ascii", "replace") if is_valid else ""
