"""Fairness: how long a small client waits for its first token beside one that sends 20 times as much.

    python bench/server_fair.py        under two minutes, one JSON object

alone       the small client's time to first token in ms with nobody beside it
fair, fcfs  the same requests with the heavy client's beside them, by the server's queue
share       p90 of that over p90 alone; the goal with the fair queue is at most 2

Both send by the clock (Poisson arrivals), whatever the server does, and the heavy one more than it
can do. What of its requests is open when the small one has its last answer is given up.

The server is set for short steps (`--max-tokens 64`): a newcomer, however fair the queue, waits for
the step that runs and for the prompt that is half computed, so larger steps and longer prompts make
the share larger. It varies from run to run: take several.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server_process import ServerProcess

from headway.lab.asks import Wording, at_rate, random_jobs
from headway.lab.bench import Span
from headway.lab.http_client import Client
from headway.lab.jobs import Job
from headway.lab.load import Load, Outcome, find_model

RATE = 1.0  # the small client's requests a second
TIMES = 20  # the heavy one's, for one of those
INPUT, OUTPUT = Span(200, 300), Span(8, 24)
TUNED = ["--max-tokens", "64", "--max-requests", "16"]
VOCAB = 49_152


def jobs_of(client: str, count: int, rate: float, seed: int) -> list[Job]:
    jobs = at_rate(random_jobs(count, INPUT, OUTPUT, seed), rate, seed)
    return [replace(job, client=client) for job in jobs]


async def small_beside(
    server: ServerProcess, model: str, count: int, times: int, seed: int
) -> tuple[list[Outcome], int]:
    """The small client's outcomes, and how many the heavy one had sent by then.

    Another seed, other prompts; arrivals and lengths are always the same.
    """
    loads = []
    for number in range(2):  # each with connections and prompts of its own
        wording = Wording(model=model, vocab_size=VOCAB, seed=2 * seed + number)
        loads.append(Load(Client(server.address), wording, 300.0, lambda: None))
    small, heavy = loads
    jobs = jobs_of("heavy", times * count, times * RATE, 1) if times else []
    beside = asyncio.create_task(heavy.open_loop(jobs))
    await small.open_loop(jobs_of("small", count, RATE, 0))
    beside.cancel()
    with suppress(asyncio.CancelledError):
        await beside
    return small.outcomes, len(heavy.outcomes)


def first_tokens(outcomes: list[Outcome]) -> dict[str, float]:
    """Times from when a request was due to its first token, in ms; all must have completed."""
    assert not any(outcome.error for outcome in outcomes), [o.detail for o in outcomes if o.error]
    waits = [(outcome.first - outcome.due) * 1e3 for outcome in outcomes]
    cuts = statistics.quantiles(waits, n=10, method="inclusive")
    return {"median": statistics.median(waits), "p90": cuts[8], "max": max(waits)}


def measure(queue: str, count: int, precision: str, *all_times: int) -> list[dict[str, Any]]:
    """One server: the small client beside one that sends so many times as much, for each."""
    results = []
    with ServerProcess(["--queue", queue, "--precision", precision, *TUNED]) as server:
        model = find_model(server.address)
        asyncio.run(small_beside(server, model, 2, 1, seed=100))  # the first of all is slow
        for number, times in enumerate(all_times):
            outcomes, num_heavy = asyncio.run(small_beside(server, model, count, times, number))
            results.append(first_tokens(outcomes) | {"heavy_requests": num_heavy})
        server.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=16, help="of the small client")
    parser.add_argument("--precision", default="quantized")
    asked = parser.parse_args()
    alone, fair = measure("fair", asked.requests, asked.precision, 0, TIMES)
    (fcfs,) = measure("fcfs", asked.requests, asked.precision, TIMES)
    result: dict[str, Any] = {"requests": asked.requests, "alone": alone}
    for name, beside in (("fair", fair), ("fcfs", fcfs)):
        result[name] = beside | {"share": beside["p90"] / alone["p90"]}
    result["ok"] = result["fair"]["share"] <= 2
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
