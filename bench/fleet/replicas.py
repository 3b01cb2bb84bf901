"""A fleet on Ray under faults, and its cost: kills, hangs, scaling, overhead, messages.

    python -m bench.fleet.replicas --only kills --rounds 100
    python -m bench.fleet.replicas --only ttft --rounds 20

kills         one of two replicas is killed while 32 streams run that use seeds, n = 2, a JSON
              schema, log probabilities and stop strings; every stream must equal the same request
              alone
late_restart  the same, but Ray starts the new replica only after the round, so that it takes no CPU
              from the streams
hang          a replica is stopped with SIGSTOP
ttft, throughput    a server with one replica against a plain one, in turns; the processes of the
              other server are stopped meanwhile
messages      frames from the replica per step with 1 to 256 streams
moves         the gateway's own time to move requests

The first three print the parts of the pauses: `added` is what the fault adds except the re-prefill;
`others` are pauses of streams that stayed. The client measures when events come, the gateway logs
when it noticed the fault and when a moved request continued, both by the clock of this machine.
Prints one JSON object; times are seconds on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import NamedTuple

from bench.fleet.streams import (
    MODEL,
    FleetServer,
    Stream,
    all_streams,
    bodies,
    descendants,
    fleet_server,
    one_by_one,
    served,
    stopped,
    streams_during,
)
from bench.harness import Bench, Figures, log, percentile

bench = Bench(__doc__)
bench.option("--rounds", type=int, default=5)
bench.option("--max-tokens", type=int, default=24)
bench.option("--model", default=MODEL, help="for ttft and throughput")
NUM_STREAMS = 32
NUM_IN_TURN = 10  # requests one after the other, for the time to the first token


CONTINUES = re.compile(r"request (\S+) continues on replica \S+ after (\S+) s")


class Pause(NamedTuple):
    """The pause of a stream that had to move, from the event before the fault to the next one, and
    the parts that add up to it.
    """

    moved: float
    before: float  # from the event to the fault
    noticed: float  # from the fault until the gateway knows
    resent: float  # until the request is sent to a replica
    resume: float  # until that replica's first token: re-prefill
    shown: float  # until the client's next event
    added: float  # by the fault: noticed, resent and shown


class Pauses:
    """Those of all rounds, and the longest gaps of the streams that did not move."""

    def __init__(self) -> None:
        self.moved: list[Pause] = []
        self.others: list[float] = []

    def add(self, streams: Iterable[Stream], fault: float, lines: Iterable[str]) -> None:
        """Add a round; `fault` is a time of perf_counter, `lines` are the gateway's log as JSON."""
        offset = time.time() - time.perf_counter()
        log = [json.loads(line) for line in lines if line.startswith("{")]
        times = [datetime.fromisoformat(each["time"]).timestamp() - offset for each in log]
        texts = [each["message"] for each in log]
        lost = next(at for at, text in zip(times, texts, strict=True) if "was lost" in text)
        found = [(at, CONTINUES.search(text)) for at, text in zip(times, texts, strict=True)]
        resumed = {match[1]: (at, float(match[2])) for at, match in found if match}
        for stream in streams:
            gaps = stream.gaps_after(fault)
            ends = [each for id, each in resumed.items() if id.startswith(stream.id)]
            moved = [gap for gap in gaps if ends and gap[0] <= ends[0][0] - ends[0][1] < gap[1]]
            if moved:
                (event, after), (token, resume) = moved[0], ends[0]
                self.moved.append(Pause(
                    after - event, fault - event, lost - fault, token - resume - lost, resume,
                    after - token, after - fault - resume,
                ))  # fmt: skip
            elif gaps and not ends:
                self.others.append(max(after - before for before, after in gaps))

    def summary(self) -> Figures:
        """Median, 99th percentile and maximum of each, and the parts of the largest `added`."""
        values = dict(zip(Pause._fields, zip(*self.moved, strict=True), strict=False))
        found: Figures = {
            name: {"p50": statistics.median(each), "p99": percentile(each, 0.99), "max": max(each)}
            for name, each in (values | {"others": self.others}).items() if each
        }  # fmt: skip
        if self.moved:
            found["largest_added"] = max(self.moved, key=lambda each: each.added)._asdict()
        return found


