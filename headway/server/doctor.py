"""GET /doctor and POST /doctor/try: findings about this server, and trials of their remedies.

A trial simulates the requests of the last minutes before and after a change. It runs in a process of
the lowest priority, one at a time, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from headway.engine.async_engine import AsyncEngine
from headway.engine.queries import (
    Document,
    EndTrial,
    GetDiagnosis,
    GetTrialLines,
    StartTrial,
    TrialStart,
)
from headway.errors import ConfigError
from headway.lab.cost import known_profiles
from headway.lab.doctor.live import NUM_PER_QUERY, TRIAL_SECONDS
from headway.lab.doctor.text import diagnosis_text, trial_text
from headway.scheduler.policies.presets import own_policies, read_changes, read_preset
from headway.server.generation.stream import CompleteResponse
from headway.server.http.errors import ApiError, ErrorResponse, field_error
from headway.server.http.json_body import JsonRoute
from headway.server.live import ERRORS, Snapshots
from headway.server.openai.protocol import RequestModel, optional

if TYPE_CHECKING:
    from headway.server.context import Context

SECONDS_KEPT = 1.0  # minimum time between two diagnoses
MAX_CHANGES = 16
NICENESS = 19  # of the process of a trial; the lowest priority
TRY_ERRORS: dict[int | str, Any] = {
    **ERRORS,
    400: {"model": ErrorResponse, "description": "A change is wrong, or too little is recorded."},
    409: {"model": ErrorResponse, "description": "Another trial runs."},
    504: {"model": ErrorResponse, "description": "The trial took too long."},
}


class TryRequest(RequestModel):
    """The body of POST /doctor/try."""

    changes: dict[str, str | int] = Field(min_length=1, max_length=MAX_CHANGES)
    profile: str | None = optional("Costs, if the steps do not suffice.")


def router(context: Context) -> APIRouter:
    """The routes of the doctor."""
    routes, with_body = APIRouter(), APIRouter(route_class=JsonRoute)
    diagnoses = Snapshots(context.engine, GetDiagnosis(), SECONDS_KEPT)

    @routes.get("/doctor", responses=ERRORS)
    async def get_doctor(request: Request) -> Response:
        """What to watch, with healthy ranges, and problems of the last minute with remedies.

        Plain text if the Accept header prefers text to JSON.
        """
        found = await diagnoses.latest()
        if _wants_text(request):
            return PlainTextResponse(diagnosis_text(found))
        return JSONResponse(found)

    @with_body.post("/doctor/try", responses=TRY_ERRORS)
    async def post_try(body: TryRequest, request: Request) -> Response:
        """Simulate the recent requests before and after a change. Changes nothing."""
        changes = {name: str(value) for name, value in body.changes.items()}
        if _wants_text(request):
            tried = await run_trial(context.engine, changes, body.profile)
            return PlainTextResponse(trial_text(tried))
        return CompleteResponse(context, lambda: run_trial(context.engine, changes, body.profile))

    routes.include_router(with_body)
    return routes


def _wants_text(request: Request) -> bool:
    accept = request.headers.get("accept", "")
    return "text/" in accept and "json" not in accept


async def run_trial(engine: AsyncEngine, changes: dict[str, str], profile: str | None) -> Document:
    """The result of a trial in another process; ApiError if it cannot be made."""
    first = await engine.ask(StartTrial())
    if first is None:
        problem = "another trial runs; at most one runs at a time"
        raise ApiError(409, problem, code="trial_running", headers={"Retry-After": "5"})
    try:
        _check(first.header.config, changes, profile)
        async with asyncio.timeout(TRIAL_SECONDS):
            asked: dict[str, object] = {
                "changes": changes,
                "profile": profile,
                "niceness": NICENESS,
            }
            return await _in_process(engine, first, asked)
    except TimeoutError:
        problem = f"the trial took more than {TRIAL_SECONDS:g} s"
        raise ApiError(504, problem, code="timeout") from None
    finally:
        await asyncio.shield(engine.ask(EndTrial()))


def _check(config: Document, changes: dict[str, str], profile: str | None) -> None:
    """ApiError for a wrong change. A change must not import; the running policies are imported."""
    for name, text in changes.items():
        if own_policies({name: text}):
            raise ApiError(400, f"{name} must be a policy of Headway, not {text!r}", param=name)
    if profile is not None and profile not in known_profiles():
        known = ", ".join(known_profiles())
        raise field_error("profile", f"must be one of {known}, not {profile!r}")
    try:
        read_preset({**config, **read_changes(changes)}, own=own_policies(config))
    except ConfigError as error:
        raise ApiError(400, str(error), param="changes") from None


async def _in_process(engine: AsyncEngine, first: TrialStart, asked: dict[str, object]) -> Document:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway.lab.doctor.trial", env={**os.environ, "PYTHONPATH": path},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None, "started with a pipe"
    try:
        process.stdin.write(pickle.dumps((first, asked)))
        for number in range(first.first, first.end, NUM_PER_QUERY):
            lines = await engine.ask(GetTrialLines(number))
            process.stdin.write(pickle.dumps(lines) if lines else b"")
            await process.stdin.drain()
        out, errors = await process.communicate(pickle.dumps(None))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        result: Document = json.loads(out)
    except ValueError:
        detail = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise ApiError(500, f"the trial failed: {detail}", code="internal_error") from None
    if "error" in result and isinstance(result["error"], str):
        raise ApiError(400, result["error"], code="trial_impossible")
    return result
