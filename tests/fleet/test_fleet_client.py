"""A fleet of engines without a model: the tokens of a request follow its script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.errors import ExecutorError, InvalidRequest
from headway.fleet.client import FleetClient
from headway.fleet.settings import FleetCounters, FleetSettings
from headway.fleet.transport.links import OnBatch, OnLost, ThreadLink
from tests.support.faults import Faults
from tests.support.scripted import END, make_engine, script
from tests.support.waiting import until


class StoppableLink(ThreadLink):
    """A link whose replica can be stopped, like a process by SIGSTOP: no message arrives."""

    is_stopped = False

    async def open(self, on_batch: OnBatch, on_lost: OnLost) -> None:
        await super().open(lambda batch: None if self.is_stopped else on_batch(batch), on_lost)


class Fleet:
    """A fleet of scripted engines and the caller's engine above it."""

    def __init__(self, *links: ThreadLink, **settings: float) -> None:
        self.client = FleetClient(links, block_size=4, settings=FleetSettings(**settings))  # type: ignore[arg-type]
        self.engine = AsyncEngine(self.client)

    async def __aenter__(self) -> Fleet:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def run(self, id: str, num_output: int = 20, **more: Any) -> list[int]:
        """The tokens of the first sample; ExecutorError if it failed."""
        tokens = list[int]()
        async for updates in self.engine.stream(id, [5] * 9, script(num_output, **more)):
            for update in updates:
                tokens += update.tokens if update.sample == 0 else ()
                if update.end is not None and update.end.reason == "error":
                    raise ExecutorError(str(update.end.error))
        return tokens

    @property
    def counters(self) -> FleetCounters:
        return self.client.dispatcher.counters


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


def generates(engine: Engine, num_requests: int) -> bool:
    """Whether an engine has this many running requests, all with a token."""
    running = list(engine.scheduler.running)
    return len(running) == num_requests and all(request.output for request in running)


WANTED = [1] * 19 + [END]


@on_loop
async def test_a_stopped_replica_is_replaced() -> None:
    engine = make_engine(0.03)
    link = StoppableLink("a", engine)
    async with Fleet(link, ThreadLink("b", make_engine())) as fleet:
        runs = [asyncio.create_task(fleet.run(str(i))) for i in range(4)]
        await until(lambda: generates(engine, 2))
        link.is_stopped = True
        assert await asyncio.gather(*runs) == [WANTED] * 4
        assert fleet.counters.num_deaths == 1 and fleet.counters.num_moves == 2
        described = fleet.client.describe()
        assert [each["name"] for each in described["replicas"]] == ["b"]
        assert described["num_deaths"] == 1 and described["num_open"] == 0


@on_loop
async def test_a_failed_step_is_a_pause() -> None:
    engine = make_engine()
    Faults(engine).fails_at = {5, 6}
    async with Fleet(ThreadLink("a", engine), ThreadLink("b", make_engine())) as fleet:
        assert await asyncio.gather(*(fleet.run(str(i)) for i in range(8))) == [WANTED] * 8
        assert fleet.counters.num_failed == 0 and fleet.counters.num_moves


@on_loop
async def test_requests_wait_for_a_replica_and_then_fail() -> None:
    async with Fleet(no_replica_seconds=0.3) as fleet:
        waiting = asyncio.create_task(fleet.run("a"))
        await until(lambda: fleet.client.describe()["num_without_replica"] == 1)
        await fleet.client.add(ThreadLink("late", make_engine()))
        assert await waiting == WANTED
        await fleet.client.remove("late")
        with pytest.raises(ExecutorError, match=r"'b'.*no replica.*0\.3 s"):
            await fleet.run("b")
        with pytest.raises(ExecutorError, match="no replica"):
            await fleet.engine.ask("why")
        assert (await fleet.engine.ask("problem")) == "no replica is connected"


