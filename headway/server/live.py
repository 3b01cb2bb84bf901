"""GET / and GET /live: the live page, and the snapshots that it draws.

The page is one document with its style and script inside, made from the files in page/; its policy
lets nothing else run. A snapshot is made without waiting for a step; one is shared by all clients
that ask within a quarter of a second. Knows no engine beyond its answer to the query "snapshot".
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

SECONDS_KEPT = 0.25  # however many watch, the engine is asked no more often
WRONG: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong."},
    503: {"model": ErrorResponse, "description": "The engine has ended, or is stuck."},
}
RETRY = {"Retry-After": "1"}
PATIENCE = 2.0  # seconds for an answer, which does not wait for a step


class Snapshots:
    """The engine's latest snapshot, shared by all who watch."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._asking: asyncio.Task[Any] | None = None

    async def latest(self) -> dict[str, Any]:
        """A snapshot of just now; an ApiError if the engine does not give one."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        try:
            async with asyncio.timeout(PATIENCE):
                snapshot: dict[str, Any] = await asyncio.shield(self._asking)
                return snapshot
        except TimeoutError:
            words = f"the engine's process has not answered for {PATIENCE:g} s; it may be stuck"
            raise ApiError(503, words, code="engine_busy", headers=RETRY) from None
        except ExecutorError as error:
            raise ApiError(503, str(error), code="engine_gone") from None

    async def _ask(self) -> Any:
        try:
            return await self._engine.ask("snapshot")
        finally:
            asyncio.get_running_loop().call_later(SECONDS_KEPT, self._forget)

    def _forget(self) -> None:
        self._asking = None


def router(context: Context) -> APIRouter:
    """The live view's routes."""
    routes, snapshots = APIRouter(), Snapshots(context.engine)
    document = page("index.html", "live.css", "live.js")

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def live_page() -> HTMLResponse:
        """The live page."""
        return document

    @routes.get("/live", responses=WRONG)
    async def live() -> dict[str, Any]:
        """Who runs and waits, how many KV blocks are held, rates and the latest decisions."""
        return await snapshots.latest()

    return routes
