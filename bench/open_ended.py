"""Chats without max_tokens: throughput and recomputed tokens of the default headroom rule.

    python bench/open_ended.py                           prints one JSON object
    python bench/open_ended.py --trace azure2023_conv.csv    adds lengths from a trace file
    python bench/open_ended.py --url http://127.0.0.1:8000   32 chats against a running server

Every request has max_tokens None and the model's length is 8192, so each may generate thousands of
tokens; most generate a few hundred. Columns: the preset `headway`, the preset `vllm_v1`, and
`headway` with the rule before lengths were learned (shares of the allowed output). Times are
simulated, so the machine does not matter. `first_64_requests_per_second` is 64 over the time at
which the 64th request ended.

With --url nothing is simulated: start `headway serve` once with each preset, send the chats to each
in turn and compare the ratio; a single figure depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.config import SchedulerView
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import adjust, read_jobs
from headway.lab.workload.jobs import ENDS, Job
from headway.lab.workload.synthetic import parse_synthetic
from headway.plan import StepReport
from headway.request import Params
from headway.scheduler import preset
from headway.scheduler.headroom import NUM_MOMENTS, PRIOR, Batch, future_peak

PROFILE = "llama3.1-8b-a100-80gb"
MAX_LENGTH = 8192
CHAT = "prompt=lognormal(300,1.0,16,2000),output=lognormal(220,0.9,4,4000)"
LONG = "prompt=lognormal(300,1.0,16,2000),output=lognormal(1500,0.5,400,6000)"
MIXED = "prompt=lognormal(300,1.0,16,2000),output=0.9*lognormal(220,0.9,4,4000)+0.1*fixed(3000)"
SHARES: deque[float] = deque(maxlen=256)  # what the previous rule learned from, in this run


class OpenEnded(Job):
    """A job that does not set max_tokens."""

    __slots__ = ()

    def params(self, start: float = 0.0) -> Params:
        return replace(super().params(start), max_tokens=None, eos_ids=ENDS)


def open_ended(jobs: list[Job]) -> list[Job]:
    return [
        OpenEnded(
            id=str(place), arrival=job.arrival, pieces=job.pieces, num_output=job.num_output,
            max_tokens=MAX_LENGTH,
        )
        for place, job in enumerate(jobs)
    ]  # fmt: skip


def draw(lengths: str, requests: int, arrivals: str = "at_once") -> list[Job]:
    return parse_synthetic(f"requests={requests},arrivals={arrivals},{lengths}").jobs()


def shift(requests: int, rate: float) -> list[Job]:
    """Short outputs in the first half, long ones in the second."""
    short, long = (draw(part, requests // 2, f"poisson({rate})") for part in (CHAT, LONG))
    start = short[-1].arrival
    return short + [replace(job, arrival=job.arrival + start) for job in long]


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A workload and the number of 16-token KV blocks it is served with."""

    jobs: Callable[[], list[Job]]
    num_blocks: int


REGIMES = {
    "burst of 32": Regime(jobs=lambda: draw(CHAT, 32), num_blocks=3268),
    "burst of 32, cache just holds them": Regime(jobs=lambda: draw(CHAT, 32), num_blocks=1200),
    "burst of 256": Regime(jobs=lambda: draw(CHAT, 256), num_blocks=3268),
    "steady, small cache": Regime(
        jobs=lambda: draw(CHAT, 1000, "poisson(12)"), num_blocks=1024
    ),
    "10 % long outputs": Regime(
        jobs=lambda: draw(MIXED, 800, "poisson(12)"), num_blocks=2048
    ),
    "short, then long outputs": Regime(jobs=lambda: shift(600, 8.0), num_blocks=2048),
    "long outputs from the start": Regime(jobs=lambda: draw(LONG, 256), num_blocks=2048),
}  # fmt: skip


def trace_regimes(path: str) -> dict[str, Regime]:
    """The first 1,000 requests of a trace: at once, and 8 times as fast as they came."""
    jobs = read_jobs(path, limit=1000)
    at_once = [replace(job, arrival=0.0) for job in jobs]
    return {
        "trace, at once": Regime(jobs=lambda: at_once, num_blocks=4096),
        "trace, 8 times as fast": Regime(jobs=lambda: adjust(jobs, None, 8.0), num_blocks=1024),
    }


