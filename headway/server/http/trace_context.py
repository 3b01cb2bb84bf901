"""The W3C trace context that an HTTP request came with, for all that is done on its behalf."""

from __future__ import annotations

import re
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

# Version 00 of the header; a later version may go on after a dash. Zeros stand for no trace.
HEADER = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?"
)
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")


class TraceContext:
    """Reads `traceparent` of every HTTP request; a malformed one is ignored."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = TRACEPARENT.set(traceparent_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            TRACEPARENT.reset(token)


def traceparent_of(scope: Scope) -> str:
    """The header's value; empty if there is none, or more than one, or it is malformed."""
    given = [value for name, value in scope.get("headers", ()) if name == b"traceparent"]
    is_plain = len(given) == 1 and HEADER.fullmatch(given[0])
    return given[0].decode("ascii", "replace") if is_plain else ""
