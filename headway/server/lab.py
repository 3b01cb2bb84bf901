"""GET /lab: the lab page, which follows every decision of this server.

A recording starts with the present state. The engine makes it while a page is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from headway.engine.async_engine import AsyncEngine
from headway.engine.queries import GetRecording, StartRecording, StopRecording
from headway.lab.recording.format import Record, record
from headway.lab.web.app import RECORDING, static
from headway.lab.web.catalog import catalog

if TYPE_CHECKING:
    from headway.server.context import Context

SECONDS = 0.2  # between two pieces of a recording
MAX_SILENT = 10  # times that nothing is sent if nothing happens


async def live_recording(engine: AsyncEngine) -> AsyncIterator[bytes]:
    """The recording of a running engine, from now on; ExecutorError if the engine stops."""
    start = await engine.ask(StartRecording())
    try:
        yield start.header
        num_silent = 0
        while True:
            data = await engine.ask(GetRecording(start.viewer))
            num_silent = 0 if data else num_silent + 1
            if data or num_silent % MAX_SILENT == 0:
                yield data or record(Record.IDLE, b"")
            await asyncio.sleep(SECONDS)
    finally:
        await asyncio.shield(engine.ask(StopRecording(start.viewer)))


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
        recording = live_recording(context.engine)
        first = await anext(recording)  # ExecutorError before the response starts
        return StreamingResponse(_chain(first, recording), media_type=RECORDING)

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
