"""Observing a busy server: no query waits for the current step, and each result has an age."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from headway.engine.clock import VirtualClock
from headway.engine.loop import CachedReader
from headway.engine.queries import GetTime
from headway.engine.thread_client import ThreadClient
from headway.observe.server_metrics import ServerMetrics
from headway.server import app as app_module
from headway.server import live
from headway.server.health import watch
from tests.observe.test_prometheus import samples
from tests.support import processes
from tests.support.scripted import make_engine, script
from tests.support.served import MODEL, Server, server
from tests.support.waiting import LIMIT, on_loop, until, wait_until

ENDLESS = 10 * LIMIT  # seconds
PATHS = ("/metrics", "/load", "/live", "/health")


@asynccontextmanager
async def watched(**more: Any) -> AsyncIterator[Server]:
    """A server with metrics and the live page."""
    async with server(**more) as s:
        ServerMetrics(s.engine_client.loop, MODEL)
        s.app.include_router(live.router(s.app.state.context))
        yield s


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is as late as the machine is busy, and no two queries share one."""
    monkeypatch.setattr(live, "TIMEOUT", LIMIT)
    monkeypatch.setattr(live, "SECONDS_KEPT", 0.0)


@asynccontextmanager
async def blocked(s: Server, **fields: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Block the first step of a request until the end of the context."""
    s.executor.gate.clear()
    request = asyncio.create_task(s.complete(prompt="abc", **fields))
    await until(lambda: s.executor.is_blocked)
    yield request
    s.executor.gate.set()
    await request


@on_loop
async def test_observations_do_not_wait_for_the_current_step() -> None:
    async with watched() as s, blocked(s, user="me"):
        for _ in range(2):
            answers = {path: await s.client.get(path) for path in PATHS}
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
    async with watched(clock=(clock := VirtualClock())) as s:
        async with blocked(s):
            for age in (1.0, 4.0):
                clock.advance_to(age)
                shown = (await s.client.get("/live")).json()
                assert shown["age"] == shown["step_seconds"] == age
                assert (await s.client.get("/load")).json()["age"] == age
                found = samples((await s.client.get("/metrics")).text)
                assert found["snapshot_age_seconds",] == age
        await until(lambda: s.engine_client.loop.engine.step_began is None)
        await s.settled()
        clock.advance_to(9.0)
        idle = (await s.client.get("/live")).json()
        assert (idle["age"], idle["step_seconds"], idle["running"]["count"]) == (0, None, 0)


@on_loop
async def test_requests_received_during_a_step_are_shown_as_waiting() -> None:
    async with watched() as s, blocked(s):
        others = [asyncio.create_task(s.complete(prompt="xy", n=2)) for _ in range(3)]
        await until(lambda: s.engine_client.loop.num_unread == 6)
        assert (await s.client.get("/load")).json()["waiting"] == 6
        found = samples((await s.client.get("/metrics")).text)
        assert found["num_requests_waiting",] == found["waiting_by_reason", "new"] == 6
        waiting = (await s.client.get("/live")).json()["waiting"]
        assert (waiting["count"], waiting["new"], waiting["requests"]) == (6, 6, [])
        s.executor.gate.set()
        await asyncio.gather(*others)


@on_loop
async def test_a_deadline_is_set_without_waiting_for_a_step() -> None:
    async with watched(clock=(clock := VirtualClock())) as s, blocked(s):
        clock.advance_to(7.0)
        assert await s.engine.ask(GetTime()) == 7.0
        request = asyncio.create_task(s.complete(prompt="xy", deadline=60))
        await until(lambda: s.engine_client.loop.num_unread)
        (submit,) = s.engine_client.loop._inbox
        assert cast(Any, submit).params.deadline == 67.0
        s.executor.gate.set()
        await request


@on_loop
async def test_a_cache_reset_waits_for_the_step_until_a_timeout() -> None:
    async with watched() as s:
        monkeypatch = pytest.MonkeyPatch()  # the server sets the value back when it ends
        async with blocked(s):
            monkeypatch.setattr(app_module, "ENGINE_TIMEOUT", 0.1)
            answer = await s.client.post("/reset_prefix_cache")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "engine_busy"
        monkeypatch.setattr(app_module, "ENGINE_TIMEOUT", LIMIT)
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
            assert done.wait(LIMIT)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(LIMIT)
    engine.scheduler.requests.clear()
    value, age = latest.get()
    assert value == 1 and age > 0
    done.set()
    holder.join()
    assert latest.get()[0] == 0


@on_loop
async def test_the_watchdog_explains_a_stuck_step() -> None:
    async with watched(clock=(clock := VirtualClock())) as s, blocked(s):
        clock.advance_to(0.05)
        watchdog = watch(s.engine, max_silence=0.01)
        problem = await watchdog(s.engine)
        assert problem is not None and "1 of" in problem and "in flight" in problem
    assert isinstance(s.engine.client, ThreadClient)


def test_an_engine_in_another_process_is_observed_during_a_step() -> None:
    with processes.Server(num_workers=1, seconds=ENDLESS, is_real=True) as s:
        body = {"prompt": "abc", "user": "me"}
        client = threading.Thread(target=lambda: _post(f"{s.url}v1/completions", body))
        client.start()
        with httpx.Client(base_url=s.url, timeout=LIMIT) as http:

            def shown() -> dict[str, Any]:
                return cast(dict[str, Any], http.get("/live").json())

            wait_until(lambda: shown()["running"]["requests"])
            for path in PATHS:
                answer = http.get(path)
                assert answer.status_code == 200, answer.text
            first = shown()
            assert [row["client"] for row in first["running"]["requests"]] == ["me"]
            later = wait_until(lambda: shown()["age"] > first["age"] > 0 and shown())
            found = samples(http.get("/metrics").text)
            assert found["num_requests_running",] == http.get("/load").json()["running"] == 1
            assert found["snapshot_age_seconds",] > later["age"]
    client.join()


def _post(url: str, body: dict[str, Any]) -> None:
    try:
        httpx.post(url, json=body, timeout=LIMIT)
    except httpx.HTTPError:
        return  # the server is killed during the step
