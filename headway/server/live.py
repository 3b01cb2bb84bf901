"""GET / and GET /live: the live page and the snapshots that it draws.

Taking a snapshot does not wait for a step. All clients that ask within a quarter of a second share
one snapshot. Knows nothing of the engine except the query "snapshot".
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from headway.engine.async_engine import AsyncEngine
from headway.errors import ExecutorError
from headway.server.http.errors import ApiError
from headway.server.openai.response_models import ErrorResponse
from headway.server.pages import page

if TYPE_CHECKING:
    from headway.server.context import Context

SECONDS_KEPT = 0.25  # the engine is queried at most this often, for any number of clients
ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong."},
    503: {"model": ErrorResponse, "description": "The engine has stopped or does not answer."},
}
RETRY = {"Retry-After": "1"}
QUERY_TIMEOUT = 2.0  # seconds; the engine's process answers even during a step


class SnapshotCache:
    """The engine's latest snapshot, shared by all clients."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._query: asyncio.Task[Any] | None = None

    async def latest(self) -> dict[str, Any]:
        """A snapshot at most SECONDS_KEPT old; ApiError 503 if the engine does not answer."""
        if self._query is None:
            self._query = asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(QUERY_TIMEOUT):
                snapshot: dict[str, Any] = await asyncio.shield(self._query)
                return snapshot
        except TimeoutError:
            problem = f"the engine's process has not answered for {QUERY_TIMEOUT:g} s"
            raise ApiError(503, problem, code="engine_busy", headers=RETRY) from None
        except ExecutorError as error:
            raise ApiError(503, str(error), code="engine_gone") from None

    async def _ask(self) -> Any:
        try:
            return await self._engine.ask("snapshot")
        finally:
            asyncio.get_running_loop().call_later(SECONDS_KEPT, self._forget)

    def _forget(self) -> None:
        self._query = None


def router(context: Context) -> APIRouter:
    """The routes of the live page."""
    routes, snapshots = APIRouter(), SnapshotCache(context.engine)
    document = page("index.html", "live.css", "live.js")

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def live_page() -> HTMLResponse:
        """The live page."""
        return document

    @routes.get("/live", responses=ERRORS)
    async def live() -> dict[str, Any]:
        """Running and waiting requests, KV block usage, rates and the latest decisions."""
        return await snapshots.latest()

    return routes
