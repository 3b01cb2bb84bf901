"""Requests of the package `requests` that an app answers without a socket."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import httpx
import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

from tests.support.waiting import LIMIT


class AppAdapter(HTTPAdapter):
    """Hands requests to an app, without sockets and without a second thread."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = httpx.ASGITransport(app), loop

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        """The response of the app, with its whole body."""
        asked = httpx.Request(
            str(request.method), str(request.url), headers=[*request.headers.items()],
            content=request.body,
        )  # fmt: skip
        return self._loop.run_until_complete(self._answer(request, asked))

    async def _answer(
        self, request: requests.PreparedRequest, asked: httpx.Request
    ) -> requests.Response:
        async with asyncio.timeout(LIMIT):
            answer = await self._transport.handle_async_request(asked)
            body = io.BytesIO(await answer.aread())
        raw = HTTPResponse(body, answer.headers, answer.status_code, preload_content=False)
        return self.build_response(request, raw)
