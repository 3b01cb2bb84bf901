"""Replicas in processes of their own, which are stopped and killed by signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.engine.async_engine import AsyncEngine
from headway.fleet.client import FleetClient
from headway.fleet.settings import FleetSettings
from headway.fleet.transport.links import ClientLink
from headway.server.process.ipc import SocketClient
from tests.support.scripted import END, script
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.support.fleet_replica", str(tmp_path / name)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for name in "abc"
    }  # fmt: skip
    for process in started.values():
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def link(folder: Path, name: str) -> ClientLink:
    return ClientLink(name, SocketClient(folder / name))


def test_killed_and_stopped_processes_are_replaced_within_two_seconds(
    processes: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    async def run() -> None:
        links = [link(tmp_path, name) for name in "abc"]
        fleet = FleetClient(links, block_size=4, settings=FleetSettings(max_deaths=3))
        engine, loop = AsyncEngine(fleet), asyncio.get_running_loop()
        longest, begun = 0.0, set[str]()  # seconds between two updates of one request
        await engine.start()

        async def one(id: str) -> list[int]:
            nonlocal longest
            tokens, latest = list[int](), loop.time()
            async for updates in engine.stream(id, [5] * 9, script(80)):
                longest, latest = max(longest, loop.time() - latest), loop.time()
                begun.add(id)
                tokens += [token for update in updates for token in update.tokens]
            return tokens

        runs = [asyncio.create_task(one(str(i))) for i in range(9)]
        await until(lambda: len(begun) == len(runs))
        processes["a"].send_signal(signal.SIGSTOP)
        processes["b"].kill()
        outputs = await asyncio.gather(*runs)
        assert outputs == [[1] * 79 + [END]] * 9
        counters = fleet.dispatcher.counters
        assert counters.num_deaths == 2 and counters.num_moves >= 6 and counters.num_failed == 0
        assert 1.0 < longest < 4.0, "the pause: 2 s to notice, and the prefill elsewhere"
        processes["a"].send_signal(signal.SIGCONT)
        await fleet.add(link(tmp_path, "a"))
        await asyncio.sleep(0.5)  # it has dropped what was on board
        assert [(r["num_running"], r["num_open"]) for r in fleet.describe()["replicas"]] == [
            (0, 0), (0, 0),
        ]  # fmt: skip
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 30))