@on_loop
async def test_a_drained_replica_is_free_at_once_and_streams_go_on() -> None:
    engines = [make_engine(0.03) for _ in range(2)]
    links = [ThreadLink(name, engine) for name, engine in zip("ab", engines, strict=True)]
    async with Fleet(*links) as fleet:
        runs = [asyncio.create_task(fleet.run(str(i), n=2)) for i in range(4)]
        await until(lambda: all(generates(engine, 4) for engine in engines))
        began = asyncio.get_running_loop().time()
        await fleet.client.drain("a")
        assert asyncio.get_running_loop().time() - began < 1.0
        assert engines[0].scheduler.is_idle
        await fleet.client.drain("unknown")
        assert await asyncio.gather(*runs) == [WANTED] * 4
        assert (fleet.counters.num_drains, fleet.counters.num_moves) == (1, 2)
        assert fleet.counters.num_resumed_tokens and not fleet.counters.num_deaths


@on_loop
async def test_queries_reach_the_right_replicas() -> None:
    engines = [make_engine(0.02) for _ in range(2)]
    links = [ThreadLink(name, engine) for name, engine in zip("ab", engines, strict=True)]
    links[1].loop.step_queries["film_lines"] = lambda _: "of b"
    links[0].loop.step_queries["film_lines"] = lambda _: "of a"
    async with Fleet(*links) as fleet:
        ask = fleet.engine.ask
        runs = [asyncio.create_task(fleet.run(str(i), 60)) for i in range(3)]
        await until(lambda: sum(len(engine.scheduler.running) for engine in engines) == 3)
        assert (await ask("load"))["running"] == 3
        why = await ask("why")
        assert "Replica a: " in why and "Replica b: " in why
        assert await ask("film_lines") == "of a"
        assert await ask("each", ("film_lines", None)) == {"a": "of a", "b": "of b"}
        assert await ask("reset_prefix_cache") is False
        assert 0 < await ask("now") < 30 and (await ask("fleet"))["num_open"] == 3
        with pytest.raises(ExecutorError, match="replica a: unknown query 'nothing'"):
            await ask("nothing")
        await asyncio.gather(*runs)
        assert await ask("reset_prefix_cache") is True


@on_loop
async def test_the_tracker_equals_the_pools() -> None:
    engines = [make_engine(num_blocks=24) for _ in range(2)]
    links = [ThreadLink(name, engine) for name, engine in zip("ab", engines, strict=True)]
    async with Fleet(*links) as fleet:
        for round_number in range(3):
            salts = [f"{round_number}{i}" for i in range(6)]
            await asyncio.gather(*(fleet.run(salt, salt=salt) for salt in salts))
        tracker = fleet.client.dispatcher.router.tracker
        for name, engine in zip("ab", engines, strict=True):
            keys = engine.scheduler.kv.pool.index.block_of.keys()
            await until(lambda name=name, keys=keys: tracker.keys_of(name) == keys)  # type: ignore[misc]
            assert keys
        await fleet.client.remove("a")
        assert not tracker.keys_of("a")


@on_loop
async def test_leaving_early_aborts_on_the_replica_and_close_ends_open_requests() -> None:
    engine = make_engine(0.005)
    async with Fleet(ThreadLink("a", engine)) as fleet:
        async for _ in fleet.engine.stream("a", [5], script(200)):
            break
        await until(lambda: not engine.scheduler.requests)
        assert not fleet.client.dispatcher.requests
        left = asyncio.create_task(fleet.run("b", 200))
        await until(lambda: engine.scheduler.requests)
    with pytest.raises(ExecutorError, match=r"close\(\) was called"):
        await left


@on_loop
async def test_a_wrong_request_is_refused_without_a_replica() -> None:
    async with Fleet() as fleet:
        for wrong in ({"n": 10**9}, {"stop_ids": frozenset("x")}):
            with pytest.raises(InvalidRequest):
                await fleet.run("a", **wrong)
