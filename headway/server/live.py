"""GET / and GET /live: the live page, and the snapshots that it shows.

A snapshot does not wait for a step. Clients that ask within a quarter of a second share one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import Query
from headway.engine.queries import Document, GetSnapshot
from headway.server.http.errors import RETRY_AFTER, ApiError, ErrorResponse

if TYPE_CHECKING:
    from headway.server.context import Context

PAGE = Path(__file__).parent / "page"
SECONDS_KEPT = 0.25  # minimum time between two snapshots
ERRORS: dict[int | str, Any] = {
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong."},
    503: {"model": ErrorResponse, "description": "The engine has stopped or does not respond."},
}
TIMEOUT = 2.0  # seconds; a snapshot does not wait for a step


def page(document: str, style: str, script: str) -> HTMLResponse:
    """A self-contained document of three files in page/, which may run no other scripts."""
    html, css, js = (
        (PAGE / name).read_text(encoding="utf-8") for name in (document, style, script)
    )
    policy = (
        f"default-src 'none'; style-src {_digest(css)}; script-src {_digest(js)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Frame-Options": "DENY"}
    return HTMLResponse(html.replace("/*STYLE*/", css).replace("/*SCRIPT*/", js), headers=headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Snapshots:
    """The engine's latest answer to a query, shared by all clients."""

    def __init__(self, engine: AsyncEngine, query: Query[Document], seconds_kept: float) -> None:
        self._engine, self._query, self._seconds_kept = engine, query, seconds_kept
        self._pending: asyncio.Task[Document] | None = None

    async def latest(self) -> Document:
        """A current answer; ApiError or ExecutorError if the engine does not respond."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(TIMEOUT):
                return await asyncio.shield(self._pending)
        except TimeoutError:
            problem = f"the engine process has not responded for {TIMEOUT:g} s; try again"
            raise ApiError(503, problem, code="engine_busy", headers=RETRY_AFTER) from None

    async def _ask(self) -> Document:
        try:
            return await self._engine.ask(self._query)
        finally:
            asyncio.get_running_loop().call_later(
                self._seconds_kept, setattr, self, "_pending", None
            )


def router(context: Context) -> APIRouter:
    """The routes of the live page."""
    routes, snapshots = APIRouter(), Snapshots(context.engine, GetSnapshot(), SECONDS_KEPT)
    document = page("index.html", "live.css", "live.js")

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def live_page() -> HTMLResponse:
        """The live page."""
        return document

    @routes.get("/live", responses=ERRORS)
    async def live() -> Document:
        """Running and waiting requests, KV blocks, rates and the latest decisions."""
        return await snapshots.latest()

    return routes
