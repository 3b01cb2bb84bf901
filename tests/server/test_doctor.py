"""GET /doctor and POST /doctor/try on a served engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from headway import Engine, Scheduler, VirtualClock, preset
from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.engine.queries import ResetPrefixCache, StartTrial
from headway.engine.thread_client import ThreadClient
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.doctor import live as live_doctor
from headway.observe.server_metrics import ServerMetrics
from headway.request import RequestParams
from headway.server import doctor, live
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.settings import Settings
from tests.support.waiting import LIMIT, on_loop

PROFILE = load_profile("llama3.1-8b-a100-80gb")
KEY = {"Authorization": "Bearer secret"}
SECRET = 31337  # a prompt token
WITH_SIZES = [(n, prompt) for n in (1, 2, 4, 8, 12) for prompt in (40, 900, 6000)]


async def work(engine: AsyncEngine) -> None:
    """Requests of many lengths in batches of many sizes, so that costs can be fitted."""

    async def one(id: str, num_prompt: int) -> None:
        params = RequestParams(max_tokens=12, sampling=Script(12, 5, 9))
        async for _ in engine.stream(id, [SECRET] + [7] * num_prompt, params):
            pass

    for number, (count, num_prompt) in enumerate(WITH_SIZES):
        await asyncio.gather(*(one(f"{number}-{i}", num_prompt + i) for i in range(count)))
    await engine.ask(ResetPrefixCache())  # between steps: all observers have seen the last one


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis is as late as the machine is busy; a trial beside busy processes may never end."""
    monkeypatch.setattr(live, "TIMEOUT", LIMIT)
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", LIMIT)
    monkeypatch.setattr(doctor, "NICENESS", 0)


@asynccontextmanager
async def served(has_work: bool = True) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    """A client of a simulated engine on its own thread, behind an API key; and the engine."""
    clock = VirtualClock()
    config = preset("vllm_v1", num_blocks=8000, max_num_batched_tokens=16384, max_model_len=16384)
    executor = SimulatedExecutor(clock, lambda plan: PROFILE.step_seconds(plan), 0.0005)
    client = ThreadClient(Engine(Scheduler(config), executor, clock))
    live_doctor.install(client.loop, ServerMetrics(client.loop, "tiny"), PROFILE.model)
    engine = AsyncEngine(client)
    await engine.start()
    context = Context(
        engine=engine, input_processor=cast(InputProcessor, SimpleNamespace(tokenizer=None)),
        model_name="tiny", max_model_len=16384, settings=Settings(api_keys=("secret",)),
    )  # fmt: skip
    app = create_app(context, [doctor.router(context)])
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            if has_work:
                await work(engine)
            yield http, engine
    finally:
        await engine.close()


@on_loop
async def test_the_doctor_answers_with_json_or_text_and_needs_the_key() -> None:
    async with served() as (http, _engine):
        assert (await http.get("/doctor")).status_code == 401
        found = (await http.get("/doctor", headers=KEY)).json()
        assert {"vitals", "findings", "summary", "config", "seconds"} == set(found)
        assert any("prompt tokens" in finding["symptom"] for finding in found["findings"])
        assert found["summary"]["completed"] == sum(count for count, _ in WITH_SIZES)
        text = await http.get("/doctor", headers={**KEY, "Accept": "text/plain"})
        assert text.headers["content-type"].startswith("text/plain")
        for vital in found["vitals"]:
            assert vital["name"] in text.text and vital["healthy"] in text.text
        assert "symptom" in text.text and str(SECRET) not in json.dumps(found) + text.text


@on_loop
async def test_a_trial_shows_before_and_after_and_changes_nothing() -> None:
    async with served() as (http, _engine):
        body: dict[str, Any] = {"changes": {"max_num_seqs": 2}}
        assert (await http.post("/doctor/try", json=body)).status_code == 401
        first, second = await asyncio.gather(
            *(http.post("/doctor/try", json=body, headers=KEY) for _ in "ab")
        )
        done, busy = sorted((first, second), key=lambda response: response.status_code)
        assert (done.status_code, busy.status_code) == (200, 409) and busy.headers["Retry-After"]
        tried = done.json()
        assert tried["costs"]["source"] == "fitted", tried["costs"]
        assert tried["after"]["queue_time"]["p99"] > tried["before"]["queue_time"]["p99"]
        assert tried["before"]["completed"] == tried["measured"]["completed"]
        assert (await http.get("/doctor", headers=KEY)).json()["config"]["max_num_seqs"] == 256
        headers = {**KEY, "Accept": "text/plain"}
        body = {"changes": {"chunk": "hold_tbt(0.05)"}}  # its costs are those of the trial
        text = (await http.post("/doctor/try", json=body, headers=headers)).text
        assert "chunk=hold_tbt(0.05)" in text and "longest stall" in text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "changes"), ({"changes": {}}, "changes"), ({"changes": {"chunks": "whole"}}, "chunk"),
        ({"changes": {"queue": "os:system"}}, "queue must be a policy of Headway"),
        ({"changes": {"max_num_seqs": 0}}, "max_num_seqs"),
        ({"changes": {"max_num_seqs": 2}, "profile": "/etc/passwd"}, "profile must be one of"),
        ({"changes": {"max_num_seqs": 2}}, "no steps are recorded"),
    ],
)  # fmt: skip
@on_loop
async def test_an_impossible_trial_is_refused_with_the_reason(
    body: dict[str, Any], problem: str
) -> None:
    async with served(has_work=False) as (http, engine):
        refused = await http.post("/doctor/try", json=body, headers=KEY)
        assert refused.status_code == 400 and problem in refused.json()["error"]["message"]
        assert await engine.ask(StartTrial()) is not None, "the next trial may start"
