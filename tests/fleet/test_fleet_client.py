"""A fleet of engines without a model: the tokens of a request follow its script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headway.engine import queries
from headway.engine.async_engine import AsyncEngine, OnMessages
from headway.engine.engine import Engine
from headway.engine.messages import FromLoop
from headway.engine.thread_client import ThreadClient
from headway.errors import ExecutorError, InvalidRequest
from headway.fleet import client
from headway.fleet.client import FleetClient
from headway.fleet.replica import TICK_SECONDS
from headway.fleet.routing import round_robin
from headway.fleet.settings import FleetCounters, FleetSettings
from tests.support.faults import Faults
from tests.support.held import Held, Hold
from tests.support.scripted import END, make_engine, script
from tests.support.tracked import holds, num_keys
from tests.support.waiting import LIMIT, on_loop, until


class StoppableClient(ThreadClient):
    """A client whose replica can be stopped, like a process by SIGSTOP: no message arrives."""

    is_stopped = False

    async def open(self, on_messages: OnMessages) -> None:
        self._on_batch = on_messages
        await super().open(self._pass)
        self._beating = asyncio.create_task(self._beat())

    def _pass(self, batch: list[FromLoop]) -> None:
        if not self.is_stopped:
            self._on_batch(batch)

    async def _beat(self) -> None:
        while True:
            self._pass([])
            await asyncio.sleep(TICK_SECONDS / 2)

    async def close(self) -> None:
        self._beating.cancel()
        await super().close()


def replica(engine: Engine) -> ThreadClient:
    return ThreadClient(engine, report_load=True)


class Fleet:
    """A fleet of scripted engines and the caller's engine above it."""

    def __init__(self, *replicas: ThreadClient, **settings: Any) -> None:
        self.client = FleetClient(
            dict(zip("ab", replicas, strict=False)), block_size=4, route=round_robin,
            settings=FleetSettings(**{"hang_seconds": LIMIT, "stall_seconds": LIMIT, **settings}),
        )  # fmt: skip
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

    def generates(self, name: str, num_open: int) -> bool:
        """Whether a replica has this many requests, and has sent tokens of one."""
        open = self.client.dispatcher.replicas[name].open.values()
        return len(open) == num_open and any(request.num_tokens for request in open)

    @property
    def counters(self) -> FleetCounters:
        return self.client.dispatcher.counters


def held_engine(path: Path) -> tuple[Engine, Hold]:
    """An engine whose requests do not end before they are released."""
    engine, hold = make_engine(), Hold(str(path))
    engine.executor = Held(engine.executor, hold)
    hold.set(5)
    return engine, hold


WANTED = [1] * 19 + [END]
ENDLESS = 60_000  # tokens of a request that is still open when a test ends it
LARGE: dict[str, Any] = {"num_blocks": 50_000, "max_model_len": 2 * ENDLESS}


@on_loop
async def test_a_stopped_replica_is_replaced(tmp_path: Path) -> None:
    engine, hold = held_engine(tmp_path / "hold")
    stopped, other = (StoppableClient(each, report_load=True) for each in (engine, make_engine()))
    async with Fleet(stopped, other, hang_seconds=1.75) as fleet:
        runs = [asyncio.create_task(fleet.run(str(i))) for i in range(4)]
        await until(lambda: fleet.generates("a", 2))
        stopped.is_stopped = True
        hold.release()
        assert await asyncio.gather(*runs) == [WANTED] * 4
        assert fleet.counters.num_losses == 1 and fleet.counters.num_moves == 2
        described = fleet.client.describe()
        assert [each["name"] for each in described["replicas"]] == ["b"]
        assert described["num_losses"] == 1 and described["num_open"] == 0


@on_loop
async def test_a_failed_step_is_a_pause() -> None:
    engine = make_engine()
    Faults(engine).fails_at = {5, 6}
    async with Fleet(replica(engine), replica(make_engine())) as fleet:
        assert await asyncio.gather(*(fleet.run(str(i)) for i in range(8))) == [WANTED] * 8
        assert fleet.counters.num_failed == 0 and fleet.counters.num_moves


@on_loop
async def test_requests_wait_for_a_replica_and_then_fail() -> None:
    async with Fleet(no_replica_seconds=LIMIT) as fleet:
        waiting = asyncio.create_task(fleet.run("a"))
        await until(lambda: fleet.client.describe()["num_without_replica"] == 1)
        await fleet.client.add("late", replica(make_engine()))
        assert await waiting == WANTED
    async with Fleet(replica(make_engine()), no_replica_seconds=0.3) as fleet:
        await fleet.client.remove("a")
        with pytest.raises(ExecutorError, match=r"'b'.*no replica.*0\.3 s"):
            await fleet.run("b")
        with pytest.raises(ExecutorError, match="no replica"):
            await fleet.engine.ask(queries.ExplainQueue())
        assert (await fleet.engine.ask(queries.GetProblem())) == "no replica is connected"


