"""GET /lab: the lab page, which follows every decision of this server.

A film starts with the present state. The engine makes it while a page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from headway.engine.async_engine import AsyncEngine
from headway.engine.queries import GetFilm, StartFilm, StopFilm
from headway.lab.film.format import Record, record
from headway.lab.web.app import FILM, static
from headway.lab.web.catalog import catalog

if TYPE_CHECKING:
    from headway.server.context import Context

SECONDS = 0.2  # between two pieces of a film
MAX_SILENT = 10  # times that nothing is sent if nothing happens


async def live_film(engine: AsyncEngine) -> AsyncIterator[bytes]:
    """The film of a running engine, from now on; ExecutorError if the engine stops."""
    start = await engine.ask(StartFilm())
    try:
        yield start.header
        num_silent = 0
        while True:
            data = await engine.ask(GetFilm(start.viewer))
            num_silent = 0 if data else num_silent + 1
            if data or num_silent % MAX_SILENT == 0:
                yield data or record(Record.IDLE, b"")
            await asyncio.sleep(SECONDS)
    finally:
        await asyncio.shield(engine.ask(StopFilm(start.viewer)))


def router(context: Context) -> APIRouter:
    """The routes of the lab page."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/lab")
    async def redirect() -> RedirectResponse:
        return RedirectResponse("lab/")

    @routes.get("/lab/api/catalog")
    async def offers() -> JSONResponse:
        return JSONResponse(catalog("serve", [], []))

    @routes.get("/lab/api/live")
    async def live() -> StreamingResponse:
        film = live_film(context.engine)
        first = await anext(film)  # ExecutorError before the response starts
        return StreamingResponse(_chain(first, film), media_type=FILM)

    @routes.get("/lab/{name:path}")
    async def page(name: str) -> Response:
        found = static(name or "index.html")
        body = b"".join(found.body)
        return Response(body, found.status, found.headers, media_type=found.content_type)

    return routes


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
