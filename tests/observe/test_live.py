"""Snapshots of a running server, and the page that shows them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from headway import Engine, Request, SchedulerView
from headway.engine.async_engine import AsyncEngine
from headway.engine.queries import GetSnapshot, ResetPrefixCache
from headway.engine.thread_client import ThreadClient
from headway.fleet.merge import merge_snapshots
from headway.observe.server_metrics import ServerMetrics
from headway.record.sentences import DecisionLog, why_not_considered
from headway.scheduler.policies.queue import custom
from headway.server import live
from headway.server.context import Context
from headway.server.http import validation_errors
from tests.support.gated import Gate, SilentClient, gated_engine, scripted
from tests.support.waiting import LIMIT, on_loop, until

SECRET = 31337  # a prompt token


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is as late as the machine is busy."""
    monkeypatch.setattr(live, "TIMEOUT", LIMIT)


def observed(**changes: Any) -> tuple[Engine, Gate, ServerMetrics]:
    engine, gate = gated_engine(**changes)
    return engine, gate, ServerMetrics(ThreadClient(engine).loop, "tiny")


def client(engine: AsyncEngine) -> httpx.AsyncClient:
    app = FastAPI()
    validation_errors.install(app)
    app.include_router(live.router(cast(Context, SimpleNamespace(engine=engine))))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """An engine on its own thread, and a client of its page."""
    engine, _ = gated_engine()
    engine_client = ThreadClient(engine)
    ServerMetrics(engine_client.loop, "tiny")
    running = AsyncEngine(engine_client)
    await running.start()
    try:
        async with client(running) as http:
            yield running, http
    finally:
        await running.close()


def test_a_snapshot_lists_requests_and_decisions_but_no_prompt() -> None:
    engine, _, metrics = observed()
    log, decisions = DecisionLog(engine.scheduler.config.max_num_seqs), []
    engine.observers.append(lambda event: decisions.extend(log.follow(event)))
    for id in ("a", "b", "c", "d"):
        engine.add(id, [SECRET] * 9, scripted(client="<b>Bob</b>"))
    engine.step()
    text = json.dumps(metrics.snapshot())
    s = json.loads(text)
    running, waiting = s["running"], s["waiting"]
    assert [r["id"] for r in running["requests"]] == ["a", "b"]
    assert (running["count"], running["limit"]) == (2, 2)
    assert [r["id"] for r in waiting["requests"]] == ["c", "d"] and waiting["count"] == 2
    why = why_not_considered("max_num_seqs", 2)
    assert [r["why"] for r in waiting["requests"]] == [why, why]
    assert s["kv_blocks"]["used"] == 40 - engine.scheduler.num_free > 0
    assert str(SECRET) not in text
    engine.run()
    shown = metrics.snapshot()["decisions"]
    assert shown == [
        {"step": each.step, "kind": each.kind, "text": each.text}
        for each in decisions
        if each.kind != "arrived"
    ]
    for id in ("a", "b", "c", "d"):
        kinds = [d["kind"] for d in shown if d["text"].startswith(f"request {id} ")]
        assert kinds == ["admitted", "finished"], id


def test_a_request_received_after_the_plan_waits_for_the_next_step() -> None:
    engine, _, metrics = observed()
    for id in ("a", "b", "c"):
        engine.add(id, [1] * 9, scripted())
    engine.step()
    engine.add("d", [1] * 9, scripted())
    whys = {r["id"]: r["why"] for r in metrics.snapshot()["waiting"]["requests"]}
    assert "max_num_seqs" in whys["c"] and "next step" in whys["d"]


def test_a_snapshot_calls_no_policy() -> None:
    called: list[str] = []

    def key(request: Request, view: SchedulerView) -> float:
        called.append(request.id)
        return request.arrival

    engine, _, metrics = observed(queue=custom(function=key))
    for number in range(40):
        engine.add(str(number), [number] * 9, scripted())
    engine.step()
    num_calls = len(called)
    metrics.snapshot()
    metrics.text()
    assert len(called) == num_calls > 40


def test_a_snapshot_lists_at_most_64_requests() -> None:
    engine, _, metrics = observed(max_num_seqs=200, num_blocks=2000, max_num_batched_tokens=4000)
    for number in range(1000):
        engine.add(str(number), [1] * 9, scripted(20))
    engine.step()
    s = metrics.snapshot()
    assert s["running"]["count"] == 200 and s["waiting"]["count"] == 800
    assert len(s["running"]["requests"]) == len(s["waiting"]["requests"]) == 64
    engine.run()
    assert len(json.dumps(metrics.snapshot())) < 20_000


