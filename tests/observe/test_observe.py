"""Observing a busy server: no query waits for the current step, and each result has an age."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from headway.engine.async_engine import ThreadClient
from headway.engine.loop import CachedReader
from headway.observe.server_metrics import ServerMetrics
from headway.server import app as app_module
from headway.server import live
from headway.server.health import watch
from tests.observe.test_prometheus import samples
from tests.support import processes
from tests.support.scripted import make_engine, script
from tests.support.served import MODEL, Server, on_loop, server

MAX_SECONDS = 10.0  # the observed step takes longer
PATHS = ("/metrics", "/load", "/live", "/health")


@asynccontextmanager
async def watched(**more: Any) -> AsyncIterator[Server]:
    """A server with metrics and the live page."""
    async with server(**more) as s:
        ServerMetrics(s.engine_client.loop, MODEL)
        s.app.include_router(live.router(s.app.state.context))
        yield s


async def wait_for_step(s: Server) -> None:
    async with asyncio.timeout(30):
        while (
            not s.engine_client.loop.engine.num_in_flight
            and s.engine_client.loop.engine.step_began is None
        ):
            await asyncio.sleep(0.005)


@asynccontextmanager
async def blocked(s: Server, **fields: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Block the first step of a request until the end of the context."""
    s.executor.gate.clear()
    request = asyncio.create_task(s.complete(prompt="abc", **fields))
    await wait_for_step(s)
    yield request
    s.executor.gate.set()
    await request


@on_loop
async def test_observations_do_not_wait_for_the_current_step() -> None:
    async with watched() as s, blocked(s, user="me"):
        for _ in range(2):
            answers = {}
            for path in PATHS:
                async with asyncio.timeout(MAX_SECONDS):
                    answers[path] = await s.client.get(path)
            assert {path: a.status_code for path, a in answers.items()} == dict.fromkeys(PATHS, 200)
            load, shown = answers["/load"].json(), answers["/live"].json()
            assert (load["running"], load["waiting"], load["server_load"]) == (1, 0, 1)
            assert shown["running"]["count"] == 1
            (row,) = shown["running"]["requests"]
            assert (row["client"], row["state"]) == ("me", "prefill")
            assert row["computed_prompt_tokens"] == 0
            found = samples(answers["/metrics"].text)
            assert found["num_requests_running",] == 1


@on_loop
async def test_the_age_grows_with_the_step_and_is_0_after_it() -> None:
    async with watched() as s:
        async with blocked(s):
            await asyncio.sleep(0.1)
            first = (await s.client.get("/live")).json()
            await asyncio.sleep(live.SECONDS_KEPT + 0.1)
            later = (await s.client.get("/live")).json()
            assert 0.1 <= first["age"] < later["age"]
            assert later["step_seconds"] == pytest.approx(later["age"], abs=0.05)
            assert (await s.client.get("/load")).json()["age"] >= later["age"]
            found = samples((await s.client.get("/metrics")).text)
            assert found["snapshot_age_seconds",] >= later["age"]
        await s.settled()
        idle = {"age": 1.0}
        async with asyncio.timeout(30):
            while idle["age"] > 0.05:  # not at once if the machine is busy
                await asyncio.sleep(live.SECONDS_KEPT + 0.05)
                idle = (await s.client.get("/live")).json()
        assert idle["step_seconds"] is None and idle["running"]["count"] == 0


@on_loop
async def test_requests_received_during_a_step_are_shown_as_waiting() -> None:
    async with watched() as s, blocked(s):
        others = [asyncio.create_task(s.complete(prompt="xy", n=2)) for _ in range(3)]
        async with asyncio.timeout(30):
            while (await s.client.get("/load")).json()["waiting"] < 6:
                await asyncio.sleep(0.01)
        found = samples((await s.client.get("/metrics")).text)
        assert found["num_requests_waiting",] == found["waiting_by_reason", "new"] == 6
        waiting = (await s.client.get("/live")).json()["waiting"]
        assert (waiting["count"], waiting["new"], waiting["requests"]) == (6, 6, [])
        s.executor.gate.set()
        await asyncio.gather(*others)


@on_loop
async def test_a_deadline_is_set_without_waiting_for_a_step() -> None:
    async with watched() as s, blocked(s):
        async with asyncio.timeout(MAX_SECONDS):
            now = await s.engine.ask("now")
        request = asyncio.create_task(s.complete(prompt="xy", deadline=60))
        async with asyncio.timeout(MAX_SECONDS):
            while s.engine_client.loop.num_unread == 0:
                await asyncio.sleep(0.005)
        (submit,) = s.engine_client.loop._inbox
        assert now + 60 <= cast(Any, submit).params.deadline <= now + 60 + 5
        s.executor.gate.set()
        await request


@on_loop
async def test_a_cache_reset_waits_for_the_step_until_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "ENGINE_TIMEOUT", 0.1)
    async with watched() as s:
        async with blocked(s):
            answer = await s.client.post("/reset_prefix_cache")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "engine_busy"
        await s.settled()
        assert (await s.client.post("/reset_prefix_cache")).json() == {"success": True}


def test_a_locked_scheduler_gives_the_last_known_state() -> None:
    engine = make_engine()
    latest = CachedReader(engine, lambda: len(engine.scheduler.requests))
    engine.add("a", [1, 2, 3], script(5))
    assert latest.get()[0] == 1
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.lock:  # a slow policy holds the lock like this
            held.set()
            assert done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    engine.scheduler.requests.clear()
    value, age = latest.get()
    assert value == 1 and age > 0
    done.set()
    holder.join()
    assert latest.get()[0] == 0


def test_the_watchdog_explains_a_stuck_step() -> None:
    async def test() -> None:
        async with watched() as s, blocked(s):
            await asyncio.sleep(0.05)
            watchdog = watch(s.engine, max_silence=0.01)
            problem = await watchdog(s.engine)
            assert problem is not None and "1 of" in problem and "in flight" in problem
        assert isinstance(s.engine.client, ThreadClient)

    asyncio.run(test())


def test_an_engine_in_another_process_is_observed_during_a_step() -> None:
    with processes.Server(num_workers=1, seconds=30.0, is_real=True) as s:
        body = {"prompt": "abc", "user": "me"}
        client = threading.Thread(target=lambda: _post(f"{s.url}v1/completions", body))
        client.start()
        with httpx.Client(base_url=s.url, timeout=10) as http:
            ends_at = time.monotonic() + 30
            while http.get("/load").json()["running"] == 0:
                assert time.monotonic() < ends_at
                time.sleep(0.02)
            ages = []
            for _ in range(2):
                for path in PATHS:
                    answer = http.get(path)
                    assert answer.status_code == 200, answer.text
                    assert answer.elapsed.total_seconds() < MAX_SECONDS
                shown = http.get("/live").json()
                assert [row["client"] for row in shown["running"]["requests"]] == ["me"]
                ages.append(shown["age"])
                time.sleep(live.SECONDS_KEPT + 0.05)
            assert 0 < ages[0] < ages[1]
            found = samples(http.get("/metrics").text)
            assert found["num_requests_running",] == 1 and found["snapshot_age_seconds",] > ages[1]
    client.join()


def _post(url: str, body: dict[str, Any]) -> None:
    try:
        httpx.post(url, json=body, timeout=20)
    except httpx.HTTPError:
        return  # the server is killed during the step