def lost_after(
    server: FleetServer, number: int, pid: int, sent: list[float], seen: list[float]
) -> None:
    """Send a signal to a replica; note when, and after how many seconds the loss is reported."""
    known, start = len(server.lines), time.perf_counter()
    sent.append(start)
    os.kill(pid, number)
    while not any("was lost" in line for line in server.lines[known:]):
        if time.perf_counter() - start > 60:
            return
        time.sleep(0.002)
    seen.append(time.perf_counter() - start)


def compare(streams: list[Stream], alone: list[Stream]) -> dict[str, int]:
    """Streams that failed, and streams that differ from the request alone."""
    return {
        "failed": sum(stream.error is not None for stream in streams),
        "different": sum(s.choices != a.choices for s, a in zip(streams, alone, strict=True)),
    }


def faults(number: int, asked: Namespace, late: bool = False) -> Figures:
    """Send a signal to one of two replicas in every round, while all streams run.

    `late`: Ray does not replace the replica before the end of the round.
    """
    rounds, moments, noticed = asked.rounds, list[float](), list[float]()
    sent = bodies(NUM_STREAMS, asked.max_tokens)
    pauses, back = Pauses(), list[float]()
    totals = {"failed": 0, "different": 0}
    # Prompts repeat, and the default rule would send all to the replica that has them cached.
    flags = ("--replicas", "2", "--route", "round_robin", "--log-format", "json")
    with fleet_server(*flags) as server:
        alone = asyncio.run(one_by_one(server.url, sent))
        control = asyncio.run(all_streams(server.url, sent))
        for place in range(rounds):
            victim, known = server.replica_pids()[place % 2], len(server.lines)
            work = partial(lost_after, server, number, victim, moments, noticed)
            with stopped(server.ray_pids("ServeController") if late else []):
                streams = streams_during(server.url, sent, work, after=100)
            for name, count in compare(streams, alone).items():
                totals[name] += count
            pauses.add(streams, moments[-1], server.lines[known:])
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
            back.append(server.wait_for_replicas(2))
            log(f"round {place + 1} of {rounds}: {totals}")
        moves = server.metric("headway_fleet:moves_total")
        resumed = server.metric("headway_fleet:resumed_tokens_total")
    usual = [stream.longest_gap for stream in control]
    return {
        "rounds": rounds, "streams": NUM_STREAMS * rounds, **totals, "moves": int(moves),
        "resumed_tokens": int(resumed), "control": compare(control, alone),
        "noticed_p50": statistics.median(noticed), "noticed_max": max(noticed),
        "pause": pauses.summary(), "longest_gap_p99_without_fault": percentile(usual, 0.99),
        "replica_back_p50": statistics.median(back),
    }  # fmt: skip


@bench.part
def kills(asked: Namespace) -> Figures:
    return faults(signal.SIGKILL, asked)


@bench.part
def late_restart(asked: Namespace) -> Figures:
    return faults(signal.SIGKILL, asked, late=True)


@bench.part
def hang(asked: Namespace) -> Figures:
    return faults(signal.SIGSTOP, asked)


def _body(i: int, max_tokens: int) -> Figures:
    return {
        "model": MODEL, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "prompt": f"{time.time_ns()} {i}: a short story", "ignore_eos": True,
    }  # fmt: skip


def _first(server: FleetServer) -> float:
    """Seconds from a request alone to its first event."""
    start = time.perf_counter()
    with server.client.stream("POST", "/v1/completions", json=_body(0, 1)) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found = time.perf_counter() - start
    return found


def _throughput(server: FleetServer, number: int, max_tokens: int) -> float:
    """Tokens per second of many streams."""
    start = time.perf_counter()
    sent = [_body(i, max_tokens) for i in range(number)]
    streams = asyncio.run(all_streams(server.url, sent))
    assert not any(stream.error for stream in streams)
    return number * max_tokens / (time.perf_counter() - start)


