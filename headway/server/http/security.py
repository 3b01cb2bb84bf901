"""The door of the server: API keys, foreign web pages, and bodies that cannot be read.

Plain ASGI, before any endpoint: what is refused here costs no parsing. Bodies are read whole, so
that what follows never waits for a client.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.http.errors import ApiError, shown
from headway.server.http.offload import LARGE, return_memory
from headway.server.http.origins import check_host, check_origin
from headway.server.settings import Settings

OPEN_PATHS = frozenset(
    {"/", "/docs", "/health", "/ping", "/version"}
)  # they tell nothing that needs a key
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
CLOSING = {"Connection": "close"}  # the rest of a body is not read


class Guard:
    """Lets through what has a key and a body that can be read."""

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
            if not self._keys:  # a foreign page has no key
                check_origin(scope["method"], headers, self._settings.allowed_origins)
            if self._keys and scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] in WITH_BODY:
                body = await self._body(headers, receive)
                if body is None:
                    return None  # the client has gone
                is_large = len(body) > LARGE
                receive = _replaying(body, receive)
                del body  # it may be large, and is needed only until it is parsed
        except ApiError as error:
            return await error.response_at(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)
        return await return_memory() if is_large else None

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # as Anthropic's clients send it
        asked = given.strip().encode("utf-8", "surrogateescape")
        # All are compared, each in constant time: how long it takes tells nothing of the keys.
        if not sum(hmac.compare_digest(asked, key) for key in self._keys):
            sent_as = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            problem = f"the API key is missing or wrong: send it as {sent_as}"
            wanted = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, problem, code="invalid_api_key", headers=wanted)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None if the client left before it was here."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while (message := await receive())["type"] == "http.request":
                    body += message.get("body", b"")
                    if len(body) > self._settings.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        _check_type(headers, body)
                        return bytes(body)
        except TimeoutError:
            seconds = self._settings.body_timeout
            problem = f"the body did not arrive within {seconds} seconds"
            raise ApiError(408, problem, code="timeout", headers=CLOSING) from None
        return None

    def _too_large(self) -> ApiError:
        limit = self._settings.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes", headers=CLOSING)


def _check_type(headers: Headers, body: bytearray) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
    if body and not is_json:
        wanted = "Content-Type must be application/json"
        raise ApiError(415, f"{wanted}, not {shown(kind)}", param="Content-Type")
    packed = headers.get("content-encoding", "identity").strip().lower()
    if body and packed != "identity":
        problem = f"bodies are taken as they are, not as {shown(packed)}; leave it out"
        raise ApiError(415, f"Content-Encoding: {problem}", param="Content-Encoding")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes."""
    whole: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(whole, None) or await receive()

    return replay
