"""What the HTTP server of a fleet answers when replicas are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.engine.messages import FinishInfo
from headway.fleet.client import FleetClient
from headway.fleet.settings import FleetSettings
from headway.fleet.shared_counters import NAMES, SharedCounters
from headway.server import doctor, live
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.generation.prompt_runs import failure
from headway.server.health import watch
from tests.support.served import END, HIDDEN_SIZE, MODEL, VOCAB_SIZE, letters
from tests.support.waiting import LIMIT, on_loop, until


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FleetClient]]:
    """A server over a fleet without replicas."""
    fleet = FleetClient(block_size=16, settings=FleetSettings(**settings))
    processor = InputProcessor(
        tokenizer=letters(), vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE,
        eos_ids=frozenset({END}),
    )  # fmt: skip
    engine = AsyncEngine(fleet)
    await engine.start()
    context = Context(
        engine=engine, input_processor=processor, model_name=MODEL, max_model_len=256,
        health=watch(engine),
    )  # fmt: skip
    app = create_app(context, [live.router(context), doctor.router(context)])
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, fleet
    finally:
        await engine.close()


BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


@on_loop
async def test_metrics_answer_without_replicas() -> None:
    async with gateway() as (client, fleet):
        fleet.dispatcher.counters.num_losses = 3
        response = await client.get("/metrics")
        assert response.status_code == 200
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }
        assert found["headway_fleet:replicas"] == 0 and found["headway_fleet:deaths_total"] == 3


@pytest.mark.parametrize("path", ["/live", "/doctor"])
@on_loop
async def test_what_is_known_of_replicas_is_unavailable_without_one(path: str) -> None:
    async with gateway() as (client, _):
        response = await client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no replica is connected"


@on_loop
async def test_a_limited_number_of_requests_waits_for_a_replica() -> None:
    async with gateway(max_waiting=2, no_replica_seconds=LIMIT) as (client, fleet):
        held = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(2)]
        await until(lambda: len(fleet.dispatcher.table.waiting) == 2)
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "no_replica" and "2 requests" in error["message"]
        assert len(fleet.dispatcher.table.waiting) == 2
        for each in held:
            each.cancel()


@on_loop
async def test_requests_that_waited_too_long_are_refused_with_retry_after() -> None:
    async with gateway(no_replica_seconds=0.0) as (client, _):
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 503 and "Retry-After" in response.headers
        assert response.json()["error"]["code"] == "no_replica"


def test_the_error_of_a_moved_request_says_what_happened_to_it() -> None:
    """Not that a step failed."""
    engine = AsyncEngine(FleetClient(block_size=16))
    for code, status in (("no_replica", 503), ("replicas_failed", 500), ("not_continued", 500)):
        end = FinishInfo("error", None, "request 'a' failed: x", 0, 0, 0.0, 0.0, 0.0, code)
        found = failure(engine, end)
        assert (found.status, found.code, str(found)) == (status, code, end.error)
        assert ("Retry-After" in found.headers) == (status == 503)


@on_loop
async def test_metrics_have_the_sums_of_all_gateways(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "counters", 2)
    other = SharedCounters(tmp_path / "counters", 1)
    other.sums({**dict.fromkeys(NAMES, 0), "num_moves": 3, "num_losses": 1})
    async with gateway() as (client, fleet):
        fleet.shared = SharedCounters(tmp_path / "counters", 0)
        fleet.dispatcher.counters.num_moves = 2
        text = (await client.get("/metrics")).text
        assert "headway_fleet:moves_total 5.0" in text and "headway_fleet:deaths_total 1.0" in text


@on_loop
async def test_a_problem_of_the_directory_is_a_warning() -> None:
    async with gateway() as (client, fleet):
        fleet.announce(2, "Ray's GCS does not answer")
        text = (await client.get("/metrics")).text
        assert "headway_fleet:directory_ok 0.0" in text and "headway_fleet:starting 2.0" in text
        assert fleet.problem is not None and "GCS" in fleet.problem
        fleet.announce(0, None)
        assert "headway_fleet:directory_ok 1.0" in (await client.get("/metrics")).text
        assert fleet.problem is None