Measure = Callable[[FleetServer], list[float]]


def in_turns(measure: Measure, asked: Namespace) -> dict[str, list[float]]:
    """What is measured of a plain server and of one with one replica, in turns on this machine.

    The processes of the other server do nothing meanwhile. The first turn of each warms up.
    """
    quiet = ("--log-level", "warning", "--threads", str(os.cpu_count() or 1))
    server = partial(fleet_server, *quiet, program=served(asked.model))
    with server() as plain, server("--replicas", "1") as fleet:
        servers = {"plain": plain, "fleet": fleet}
        trees = {"fleet": _processes(plain), "plain": _processes(fleet)}  # of the other server
        found: dict[str, list[float]] = {name: [] for name in servers}
        for place in range(-1, asked.rounds):
            for name in sorted(servers, reverse=bool(place % 2)):  # neither is always first
                with stopped(trees[name]):
                    values = measure(servers[name])
                log(f"{name}: {statistics.median(values):.4f}")
                found[name] += values if place >= 0 else []
    return found


@bench.part
def ttft(asked: Namespace) -> Figures:
    """Seconds to the first token of requests alone, ten in each turn."""
    found = in_turns(lambda server: [_first(server) for _ in range(NUM_IN_TURN)], asked)
    medians = {name: statistics.median(values) for name, values in found.items()}
    p10 = {name: percentile(values, 0.1) for name, values in found.items()}
    return {
        "requests": asked.rounds * NUM_IN_TURN, "p50": medians, "p10": p10,
        "added_p50": medians["fleet"] - medians["plain"], "added_p10": p10["fleet"] - p10["plain"],
    }  # fmt: skip


@bench.part
def throughput(asked: Namespace) -> Figures:
    """Tokens per second of many streams."""
    found = in_turns(lambda server: [_throughput(server, NUM_STREAMS, asked.max_tokens)], asked)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**found, "ratio": medians["fleet"] / medians["plain"]}


def _processes(server: FleetServer) -> list[int]:
    return [server.process.pid, *descendants(server.process.pid)]


@bench.part
def messages(asked: Namespace) -> Figures:
    """Frames that the gateway received per step of the engine, by the number of streams.

    20 requests come one by one before.
    """
    found = {}
    flags = ("--replicas", "1", "--max-num-seqs", "256", "--log-level", "warning")
    with fleet_server(*flags) as server:
        for number in (1, 16, 64, 256):
            before = _frames(server)
            start = time.perf_counter()
            for _ in range(20):
                _first(server)
            _throughput(server, number, asked.max_tokens)
            frames, steps = (b - a for a, b in zip(before, _frames(server), strict=True))
            seconds = time.perf_counter() - start
            found[str(number)] = {
                "frames_per_second": frames / seconds, "frames_per_step": frames / steps
            }  # fmt: skip
    return found


@bench.part
def moves(asked: Namespace) -> Figures:
    """Time in which a gateway moves the requests of a lost replica; the replicas are scripted."""
    from tests.support.scripted_fleet import World

    found = []
    for _ in range(asked.rounds):
        world = World()
        world.add("a")
        world.add("b")
        for _ in range(NUM_STREAMS):
            world.submit(length=asked.max_tokens)
        for _ in range(asked.max_tokens // 2):
            world.step()
        start = time.perf_counter()
        world.fleet.lose(world.fleet.replicas["a"], "killed")
        world.fleet.flush()
        found.append(time.perf_counter() - start)
    return {"requests": world.fleet.counters.num_moves, "seconds": statistics.median(found)}


def _frames(server: FleetServer) -> tuple[float, float]:
    """Frames received by the gateway, and steps of the engines."""
    text = server.client.get("/metrics").text
    name = r"^headway_fleet:iteration_tokens_total_count\{.*\} (\S+)$"
    steps = re.search(name, text, re.MULTILINE)
    return server.metric("headway_fleet:frames_total"), float(steps[1]) if steps else 0.0


def stop(number: int, frame: object) -> None:
    sys.exit(143)  # let stopped processes continue


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    bench.main()