@on_loop
async def test_a_drained_replica_is_free_at_once_and_streams_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DRAIN_SECONDS", 10 * LIMIT)  # longer than the test waits for it
    (first, hold), (second, other_hold) = (held_engine(tmp_path / name) for name in "ab")
    async with Fleet(replica(first), replica(second)) as fleet:
        runs = [asyncio.create_task(fleet.run(str(i), n=2)) for i in range(4)]
        await until(lambda: fleet.generates("a", 2) and fleet.generates("b", 2))
        draining = asyncio.create_task(fleet.client.drain("a"))
        await until(lambda: fleet.counters.num_drains)
        hold.release()
        await draining
        assert first.scheduler.is_idle and not any(run.done() for run in runs)
        await fleet.client.drain("unknown")
        other_hold.release()
        assert await asyncio.gather(*runs) == [WANTED] * 4
        assert (fleet.counters.num_drains, fleet.counters.num_moves) == (1, 2)
        assert fleet.counters.num_resumed_tokens and not fleet.counters.num_losses


@on_loop
async def test_a_replica_that_leaves_ends_requests_that_no_other_can_continue(
    tmp_path: Path,
) -> None:
    """As in an update to another model: replicas of the new one are of another fleet."""
    engine, hold = held_engine(tmp_path / "hold")
    async with Fleet(replica(engine), drain_seconds=LIMIT) as fleet:
        run = asyncio.create_task(fleet.run("0"))
        await until(lambda: fleet.generates("a", 1))
        draining = asyncio.create_task(fleet.client.drain("a"))
        await until(lambda: fleet.counters.num_drains)
        late = asyncio.create_task(fleet.run("1"))
        await until(lambda: fleet.client.dispatcher.table.waiting)
        assert fleet.generates("a", 1) and not draining.done()
        hold.release()
        assert await run == WANTED
        await draining
        assert not fleet.counters.num_moves and not fleet.client.dispatcher.replicas
        await fleet.client.add("b", replica(make_engine()))
        assert await late == WANTED


@on_loop
async def test_a_replica_leaves_at_the_limit_and_its_requests_wait(tmp_path: Path) -> None:
    engine, hold = held_engine(tmp_path / "hold")
    async with Fleet(replica(engine), drain_seconds=0.0) as fleet:
        run = asyncio.create_task(fleet.run("0"))
        await until(lambda: fleet.generates("a", 1))
        await fleet.client.drain("a")
        assert not fleet.client.dispatcher.replicas and fleet.counters.num_moves == 1
        hold.release()
        await fleet.client.add("b", replica(make_engine()))
        assert await run == WANTED


@on_loop
async def test_queries_reach_the_right_replicas() -> None:
    engines = [make_engine(0.02, **LARGE) for _ in range(2)]
    replicas, steps = [replica(engine) for engine in engines], b"recording"
    replicas[0].loop.handle(
        queries.GetRecording, lambda query: steps if query.viewer == 7 else None
    )
    async with Fleet(*replicas) as fleet:
        ask = fleet.engine.ask
        runs = [asyncio.create_task(fleet.run(str(i), ENDLESS)) for i in range(3)]
        await until(lambda: sum(len(engine.scheduler.running) for engine in engines) == 3)
        assert (await ask(queries.GetLoad())).running == 3
        why = await ask(queries.ExplainQueue())
        assert "Replica a: " in why and "Replica b: " in why
        assert await ask(queries.GetRecording(7)) == steps  # of the first by name
        each = await ask(queries.AskEach(queries.GetLoad()))
        assert [*each] == ["a", "b"] and sum(load.running for load in each.values()) == 3
        assert await ask(queries.ResetPrefixCache()) is False
        assert 0 < await ask(queries.GetTime()) <= fleet.client.dispatcher.clock.now()
        assert (await ask(queries.DescribeFleet()))["num_open"] == 3
        with pytest.raises(ExecutorError, match="replica a: .*does not answer StartTrial"):
            await ask(queries.StartTrial())
        for run in runs:
            run.cancel()
        await until(lambda: all(engine.scheduler.is_idle for engine in engines))
        assert await ask(queries.ResetPrefixCache()) is True


@on_loop
async def test_the_tracker_equals_the_pools() -> None:
    engines = [make_engine(num_blocks=24) for _ in range(2)]
    async with Fleet(*map(replica, engines)) as fleet:
        for round_number in range(3):
            salts = [f"{round_number}{i}" for i in range(6)]
            await asyncio.gather(*(fleet.run(salt, salt=salt) for salt in salts))
        tracker = fleet.client.dispatcher.router.tracker
        for name, engine in zip("ab", engines, strict=True):
            keys = engine.scheduler.kv.pool.index.block_of.keys()
            await until(lambda name=name, keys=keys: holds(tracker, name, keys))  # type: ignore[misc]
            assert keys
        await fleet.client.remove("a")
        assert num_keys(tracker, "a") == 0


@on_loop
async def test_leaving_early_aborts_on_the_replica_and_close_ends_open_requests() -> None:
    engine = make_engine(0.005, **LARGE)
    async with Fleet(replica(engine)) as fleet:
        async for _ in fleet.engine.stream("a", [5], script(ENDLESS)):
            break
        # The scheduler drops a request first; the client hears of it after the step.
        await until(lambda: not engine.scheduler.requests and not fleet.client.dispatcher.requests)
        left = asyncio.create_task(fleet.run("b", ENDLESS))
        await until(lambda: engine.scheduler.requests)
    with pytest.raises(ExecutorError, match=r"close\(\) was called"):
        await left


@on_loop
async def test_a_wrong_request_is_refused_without_a_replica() -> None:
    async with Fleet() as fleet:
        for wrong in ({"n": 10**9}, {"stop_ids": frozenset("x")}):
            with pytest.raises(InvalidRequest):
                await fleet.run("a", **wrong)
