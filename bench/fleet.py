"""A fleet on Ray under faults, and its cost: kills, hangs, scaling, overhead, messages.

    python bench/fleet.py kills --rounds 100
    python bench/fleet.py hang
    python bench/fleet.py overhead
    python bench/fleet.py messages

kills: one of two replicas is killed while 32 streams run that use seeds, n = 2, a JSON schema, log
probabilities and stop strings; every stream must equal the same request alone. hang: a replica is
stopped with SIGSTOP. overhead: a server with one replica against a plain one, in turns. messages:
frames from the replica per step with 1 to 256 streams. Prints one JSON object; times are seconds
on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.fleet_streams import (
    MODEL,
    FleetServer,
    Stream,
    all_streams,
    bodies,
    fleet_server,
    once_after,
    one_by_one,
)

NUM_STREAMS = 32


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def lost_after(server: FleetServer, number: int, pid: int, seen: list[float]) -> None:
    """Send a signal to a replica, and note after how many seconds the gateway reports the loss."""
    known, start = len(server.lines), time.perf_counter()
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


def faults(number: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Send a signal to one of two replicas in every round, while all streams run."""
    sent, noticed, gaps = bodies(NUM_STREAMS, max_tokens), list[float](), list[float]()
    totals, back = {"failed": 0, "different": 0}, list[float]()
    # Prompts repeat, and the default rule would send all to the replica that has them cached.
    flags = ("--replicas", "2", "--route", "round_robin", "--log-level", "warning")
    with fleet_server(*flags) as server:
        alone = asyncio.run(one_by_one(server.url, sent))
        control = asyncio.run(all_streams(server.url, sent))
        for place in range(rounds):
            victim = server.replica_pids()[place % 2]
            work = partial(lost_after, server, number, victim, noticed)
            streams = asyncio.run(all_streams(server.url, sent, once_after(100, work)))
            for name, count in compare(streams, alone).items():
                totals[name] += count
            gaps += [stream.longest_gap for stream in streams]
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGCONT)
            back.append(server.wait_for_replicas(2))
            print(f"round {place + 1} of {rounds}: {totals}", file=sys.stderr)
        moves = server.metric("headway_fleet:moves_total")
    usual = [stream.longest_gap for stream in control]
    return {
        "rounds": rounds, "streams": NUM_STREAMS * rounds, **totals, "moves": int(moves),
        "control": compare(control, alone),
        "noticed_p50": statistics.median(noticed), "noticed_max": max(noticed),
        "longest_gap_p50": statistics.median(gaps), "longest_gap_p99": percentile(gaps, 0.99),
        "longest_gap_p99_without_fault": percentile(usual, 0.99),
        "replica_back_p50": statistics.median(back),
    }  # fmt: skip


def _run(url: str, number: int, max_tokens: int) -> dict[str, float]:
    """Time to the first event alone (median of 20), and tokens per second of many streams."""
    plain = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "stream": True}

    def prompt(i: int) -> dict[str, Any]:
        return {**plain, "prompt": f"{time.time_ns()} {i}: a short story", "ignore_eos": True}

    async def first() -> float:
        import httpx

        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            start = time.perf_counter()
            body = {**prompt(0), "max_tokens": 1}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        return time.perf_counter() - start
        raise RuntimeError("no event")

    ttft = statistics.median(asyncio.run(first()) for _ in range(20))
    start = time.perf_counter()
    streams = asyncio.run(all_streams(url, [prompt(i) for i in range(number)]))
    assert not any(stream.error for stream in streams)
    return {"ttft": ttft, "tokens_per_second": number * max_tokens / (time.perf_counter() - start)}


def overhead(rounds: int, max_tokens: int) -> dict[str, Any]:
    """One replica behind the gateway against a plain server, in turns on the same machine."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "fleet": []}
    quiet = ("--log-level", "warning", "--threads", str(os.cpu_count() or 1))
    with fleet_server(*quiet) as plain, fleet_server("--replicas", "1", *quiet) as fleet:
        servers = {"plain": plain, "fleet": fleet}
        for _ in range(rounds + 1):
            for name, server in servers.items():
                found[name].append(_run(server.url, NUM_STREAMS, max_tokens))
                print(f"{name}: {found[name][-1]}", file=sys.stderr)
    medians = {
        name: {key: statistics.median(each[key] for each in runs[1:]) for key in runs[0]}
        for name, runs in found.items()  # the first round warms up
    }
    usual, other = medians["plain"], medians["fleet"]
    return {
        **medians, "added_ttft": other["ttft"] - usual["ttft"],
        "throughput_ratio": other["tokens_per_second"] / usual["tokens_per_second"],
    }  # fmt: skip


def messages(rounds: int, max_tokens: int) -> dict[str, Any]:
    """Frames that the gateway received per step of the engine, by the number of streams."""
    del rounds
    found = {}
    with fleet_server(
        "--replicas", "1", "--max-num-seqs", "256", "--log-level", "warning"
    ) as server:
        for number in (1, 16, 64, 256):
            before = _frames(server)
            start = time.perf_counter()
            _run(server.url, number, max_tokens)
            frames, steps = (b - a for a, b in zip(before, _frames(server), strict=True))
            seconds = time.perf_counter() - start
            found[str(number)] = {
                "frames_per_second": frames / seconds, "frames_per_step": frames / steps,
            }  # fmt: skip
    return found


def _frames(server: FleetServer) -> tuple[float, float]:
    """Frames received by the gateway, and steps of the engines."""
    import httpx

    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    name = r"^headway_fleet:iteration_tokens_total_count\{.*\} (\S+)$"
    steps = re.search(name, text, re.MULTILINE)
    return server.metric("headway_fleet:frames_total"), float(steps[1]) if steps else 0.0


PARTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "kills": lambda rounds, tokens: faults(signal.SIGKILL, rounds, tokens),
    "hang": lambda rounds, tokens: faults(signal.SIGSTOP, rounds, tokens),
    "overhead": overhead,
    "messages": messages,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=24)
    given = parser.parse_args()
    results = {name: PARTS[name](given.rounds, given.max_tokens) for name in given.parts}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
