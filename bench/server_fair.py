"""Fairness: how long a small client waits for its first token beside one that sends 20 times as much.

    python bench/server_fair.py                                         about four minutes
    python bench/server_fair.py --out bench/results/server_fair.json    also to a file

alone           the small client's times to first token in ms, with nobody beside it
fair, fcfs      the same requests with the heavy client's beside them, by the server's queue
times_alone     p90 of those over p90 alone; `ok`: at most 2 with the fair queue
heavy           what the other client sent and got, and its own times to first token so far

Both send by the clock (Poisson arrivals), whatever the server does, and the heavy one more than it
can do; it begins three seconds earlier. Alone and beside it alternate in rounds on one server, with
the same arrivals and lengths and other prompts, so that a slow moment of the machine hits both. With
fcfs there is one round: every request waits longer than the one before. What is open when the
small client has its last answer is given up.

The server is set for short steps (`--max-num-batched-tokens 64`): however fair the queue is, a newcomer waits
for the step that runs, and a step of 512 tokens takes longer than all of its prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server_process import ServerProcess

from headway.lab.loadgen.http_client import Client
from headway.lab.loadgen.load import LoadGenerator, Outcome, find_model
from headway.lab.loadgen.requests import (
    LengthRange,
    RequestFormat,
    random_requests,
    with_poisson_arrivals,
)
from headway.lab.workload.request import WorkloadRequest

RATE = 1.0  # the small client's requests a second
TIMES = 20  # the heavy one's, for one of those
HEAD_START = 3.0  # seconds: by then the heavy client's requests queue
ROUND = 20  # of the small client's requests
INPUT, OUTPUT = LengthRange(200, 300), LengthRange(8, 24)
TUNED = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
VOCAB = 49_152
Outcomes = list[Outcome]


def jobs_of(
    client: str, count: int, rate: float, seed: int, start: float = 0.0
) -> list[WorkloadRequest]:
    jobs = with_poisson_arrivals(random_requests(count, INPUT, OUTPUT, seed), rate, seed)
    return [replace(job, client=client, arrival=start + job.arrival) for job in jobs]


async def one_round(
    server: ServerProcess, model: str, count: int, times: int, seed: int
) -> tuple[Outcomes, Outcomes]:
    """The outcomes of the small client and of one that sends so many times as much beside it.

    Arrivals and lengths are those of the seed; the prompts are of the seed and of `times`.
    """
    loads = []
    for number in range(2):  # each with connections and prompts of its own
        wording = RequestFormat(
            model=model, vocab_size=VOCAB, seed=1000 * seed + 2 * times + number
        )
        loads.append(LoadGenerator(Client(server.address), wording, 300.0, lambda: None))
    small, heavy = loads
    jobs = jobs_of("small", count, RATE, seed, HEAD_START if times else 0.0)
    num_heavy = int(times * RATE * jobs[-1].arrival)
    others = jobs_of("heavy", num_heavy, times * RATE, seed + 1_000_000) if times else []
    beside = asyncio.create_task(heavy.open_loop(others))
    await small.open_loop(jobs)
    beside.cancel()
    with suppress(asyncio.CancelledError):
        await beside
    return small.outcomes, heavy.outcomes


def first_tokens(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Times in ms from when a request was due to its first token."""
    waits = [(outcome.first - outcome.due) * 1e3 for outcome in outcomes]
    p90 = statistics.quantiles(waits, n=10, method="inclusive")[8]
    return {"median": statistics.median(waits), "p90": p90, "max": max(waits)}


def of_small(outcomes: Outcomes) -> dict[str, Any]:
    """All its requests must have completed."""
    assert not any(outcome.error for outcome in outcomes), [o.detail for o in outcomes if o.error]
    return {"requests": len(outcomes)} | first_tokens(outcomes)


def of_heavy(outcomes: Outcomes) -> dict[str, Any]:
    """Of those that had a first token: the others wait longer still."""
    begun = [outcome for outcome in outcomes if outcome.first]
    completed = sum(outcome.num_output > 0 for outcome in outcomes)
    return {"requests": len(outcomes), "completed": completed} | first_tokens(begun)


def measure(queue: str, count: int, quantization: str, *all_times: int) -> dict[int, Any]:
    """One server: both clients' outcomes in rounds, by how many times as much the other sends."""
    found: dict[int, tuple[Outcomes, Outcomes]] = {times: ([], []) for times in all_times}
    with ServerProcess(["--queue", queue, "--quantization", quantization, *TUNED]) as server:
        model = find_model(server.address)
        asyncio.run(one_round(server, model, 2, 1, seed=999))  # the first of all is slow
        for seed in range(-(-count // ROUND)):
            size = min(ROUND, count - ROUND * seed)
            for times in all_times:
                outcomes = asyncio.run(one_round(server, model, size, times, seed))
                for kept, new in zip(found[times], outcomes, strict=True):
                    kept += new
        server.stop()
    return found


def compare(count: int, quantization: str) -> dict[str, Any]:
    fair = measure("fair", count, quantization, 0, TIMES)
    fcfs = measure("fcfs", min(ROUND, count), quantization, TIMES)
    alone = of_small(fair[0][0])
    result: dict[str, Any] = {"sends_times_as_much": TIMES, "options": TUNED, "alone": alone}
    for name, (small, heavy) in (("fair", fair[TIMES]), ("fcfs", fcfs[TIMES])):
        found = of_small(small)
        found |= {"times_alone": found["p90"] / alone["p90"], "heavy": of_heavy(heavy)}
        result[name] = found
    return result | {"ok": result["fair"]["times_alone"] <= 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of the small client")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    result = {"commit": commit.stdout.strip(), **compare(asked.requests, asked.quantization)}
    text = json.dumps(result, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
