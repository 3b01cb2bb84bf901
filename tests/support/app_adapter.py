"""Requests of the package `requests` that an app answers without a socket."""

from __future__ import annotations

import asyncio
import io
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPHeaderDict, HTTPResponse

from tests.support.waiting import LIMIT


class AppAdapter(HTTPAdapter):
    """Hands requests to an app, without sockets and without a second thread."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._app, self._loop = app, loop

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """The response of the app, with its whole body."""
        return self._loop.run_until_complete(self._answer(request))

    async def _answer(self, request: requests.PreparedRequest) -> requests.Response:
        parts, headers = urlsplit(str(request.url)), {"host": "server", **request.headers}
        body = request.body or b""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": request.method, "path": unquote(parts.path), "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(), "root_path": "", "server": (parts.hostname, 80),
            "client": ("127.0.0.1", 1), "headers": [
                (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
                for name, value in headers.items()
            ],
        }  # fmt: skip
        waiting = [
            {"type": "http.request", "body": body.encode() if isinstance(body, str) else body}
        ]
        sent, has_ended = list[Any](), asyncio.Event()

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            await has_ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                has_ended.set()

        async with asyncio.timeout(LIMIT):
            await self._app(scope, receive, send)
        start, *rest = sent
        fields = HTTPHeaderDict(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]
        )
        content = io.BytesIO(b"".join(message.get("body", b"") for message in rest))
        raw = HTTPResponse(content, fields, start["status"], preload_content=False)
        return self.build_response(request, raw)
