"""Replicas in processes of their own, which are stopped and killed by signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.fleet.client import FleetClient
from headway.fleet.routing import round_robin
from headway.fleet.settings import FleetSettings
from headway.remote.client import SocketClient
from tests.support.fleet_replica import replica
from tests.support.held import Hold
from tests.support.processes import Forked
from tests.support.scripted import END, script
from tests.support.waiting import on_loop, until

# A replica that is not stopped may pause for less without being lost.
SETTINGS = FleetSettings(hang_seconds=10.0, max_replica_losses=3)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, Forked]]:
    hold = Hold(str(tmp_path / "hold"))
    started = {name: replica(tmp_path / name, hold) for name in "abc"}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@on_loop
async def test_killed_and_stopped_processes_are_replaced(
    processes: dict[str, Forked], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients = {name: SocketClient(tmp_path / name) for name in "abc"}
    hold = Hold(str(tmp_path / "hold"))
    fleet = FleetClient(clients, block_size=4, route=round_robin, settings=SETTINGS)
    engine, replicas = AsyncEngine(fleet), fleet.dispatcher.replicas
    await engine.start()

    async def one(id: str) -> list[int]:
        tokens = list[int]()
        async for updates in engine.stream(id, [5] * 9, script(80)):
            tokens += [token for update in updates for token in update.tokens]
        return tokens

    def generates(name: str) -> bool:
        open = replicas[name].open.values()
        return len(open) == 3 and any(request.num_tokens for request in open)

    hold.set(20)
    runs = [asyncio.create_task(one(str(i))) for i in range(9)]
    await until(lambda: all(map(generates, "abc")))
    processes["a"].send_signal(signal.SIGSTOP)
    processes["b"].kill()
    hold.release()
    outputs = await asyncio.gather(*runs)
    assert outputs == [[1] * 79 + [END]] * 9
    counters = fleet.dispatcher.counters
    assert counters.num_losses == 2 and counters.num_moves >= 6 and counters.num_failed == 0
    (why,) = [text for text in caplog.messages if "replica a was lost" in text]
    assert "sent nothing for 10 s" in why
    processes["a"].send_signal(signal.SIGCONT)
    await fleet.add("a", SocketClient(tmp_path / "a"))
    await until(lambda: replicas["a"].num_reports > 1)
    # It drops the requests that it had.
    await until(
        lambda: (
            [(r["num_running"], r["num_open"]) for r in fleet.describe()["replicas"]]
            == [(0, 0), (0, 0)]
        )
    )
    await engine.close()