@dataclass(frozen=True)
class shares_only:
    """The previous rule: every output ends like earlier ones, as a share of what is allowed."""

    deviations: float = 2.5

    def __call__(self, batch: Batch, world: SchedulerView) -> int:
        seen = np.sort(np.concatenate([PRIOR, np.asarray(SHARES)]))
        generated = np.maximum(batch.held - batch.prompt, 0.0) / batch.allowed
        moments = np.linspace(0.0, batch.left.max(), NUM_MOMENTS)[:, None]
        num_longer = len(seen) - np.searchsorted(seen, generated, side="right")
        outlived = np.searchsorted(seen, generated + moments / batch.allowed, side="right")
        alive = (len(seen) - outlived) / np.maximum(num_longer, 1) * (moments <= batch.left)
        blocks = (batch.held + moments) / world.block_size + 0.5
        spread = np.sqrt((alive * (1 - alive) * blocks**2).sum(axis=1))
        peak = ((alive * blocks).sum(axis=1) + self.deviations * spread).max()
        return max(0, int(peak - np.ceil(batch.held / world.block_size).sum()))


def remember_shares(report: StepReport) -> None:
    for request in report.finished:
        SHARES.append(request.num_generated / (request.limit - request.num_prompt))


SCHEDULERS: dict[str, dict[str, Any]] = {
    "headway": {"name": "headway"},
    "vllm_v1": {"name": "vllm_v1"},
    "headway, previous rule": {"name": "headway", "headroom": future_peak(shares_only())},
}


def row(changes: dict[str, Any], regime: Regime) -> dict[str, float]:
    SHARES.clear()
    config = preset(**{"num_blocks": regime.num_blocks, "max_model_len": MAX_LENGTH, **changes})
    jobs = open_ended(regime.jobs())
    run = simulate(jobs, config, load_profile(PROFILE), observers=[remember_shares])
    assert not run.rejected, run.rejected[0]
    summary, ends = summarize(run.metrics), sorted(x.finished for x in run.metrics.requests)
    num_first = min(64, len(ends))
    return {
        "output_tokens_per_second": round(summary["output_tokens_per_second"], 1),
        "ttft_p50": round(summary["ttft"]["p50"], 3),
        "ttft_p99": round(summary["ttft"]["p99"], 3),
        "mean_running": round(summary["per_step"]["seats"], 1),
        "preemptions": summary["preemptions"],
        "recomputed_tokens": summary["recomputed_tokens"],
        f"first_{num_first}_requests_per_second": round(num_first / ends[num_first - 1], 2),
    }


TOPICS = ("rain", "bread", "chess", "rivers", "glass", "tea", "wood", "trains")
QUESTIONS = (
    "What is {} made of?",
    "Say one sentence about {}.",
    "Why do people like {}?",
    "Define {}.",
)


async def send_chats(url: str) -> dict[str, float]:
    """32 chats at once, without max_tokens, one sentence each; the rate and the most that ran."""
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def chat(text: str) -> int:
            messages = [{"role": "user", "content": text}]
            body = {"model": model, "messages": messages, "temperature": 0, "stop": [".", "\n"]}
            answer = await client.post("/v1/chat/completions", json=body)
            return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

        start = perf_counter()
        chats = asyncio.gather(*map(chat, texts))
        most_running = 0
        while not chats.done():
            most_running = max(most_running, await num_running(client))
            await asyncio.sleep(0.2)
        tokens, seconds = sum(await chats), perf_counter() - start
    rate = round(tokens / seconds, 1)
    return {"output_tokens_per_second": rate, "tokens": tokens, "most_running": most_running}


async def num_running(client: httpx.AsyncClient) -> int:
    lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
    return sum(
        int(float(x.split()[-1])) for x in lines if ":num_requests_running" in x and x[0] != "#"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="CSV file of arrivals and lengths; adds two regimes.")
    parser.add_argument("--only", help="Run only the regimes whose name contains this text.")
    parser.add_argument("--url", help="Send 32 chats to the server at this address instead.")
    options = parser.parse_args()
    if options.url:
        print(json.dumps(asyncio.run(send_chats(options.url)), indent=1))
        return
    regimes = REGIMES | (trace_regimes(options.trace) if options.trace else {})
    result: dict[str, Any] = {}
    for name, regime in regimes.items():
        if options.only and options.only not in name:
            continue
        result[name] = {"requests": len(regime.jobs()), "num_blocks": regime.num_blocks}
        for scheduler, changes in SCHEDULERS.items():
            print(f"{name}: {scheduler}", file=sys.stderr)
            result[name][scheduler] = row(changes, regime)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
