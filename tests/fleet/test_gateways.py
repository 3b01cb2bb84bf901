"""Several gateway processes over the same replicas: one port, one set of counters."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.engine.queries import DescribeFleet
from headway.fleet.client import FleetClient
from headway.fleet.routing import round_robin
from headway.fleet.settings import FleetSettings
from headway.fleet.shared_counters import GAUGES, NAMES, TOTALS, SharedCounters
from headway.remote.client import SocketClient
from headway.server.process.serve import ServerFactory, bind
from headway.server.process.workers import MakeClient, Supervisor
from tests.support.fleet_replica import replica
from tests.support.held import Hold
from tests.support.processes import FORKS
from tests.support.scripted import END, MiniApp, mini_served
from tests.support.waiting import wait_until

NUM_GATEWAYS = 2


@pytest.mark.parametrize("seed", range(20))
def test_the_sums_of_gateways_never_forget_what_was_counted(seed: int, tmp_path: Path) -> None:
    chance, path = random.Random(seed), tmp_path / "counters"
    SharedCounters.create(path, 3)
    gateways = [SharedCounters(path, number) for number in range(3)]
    own: list[dict[str, Any]] = [dict.fromkeys(NAMES, 0) for _ in gateways]
    counted, sums = dict.fromkeys(TOTALS, 0), {}
    for _ in range(60):
        number = chance.randrange(3)
        if chance.random() < 0.2:  # it was killed, and another one replaces it
            gateways[number] = SharedCounters(path, number)
            own[number] = dict.fromkeys(NAMES, 0)
        name = chance.choice(NAMES)
        gained = chance.randrange(5)
        own[number][name] = gained + (own[number][name] if name in TOTALS else 0)
        counted |= {name: counted[name] + gained} if name in TOTALS else {}
        sums = gateways[number].sums(own[number])
        assert {name: sums[name] for name in TOTALS} == counted
        assert all(isinstance(sums[name], int) for name in NAMES)
        for gauge in GAUGES:
            assert sums[gauge] >= own[number][gauge]
    for gauge in GAUGES:
        assert sums[gauge] == sum(each[gauge] for each in own)


class DescribingApp(MiniApp):
    """GET answers with the counters of the fleet and the worker that was asked."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            found = await self.engine.ask(DescribeFleet())
            self.facts = {name: found[name] for name in NAMES}
            self.engine, engine = _NoPid(), self.engine  # type: ignore[assignment]
            await super().__call__(scope, receive, send)
            self.engine = engine
        else:
            await super().__call__(scope, receive, send)


class _NoPid:
    async def ask(self, _: object) -> int:
        return 0


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Path]]:
    paths = [tmp_path / name for name in "ab"]
    hold = Hold(str(tmp_path / "hold"))
    started = [replica(path, hold) for path in paths]
    hold.release()
    yield paths
    for process in started:
        process.kill()
        process.communicate()


def make_client(replicas: list[Path], counters: Path, number: int) -> FleetClient:
    clients = {path.name: SocketClient(path) for path in replicas}
    settings = FleetSettings(hang_seconds=60.0)
    fleet = FleetClient(clients, block_size=4, route=round_robin, settings=settings)
    fleet.shared = SharedCounters(counters, number)
    return fleet


class Replicas:
    """Replicas that run already, as the backend of gateways."""

    exit_status = None

    def __init__(self, replicas: list[Path], counters: Path) -> None:
        self._make = partial(make_client, replicas, counters)

    def start(self) -> tuple[MakeClient, Any]:
        return self._make, {}

    def stop(self) -> None: ...
    def kill(self) -> None: ...


def test_a_gateway_that_is_killed_is_replaced_and_its_counts_stay(
    replicas: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.server.process.workers.CONTEXT", FORKS)
    counters, num_sent = tmp_path / "counters", 8
    SharedCounters.create(counters, NUM_GATEWAYS)
    factory = ServerFactory(make_engine=partial(mini_served, 0.0), make_app=DescribingApp)
    bound = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"

    def describe() -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(url, timeout=60).json()
        return answer

    def describe_all() -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        wait_until(lambda: found.update({(d := describe())["worker"]: d}) or len(found) >= 2)
        return found

    def check() -> None:
        for number in range(num_sent):
            body = {"id": f"{number}", "prompt": [1, 2, 3], "num_output": 3}
            lines = httpx.post(url, json=body, timeout=60).text.splitlines()
            assert f"[{END}]" in lines[-2] or "end" in lines[-1]
        before = describe_all()
        assert len(before) == NUM_GATEWAYS
        least = max(each["num_frames"] for each in before.values())
        assert least > 0
        killed = next(iter(before))
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in (after := describe_all()) and len(after) == 2)
        assert all(each["num_frames"] >= least for each in describe_all().values())

    backend = Replicas(replicas, counters)
    with ThreadPoolExecutor() as pool:

        def ready(_: object) -> None:
            checked = pool.submit(check)  # while the supervisor watches the gateways
            checked.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
            checks.append(checked)

        checks = list[Future[None]]()
        assert Supervisor(factory, bound, NUM_GATEWAYS, lambda _: backend).run(ready) == 0
        checks[0].result()
