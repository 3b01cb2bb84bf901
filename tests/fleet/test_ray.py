"""Replicas on a real Ray: kills, hangs, scaling, monitoring, and what is left at the end.

One test, because it starts Ray once. The engines have no model, so that a replica starts in few
seconds; `model_on_the_same_ray` is the exception. bench/fleet.py repeats it with a model.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from bench.fleet_streams import (
    FleetServer,
    Stream,
    all_streams,
    bodies,
    command,
    descendants,
    fleet_server,
    once_after,
    one_by_one,
)
from headway.fleet.options import environment

pytestmark = pytest.mark.skipif(  # without an import, which takes a second of every collection
    find_spec("ray") is None, reason="Ray is not installed: pip install 'headway[ray]'"
)
LETTERS = ("-c", "from tests.support.letters_fleet import main; main()")
NUM_KILLS = 10
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
FEATURES: list[dict[str, Any]] = [{}, {"n": 2}, {"logprobs": 2}, {"stop": ["ZA"]}, {"n": 3}]


def letter_bodies(number: int = 32, length: int = 30) -> list[dict[str, Any]]:
    """Requests for capitals, each with another prompt."""
    return [
        {
            "model": "letters", "prompt": (ALPHABET[i % 26 :] + ALPHABET * 5)[:length], "stream": True,
            "max_tokens": length, **FEATURES[i % len(FEATURES)],
        }
        for i in range(number)
    ]  # fmt: skip


def texts(body: dict[str, Any]) -> list[str]:
    """The texts that a request for capitals must get."""
    capitals = body["prompt"].upper()
    cut = capitals.find("ZA") if "stop" in body else len(capitals)
    return [capitals[k:][:cut] for k in range(body.get("n", 1))]


def check_letters(streams: list[Stream], sent: list[dict[str, Any]]) -> None:
    """No stream failed, and each has every token once."""
    assert [stream.error for stream in streams if stream.error] == []
    for stream, body in zip(streams, sent, strict=True):
        found = [choice for _, choice in sorted(stream.choices.items())]
        assert [choice["text"] for choice in found] == texts(body)
        assert all(choice["finish"] in ("stop", "length") for choice in found)
        for choice in found:
            wanted = len(choice["text"]) if "logprobs" in body else 0
            assert len(choice["logprobs"]) == wanted


def run_with(server: FleetServer, sent: list[dict[str, Any]], work: Callable[[], object]) -> None:
    """Send requests for capitals; do `work` while they run, and wait for both."""
    done = threading.Event()

    def disturb() -> None:
        work()
        done.set()

    check_letters(asyncio.run(all_streams(server.url, sent, once_after(200, disturb))), sent)
    assert done.wait(30), "the work did not end"


def kills(server: FleetServer) -> None:
    """The oldest replica is killed while 32 streams run, as soon as another can take them.

    Ray starts new replicas meanwhile.
    """
    for _ in range(NUM_KILLS):
        server.wait_for_replicas(2, 3)
        moves = server.metric("headway_fleet:moves_total")
        victim = server.replica_pids()[0]
        run_with(server, letter_bodies(), partial(os.kill, victim, signal.SIGKILL))
        assert server.metric("headway_fleet:moves_total") > moves
    assert server.metric("headway_fleet:deaths_total") == NUM_KILLS
    server.wait_for_replicas(3)


def hang(server: FleetServer) -> None:
    """A stopped process is noticed within 2 s, and comes back when it continues."""
    victim, noticed = server.replica_pids()[0], list[float]()

    def stop() -> None:
        start, known = time.perf_counter(), len(server.lines)
        os.kill(victim, signal.SIGSTOP)
        while not any("was lost" in line for line in server.lines[known:]):
            time.sleep(0.01)
        noticed.append(time.perf_counter() - start)
        os.kill(victim, signal.SIGCONT)

    run_with(server, letter_bodies(), stop)
    assert noticed[0] <= 2.5, "2 s, and some time for a machine that runs other tests"
    server.wait_for_replicas(3)


def redeploy(server: FleetServer) -> None:
    """Three replicas are replaced by one; they hand their long streams over and end at once."""
    moves, deaths = (server.metric(f"headway_fleet:{name}_total") for name in ("moves", "deaths"))
    known, old = len(server.lines), server.replica_pids()
    drained, ended = list[float](), list[float]()

    def scale() -> None:
        assert server.process.stdin is not None, "a pipe was asked for"
        server.process.stdin.write("1\n")
        server.process.stdin.flush()
        while len(ended) < len(old):
            time.sleep(0.02)
            now = time.perf_counter()
            num_drained = sum("is drained" in line for line in server.lines[known:])
            drained.extend([now] * (num_drained - len(drained)))
            ended.extend([now] * (sum(not command(pid) for pid in old) - len(ended)))

    run_with(server, letter_bodies(8, 200), scale)
    server.wait_for_replicas(1)
    seconds = [end - start for start, end in zip(drained, ended, strict=True)]
    assert max(seconds) <= 2.0, "a replica that stops is free within 2 s"
    assert server.metric("headway_fleet:moves_total") > moves
    assert server.metric("headway_fleet:deaths_total") == deaths
    assert server.metric("headway_fleet:drains_total") == len(old)
    assert server.metric("headway_fleet:failed_total") == 0


def monitoring(server: FleetServer) -> None:
    """Every replica is in the metrics and on the live page, and the sums are sums."""
    assert server.client.get("/health").json() == {"status": "ok"}
    text = server.client.get("/metrics").text
    each = re.findall(r'^headway:generation_tokens_total\{.*replica="(.+)"\} (\S+)$', text, re.M)
    total = re.search(r"^headway_fleet:generation_tokens_total\{.*\} (\S+)$", text, re.M)
    assert len({name for name, _ in each}) == 3 and total is not None
    assert sum(float(value) for _, value in each) == float(total[1])
    rows = server.client.get("/live").json()["replicas"]
    assert sorted(row["name"] for row in rows) == sorted(name for name, _ in each)


def processes(server: FleetServer) -> None:
    """Replicas have the server's priority, and no process of Ray runs without a purpose."""
    pids = descendants(server.process.pid)
    assert not re.search(r"dashboard\.py|monitor\.py", " ".join(command(pid) for pid in pids))
    usual = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in server.replica_pids()} == {usual}