def test_rates_cover_a_sliding_window() -> None:
    engine, _, metrics = observed()
    clock = cast(Any, engine.clock)
    for second in range(10):
        clock.now = lambda second=second: second + 0.5
        engine.add(str(second), [1, 2, 3], scripted(10 + second))
        engine.run()
    s = metrics.snapshot()
    assert s["history"]["output_tokens"][-9:] == list(range(10, 19))  # second 9 is not over
    # From 4.5 to 9.5: half of second 4, which had 14 tokens, and seconds 5 to 9.
    assert s["rates"]["output_tokens"] == pytest.approx((14 / 2 + sum(range(15, 20))) / 5)
    assert s["rates"]["requests"] == pytest.approx(5.5 / 5)
    assert s["rates"]["prompt_tokens"] == pytest.approx(3 * 5.5 / 5)
    clock.now = lambda: 9.75
    assert metrics.snapshot()["rates"]["requests"] == pytest.approx(5.25 / 5)
    clock.now = lambda: 100.5
    later = metrics.snapshot()
    assert set(later["history"]["output_tokens"]) == {0} and later["rates"]["ttft"] == 0
    assert set(later["history"]["ttft"]) == set(later["history"]["itl"]) == {None}
    assert later["last_minute"] == {
        **dict.fromkeys(("errors", "aborts", "preemptions_per_second"), 0),
        **dict.fromkeys(("prefix_cache_hit_rate", "tokens_per_step", "prefill_share"), None),
        **dict.fromkeys(("recompute_tax", "max_itl", "p99_stall", "swap_in"), None),
    }


def test_a_snapshot_has_latencies_hit_rate_errors_and_aborts() -> None:
    engine, gate, metrics = observed()
    clock, now = cast(Any, engine.clock), 10.0
    clock.now = lambda: now
    for id in ("a", "b"):
        engine.add(id, [1] * 9, scripted(5))
        while engine.has_work:
            now += 0.25
            engine.step()
    s = metrics.snapshot()
    assert s["rates"]["itl"] == pytest.approx(0.25)
    known = [v for v in s["history"]["itl"] if v is not None]
    assert known and known == pytest.approx([0.25] * len(known))
    assert s["last_minute"]["prefix_cache_hit_rate"] == pytest.approx(8 / 18)
    engine.add("c", [2] * 9, scripted())
    engine.step()
    engine.abort("c")
    engine.run()
    gate.num_faults = 1
    engine.add("d", [3] * 9, scripted())
    engine.run()
    s = metrics.snapshot()
    assert (s["last_minute"]["errors"], s["last_minute"]["aborts"]) == (1, 1)
    assert (s["totals"]["errors"], s["totals"]["aborts"]) == (1, 1)
    now += 120
    s = metrics.snapshot()
    assert (s["last_minute"]["errors"], s["totals"]["errors"]) == (0, 1)


@on_loop
async def test_the_page_allows_only_its_own_script_and_has_every_element_that_it_uses() -> None:
    async with served() as (_engine, http):
        response = await http.get("/")
        policy = response.headers["content-security-policy"]
        for tag in ("style", "script"):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.S)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        assert not re.search(r"(src|href)=\"(?!data:)", response.text)
        assert not re.search(r"innerHTML|document\.write|eval\(", response.text)
        ids = set(re.findall(r'id="(\w+)"', response.text))
        used = set(re.findall(r'\bat\("(\w+)"\)', response.text))
        used |= {f"{name}_fill" for name in re.findall(r'\bbar\("(\w+)"', response.text)}
        assert used <= ids, used - ids


def test_the_script_reads_only_keys_of_the_snapshot() -> None:
    engine, _, metrics = observed()
    for id in ("a", "b", "c"):
        engine.add(id, [1] * 9, scripted())
    engine.step()
    s = merge_snapshots({"one": metrics.snapshot()})
    script = live.page("index.html", "live.css", "live.js").body.decode()
    row = s["waiting"]["requests"][0]
    known = {
        "s": s,
        "r": row,
        "d": s["decisions"][0],
        "blocks": s["kv_blocks"],
        "replica": s["replicas"][0],
    }
    for name, value in known.items():
        used = set(re.findall(rf"(?<![\w.]){name}\.(\w+)", script)) - {"slice"}
        assert used and used <= set(value), (name, used - set(value))


@on_loop
async def test_many_clients_share_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SECONDS_KEPT", LIMIT)

    async with served() as (engine, http):
        loop = cast(ThreadClient, engine.client).loop
        observe, num_queries = loop._answers[GetSnapshot], 0

        def counted(details: Any) -> Any:
            nonlocal num_queries
            num_queries += 1
            return observe(details)

        loop.handle(GetSnapshot, counted)
        async for _ in engine.stream("a", [SECRET] * 9, scripted()):
            pass
        # This query runs between steps, so the totals then include the last step of the request.
        await engine.ask(ResetPrefixCache())
        responses = await asyncio.gather(*(http.get("/live") for _ in range(20)))
        assert {r.status_code for r in responses} == {200} and num_queries == 1
        totals = {"requests": 1, "output_tokens": 5, "errors": 0, "aborts": 0}
        assert responses[0].json()["totals"] == totals


@on_loop
async def test_live_returns_503_if_the_engine_does_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SECONDS_KEPT", 0.0)
    engine, _ = gated_engine()
    engine_client = ThreadClient(engine)
    ServerMetrics(engine_client.loop, "tiny")
    remote_client = SilentClient(engine_client)
    remote = AsyncEngine(remote_client)
    await remote.start()
    async with client(remote) as http:
        assert (await http.get("/live")).status_code == 200
        remote_client.is_silent = True
        monkeypatch.setattr(live, "TIMEOUT", 0.2)
        for response in await asyncio.gather(http.get("/live"), http.get("/live")):
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["code"] == "engine_busy"
            assert "0.2 s" in response.json()["error"]["message"]
        remote_client.is_silent = False
        await remote.close()
        monkeypatch.setattr(live, "TIMEOUT", LIMIT)
        await until(lambda: remote.stop_reason)
        response = await http.get("/live")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_gone"
