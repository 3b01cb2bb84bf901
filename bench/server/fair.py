"""Fairness: a small client's time to first token next to a client that sends 20 times as much.

    python -m bench.server.fair                                         about four minutes
    python -m bench.server.fair --out bench/results/server_fair.json    also write a file

alone           the small client's times to first token in ms, without another client
fair, fcfs      the same requests together with the heavy client's, by the server's queue
times_alone     their p90 divided by the p90 alone; `ok`: at most 2 with the fair queue
heavy           requests of the heavy client, completed ones, and its times to first token

Both clients use an open loop with Poisson arrivals. The heavy client sends more than the server can
process, and starts three seconds earlier. Rounds with and without it alternate on one server, with
the same arrivals and lengths but different prompts, so that a slow phase of the machine affects
both. With fcfs there is one round, because every request waits longer than the one before. Requests
that are open when the small client has its last response are cancelled.

The server uses short steps (`--max-num-batched-tokens 64`), because with any queue a new request
waits for the running step, and a step of 512 tokens takes longer than its whole prompt alone.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bench.harness import Bench, Figures
from bench.server.process import ServerProcess
from headway.lab.loadgen.http_client import Client
from headway.lab.loadgen.load import LoadGenerator, Outcome, find_model
from headway.lab.loadgen.requests import (
    LengthRange,
    RequestFormat,
    random_requests,
    with_poisson_arrivals,
)
from headway.lab.workload.request import WorkloadRequest

RATE = 1.0  # requests per second of the small client
TIMES = 20  # requests of the heavy client per request of the small one
HEAD_START = 3.0  # seconds until requests of the heavy client queue up
ROUND = 20  # requests of the small client
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
    """The outcomes of the small client and of one that sends `times` as many requests.

    Arrivals and lengths depend on the seed; prompts depend on the seed and on `times`.
    """
    loads = []
    for number in range(2):  # with separate connections and prompts
        prompts = 1000 * seed + 2 * times + number
        wording = RequestFormat(model=model, vocab_size=VOCAB, seed=prompts)
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
    """Times in ms from a request's scheduled time to its first token."""
    waits = [(outcome.first - outcome.due) * 1e3 for outcome in outcomes]
    p90 = statistics.quantiles(waits, n=10, method="inclusive")[8]
    return {"median": statistics.median(waits), "p90": p90, "max": max(waits)}


def of_small(outcomes: Outcomes) -> Figures:
    """Results of the small client; all its requests must have completed."""
    assert not any(outcome.error for outcome in outcomes), [o.detail for o in outcomes if o.error]
    return {"requests": len(outcomes)} | first_tokens(outcomes)


def of_heavy(outcomes: Outcomes) -> Figures:
    """Results of the heavy client; times only of requests that have a first token."""
    started = [outcome for outcome in outcomes if outcome.first]
    completed = sum(outcome.num_output > 0 for outcome in outcomes)
    return {"requests": len(outcomes), "completed": completed} | first_tokens(started)


def measure(queue: str, count: int, quantization: str, *all_times: int) -> dict[int, Any]:
    """Run rounds on one server; returns both clients' outcomes by `times`."""
    found: dict[int, tuple[Outcomes, Outcomes]] = {times: ([], []) for times in all_times}
    with ServerProcess(["--queue", queue, "--quantization", quantization, *TUNED]) as server:
        model = find_model(server.address)
        asyncio.run(one_round(server, model, 2, 1, seed=999))  # warm-up
        for seed in range(-(-count // ROUND)):
            size = min(ROUND, count - ROUND * seed)
            for times in all_times:
                outcomes = asyncio.run(one_round(server, model, size, times, seed))
                for kept, new in zip(found[times], outcomes, strict=True):
                    kept += new
        server.stop()
    return found


def compare(count: int, quantization: str) -> Figures:
    fair = measure("fair", count, quantization, 0, TIMES)
    fcfs = measure("fcfs", min(ROUND, count), quantization, TIMES)
    alone = of_small(fair[0][0])
    result: Figures = {"sends_times_as_much": TIMES, "options": TUNED, "alone": alone}
    for name, (small, heavy) in (("fair", fair[TIMES]), ("fcfs", fcfs[TIMES])):
        found = of_small(small)
        found |= {"times_alone": found["p90"] / alone["p90"], "heavy": of_heavy(heavy)}
        result[name] = found
    return result | {"ok": result["fair"]["times_alone"] <= 2}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--requests", type=int, default=60, help="of the small client")
    bench.option("--quantization", default="int8", help="of the bundled model")
    bench.main(lambda asked: compare(asked.requests, asked.quantization))