def model_on_the_same_ray(server: FleetServer, given: dict[str, str]) -> None:
    """`headway serve --ray-address`: a killed replica, then a signal that ends only its own app."""
    address = next(line.split()[1] for line in server.lines if line.startswith("ray "))
    flags = ("--replicas", "2", "--threads", "1", "--device", "cpu", "--ray-address", address)
    before = set(server.replica_pids())
    with fleet_server(*flags, environment=given) as real:
        sent = bodies(6, 8)
        alone = asyncio.run(one_by_one(real.url, sent))
        victim = max(set(server.replica_pids()) - before)
        kill = partial(os.kill, victim, signal.SIGKILL)
        streams = asyncio.run(all_streams(real.url, sent, once_after(10, kill)))
        assert [stream.error for stream in streams if stream.error] == []
        assert [s.choices for s in streams] == [s.choices for s in alone]
    check_letters(asyncio.run(all_streams(server.url, sent := letter_bodies(4))), sent)


def test_a_fleet_on_ray() -> None:
    given = environment(None)
    with fleet_server(program=LETTERS, environment=given) as server:
        monitoring(server)
        processes(server)
        kills(server)
        hang(server)
        model_on_the_same_ray(server, given)
        redeploy(server)
        started = descendants(server.process.pid)
    deadline = time.perf_counter() + 10
    while left := [command(pid) for pid in started if command(pid)]:
        assert time.perf_counter() < deadline, left
        time.sleep(0.1)
