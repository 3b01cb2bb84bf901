"""A gateway links announced replicas, drops stale entries, and links a replica that comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headway import Engine, Plan, Scheduler, preset
from headway.engine import loop as engine_loop
from headway.engine.async_engine import AsyncEngine
from headway.engine.thread_client import ThreadClient
from headway.fleet import discovery
from headway.fleet.discovery import (
    Announced,
    DiscoveredFleet,
    FileDirectory,
    write_announced,
)
from headway.fleet.settings import FleetSettings
from headway.remote import auth, service
from headway.remote.auth import Identity
from headway.remote.service import EngineService
from headway.request import RequestParams
from headway.server.process.serve import bind
from tests.support.served import Capitals
from tests.support.waiting import LIMIT, on_loop, until

KEY = b"key"
MODEL = Identity(name="", model="letters", block_size=16)


class Counted(Capitals):
    """An executor that counts its steps."""

    num_steps = 0

    def launch(self, plan: Plan) -> Capitals:
        self.num_steps += 1
        return super().launch(plan)


@dataclass
class Listed:
    """A directory in memory."""

    found: dict[str, tuple[str, int]] = field(default_factory=dict)

    problem: str | None = None
    is_away: bool = False  # it cannot be read
    num_reads: int = 0

    def read(self) -> Announced:
        self.num_reads += 1
        if self.is_away:
            raise OSError("the directory is away")
        return Announced(replicas=dict(self.found), num_starting=2, problem=self.problem)


async def start(name: str, directory: Listed, executor: Capitals | None = None) -> EngineService:
    config = preset(
        "headway", max_model_len=256, num_blocks=2048, block_size=16, max_num_seqs=256,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    engine = Engine(Scheduler(config), executor or Capitals())
    identity = Identity(name=name, model="letters", block_size=16)
    service = EngineService(ThreadClient(engine, report_load=True), identity, KEY)
    directory.found[name] = await service.start(("127.0.0.1", 0))  # type: ignore[assignment]
    return service


@asynccontextmanager
async def gateway(directory: Listed) -> AsyncIterator[tuple[AsyncEngine, DiscoveredFleet]]:
    settings = FleetSettings(hang_seconds=LIMIT, stall_seconds=LIMIT)
    fleet = DiscoveredFleet(directory, MODEL, KEY, settings=settings)
    engine = AsyncEngine(fleet)
    await engine.start()
    yield engine, fleet
    await engine.close()


async def complete(engine: AsyncEngine, id: str, text: bytes) -> bytes:
    found: list[int] = []
    params = RequestParams(max_tokens=len(text), ignore_eos=True)
    async for updates in engine.stream(id, list(text), params):
        found += [token for update in updates for token in update.tokens]
    return bytes(found)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "INTERVAL", 0.02)
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", LIMIT)
    monkeypatch.setattr(service, "DRAIN_SECONDS", LIMIT)


@on_loop
async def test_replicas_are_linked_at_the_start_and_later() -> None:
    directory = Listed()
    one = await start("one", directory)
    async with gateway(directory) as (engine, fleet):
        assert len(fleet.dispatcher.replicas) == 1
        assert await complete(engine, "r", b"hello") == b"HELLO"
        two = await start("two", directory)
        await until(lambda: len(fleet.dispatcher.replicas) == 2)
        assert fleet.dispatcher.counters.num_frames > 0
    await one.close()
    await two.close()


@on_loop
async def test_a_replica_that_leaves_waits_for_a_request_that_no_other_can_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "DRAIN_SECONDS", 0.0)
    directory, text, executor = Listed(), b"abcdefghij" * 12, Capitals()
    one = await start("one", directory, executor)
    executor.num_free_steps = 20
    async with gateway(directory) as (engine, fleet):
        running = asyncio.create_task(complete(engine, "r", text))
        await until(lambda: not executor.gate.is_set())
        del directory.found["one"]
        draining = asyncio.create_task(one.drain("another model is deployed", LIMIT))
        await until(lambda: fleet.dispatcher.counters.num_drains)
        assert not draining.done()
        executor.gate.set()
        assert await running == text.upper()
        await draining
        counters = fleet.dispatcher.counters
        assert (counters.num_drains, counters.num_losses, counters.num_moves) == (1, 0, 0)
    await one.close()


@on_loop
async def test_a_request_continues_when_its_replica_stops_and_another_is_announced() -> None:
    directory, text, executor = Listed(), b"abcdefghij" * 12, Capitals()
    one = await start("one", directory, executor)
    executor.num_free_steps = 20
    async with gateway(directory) as (engine, fleet):
        running = asyncio.create_task(complete(engine, "r", text))
        await until(lambda: not executor.gate.is_set())
        assert one.num_open == 1
        two = await start("two", directory)
        await until(lambda: len(fleet.dispatcher.replicas) == 2)
        del directory.found["one"]
        draining = asyncio.create_task(one.drain("scaled down"))
        await until(lambda: fleet.dispatcher.counters.num_drains)
        executor.gate.set()
        await draining
        assert one.num_open == 0
        assert await running == text.upper()
        counters = fleet.dispatcher.counters
        assert (counters.num_drains, counters.num_losses) == (1, 0)
    await one.close()
    await two.close()


@on_loop
async def test_a_stale_entry_is_reported_once_and_a_lost_link_is_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = bind("127.0.0.1", 0)  # it does not listen
    directory = Listed({"gone": silent.getsockname()})
    one = await start("one", directory)
    async with gateway(directory) as (engine, fleet):
        reads = directory.num_reads
        await until(lambda: directory.num_reads > reads + 20)
        assert caplog.text.count("cannot connect to replica gone") == 1
        for connection in one.clients.values():
            connection.writer.transport.abort()
        await until(lambda: fleet.dispatcher.counters.num_losses == 1)
        await until(lambda: len(fleet.dispatcher.replicas) == 1)
        assert await complete(engine, "r", b"hello") == b"HELLO"
    await one.close()
    silent.close()


@on_loop
async def test_streams_and_new_replicas_survive_a_directory_that_is_away() -> None:
    directory, executor = Listed(), Capitals()
    one = await start("one", directory, executor)
    executor.num_free_steps = 5
    async with gateway(directory) as (engine, fleet):
        assert (fleet.dispatcher.num_starting, fleet.problem) == (2, None)
        running = asyncio.create_task(complete(engine, "r", b"hello" * 10))
        await until(lambda: not executor.gate.is_set())
        directory.is_away = True
        await until(lambda: fleet.problem is not None)
        assert "the directory is away" in str(fleet.problem)
        executor.gate.set()
        assert await running == b"HELLO" * 10
        directory.is_away = False
        two = await start("two", directory)
        await until(lambda: len(fleet.dispatcher.replicas) == 2)
        assert fleet.problem is None
        directory.problem = "the raylet has ended"
        await until(lambda: fleet.problem == "the raylet has ended")
        assert await complete(engine, "s", b"hello") == b"HELLO"
    await one.close()
    await two.close()


def test_a_reader_of_a_file_gets_all_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    with pytest.raises(OSError):
        FileDirectory(path).read()
    for number in range(3):
        announced = Announced(
            replicas={str(i): ("::1", i) for i in range(number)}, num_starting=number, problem="x"
        )
        write_announced(path, announced)
        assert FileDirectory(path).read() == announced
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_is_not_written_any_more_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    for problem in (None, "the raylet has ended"):
        write_announced(path, Announced(replicas={"a": ("::1", 1)}, problem=problem))
        assert FileDirectory(path).read().problem == problem
        os.utime(path, (0, 0))
        found = FileDirectory(path).read()
        assert found.problem == problem if problem else "does not answer" in str(found.problem)
        assert found.replicas == {"a": ("::1", 1)}


@on_loop
async def test_the_number_of_messages_does_not_depend_on_the_number_of_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loop, "HEARTBEAT_SECONDS", LIMIT)
    monkeypatch.setattr(engine_loop, "READ_SECONDS", LIMIT)  # all run from the first step on
    directory, executor = Listed(), Counted()
    server = await start("a", directory, executor)
    async with gateway(directory) as (engine, fleet):
        for number in (1, 16, 256):
            frames, steps = fleet.dispatcher.counters.num_frames, executor.num_steps
            texts = [b"%04d" % i * 10 for i in range(number)]
            executor.gate.clear()
            runs = asyncio.gather(
                *(complete(engine, f"{number}.{i}", text) for i, text in enumerate(texts))
            )
            await until(lambda number=number: server.num_open == number)  # type: ignore[misc]
            executor.gate.set()
            assert await runs == texts
            num_steps = executor.num_steps - steps
            assert 40 <= num_steps <= 44, "all run together"
            # Steps that end together share a message.
            assert 0 < fleet.dispatcher.counters.num_frames - frames <= num_steps + 2
    await server.close()
