"""The watchdog reports an engine that is stuck, fails or has stopped."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from headway import Request, VirtualClock
from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import MAX_FAULTS
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError
from headway.server.app import create_app
from headway.server.health import RemoteWatchdog, Watchdog, watch
from headway.server.settings import Settings
from tests.support.gated import SilentClient, gated_engine, scripted
from tests.support.served import server
from tests.support.waiting import on_loop, until


async def drain(engine: AsyncEngine, id: str) -> None:
    async for _ in engine.stream(id, [1] * 9, scripted()):
        pass


@on_loop
async def test_the_watchdog_reports_a_stuck_step_until_it_ends() -> None:
    engine, gate = gated_engine(clock := VirtualClock())
    running = AsyncEngine(ThreadClient(engine))
    await running.start()
    watchdog = watch(running, max_silence=0.4)
    assert isinstance(watchdog, Watchdog) and await watchdog(running) is None
    clock.advance_to(0.5)
    assert await watchdog(running) is None, "an idle engine is healthy"
    gate.open.clear()
    stuck = asyncio.create_task(drain(running, "a"))
    await until(lambda: engine.num_in_flight)  # the scheduler has released its lock
    assert await watchdog(running) is None, "idle time before the request does not count"
    clock.advance_to(1.0)
    problem = await watchdog(running)
    assert problem is not None and "0." in problem
    assert engine.why().splitlines()[-1] in problem, "the problem includes why()"
    gate.open.set()
    await stuck
    assert await watchdog(running) is None
    await running.close()
    assert "stopped" in (await watchdog(running) or "")


def test_a_fault_counts_until_a_step_succeeds_or_time_passes() -> None:
    engine, gate = gated_engine(clock := VirtualClock())
    watchdog = Watchdog(ThreadClient(engine).loop, max_silence=0.3)
    gate.num_faults = 1
    engine.add("a", [1], scripted())
    engine.run()
    assert "OSError: device lost" in (watchdog.problem() or "")
    clock.advance_to(0.35)
    assert watchdog.problem() is None, "an unhealthy server would receive no work to recover"
    gate.num_faults = 1
    engine.add("b", [1], scripted())
    engine.run()
    assert watchdog.problem() is not None
    engine.add("c", [1], scripted())
    engine.run()
    assert watchdog.problem() is None


def test_idle_time_never_counts_while_a_request_is_added() -> None:
    class Observed(dict[str, Request]):
        """Asks the watchdog, as another thread may, when the first request is there."""

        def __setitem__(self, id: str, request: Request) -> None:
            super().__setitem__(id, request)
            problems.append(watchdog.problem())

    engine, _ = gated_engine(clock := VirtualClock())
    watchdog, problems = Watchdog(ThreadClient(engine).loop, max_silence=0.3), list[str | None]()
    engine.scheduler.requests = Observed()
    clock.advance_to(60.0)
    engine.add("a", [1], scripted())
    assert problems == [None]


def test_an_engine_that_has_given_up_stays_unhealthy() -> None:
    engine, gate = gated_engine(clock := VirtualClock())
    watchdog = Watchdog(ThreadClient(engine).loop, max_silence=0.01)
    gate.num_faults = MAX_FAULTS
    for number in range(MAX_FAULTS):
        engine.add(str(number), [1], scripted())
        engine.run()
    clock.advance_to(0.02)
    assert engine.has_given_up and str(MAX_FAULTS) in (watchdog.problem() or "")


@on_loop
async def test_an_engine_in_another_process_is_healthy_while_it_responds() -> None:
    engine, gate = gated_engine(VirtualClock())
    client = ThreadClient(engine)
    Watchdog(client.loop)
    remote_client = SilentClient(client)
    remote = AsyncEngine(remote_client)
    await remote.start()
    watchdog = watch(remote, max_silence=0.1)
    assert isinstance(watchdog, RemoteWatchdog)
    assert await asyncio.gather(*(watchdog(remote) for _ in range(5))) == [None] * 5
    gate.num_faults = 1
    with pytest.raises(AssertionError, match="error"):
        async for updates in remote.stream("a", [1], scripted()):
            assert updates[-1].end is None, updates[-1].end
    assert "device lost" in (await watchdog(remote) or "")
    remote_client.is_silent = True
    problem = await watchdog(remote)
    assert problem is not None and "device lost" not in problem
    remote_client.is_silent = False
    await remote.close()


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_the_watchdog_time_must_be_positive(seconds: float) -> None:
    with pytest.raises(ConfigError, match="watchdog"):
        Settings(watchdog=seconds)


PROBLEM = "no progress for 31.0 s although there is work."
DECISION = "request chat-12 waits: it needs 5 free KV blocks; 2 available"


async def unhealthy(engine: AsyncEngine) -> str:
    return f"{PROBLEM}\n{DECISION}"


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("keys", [(), ("key",)])
@on_loop
async def test_a_failed_health_check_shows_decisions_only_if_no_key_is_set(
    keys: tuple[str, ...], path: str
) -> None:
    async with server(api_keys=keys) as here:
        app = create_app(replace(here.app.state.context, health=unhealthy))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.get(path)
    assert response.status_code == 503 and PROBLEM in response.text
    assert (DECISION in response.text) == (not keys)
