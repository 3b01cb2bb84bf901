"""Chats without max_tokens: throughput and recomputed tokens of the default headroom rule.

    python bench/open_ended.py                           prints one JSON object
    python bench/open_ended.py --trace azure2023_conv.csv    adds lengths from a trace file
    python bench/open_ended.py --url http://127.0.0.1:8000   32 chats against a running server

Every request has max_tokens None and max_model_len is 8192, so each may generate thousands of
tokens; most generate a few hundred. Columns: the preset `headway`, the preset `vllm_v1`, and
`headway` with a headroom rule that learns shares of the allowed output instead of lengths. Times are
simulated, so they do not depend on this machine. `first_64_requests_per_second` is 64 divided by the
time at which the 64th request ended.

With --url nothing is simulated: start `headway serve` once with each preset, send the chats to each
in turn and compare the ratio; a single figure depends on the load of the machine.
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
from headway.events import Event, ended_by
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.files import adjust, read_workload
from headway.lab.workload.request import ENDS, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.request import RequestParams
from headway.scheduler import preset
from headway.scheduler.policies.headroom import NUM_MOMENTS, PRIOR, Forecast, future_peak

PROFILE = "llama3.1-8b-a100-80gb"
MAX_LENGTH = 8192
CHAT = "prompt=lognormal(300,1.0,16,2000),output=lognormal(220,0.9,4,4000)"
LONG = "prompt=lognormal(300,1.0,16,2000),output=lognormal(1500,0.5,400,6000)"
MIXED = "prompt=lognormal(300,1.0,16,2000),output=0.9*lognormal(220,0.9,4,4000)+0.1*fixed(3000)"
SHARES: deque[float] = deque(maxlen=256)  # shares that the earlier rule has seen in this run


class OpenEnded(WorkloadRequest):
    """A request without max_tokens."""

    __slots__ = ()

    def params(self, start: float = 0.0) -> RequestParams:
        return replace(super().params(start), max_tokens=None, eos_ids=ENDS)


def open_ended(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    return [
        OpenEnded(
            id=str(place), arrival=request.arrival, pieces=request.pieces, num_output=request.num_output,
            max_tokens=MAX_LENGTH,
        )
        for place, request in enumerate(requests)
    ]  # fmt: skip


def draw(lengths: str, requests: int, arrivals: str = "at_once") -> list[WorkloadRequest]:
    return parse_synthetic(f"requests={requests},arrivals={arrivals},{lengths}").generate()


def shift(requests: int, rate: float) -> list[WorkloadRequest]:
    """Short outputs in the first half, long ones in the second."""
    short, long = (draw(part, requests // 2, f"poisson({rate})") for part in (CHAT, LONG))
    start = short[-1].arrival
    return short + [replace(request, arrival=request.arrival + start) for request in long]


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A workload and the number of 16-token KV blocks it is served with."""

    requests: Callable[[], list[WorkloadRequest]]
    num_blocks: int


REGIMES = {
    "burst of 32": Regime(requests=lambda: draw(CHAT, 32), num_blocks=3268),
    "burst of 32, cache just holds them": Regime(requests=lambda: draw(CHAT, 32), num_blocks=1200),
    "burst of 256": Regime(requests=lambda: draw(CHAT, 256), num_blocks=3268),
    "steady, small cache": Regime(
        requests=lambda: draw(CHAT, 1000, "poisson(12)"), num_blocks=1024
    ),
    "10 % long outputs": Regime(
        requests=lambda: draw(MIXED, 800, "poisson(12)"), num_blocks=2048
    ),
    "short, then long outputs": Regime(requests=lambda: shift(600, 8.0), num_blocks=2048),
    "long outputs from the start": Regime(requests=lambda: draw(LONG, 256), num_blocks=2048),
}  # fmt: skip


def trace_regimes(path: str) -> dict[str, Regime]:
    """The first 1,000 requests of a trace: all at once, and 8 times as fast as recorded."""
    requests = read_workload(path, limit=1000)
    at_once = [replace(request, arrival=0.0) for request in requests]
    return {
        "trace, at once": Regime(requests=lambda: at_once, num_blocks=4096),
        "trace, 8 times as fast": Regime(
            requests=lambda: adjust(requests, None, 8.0), num_blocks=1024
        ),
    }


@dataclass(frozen=True)
class shares_only:
    """Headroom rule: outputs end at the same shares of max_tokens as earlier ones."""

    deviations: float = 2.5

    def __call__(self, batch: Forecast, view: SchedulerView) -> int:
        seen = np.sort(np.concatenate([PRIOR, np.asarray(SHARES)]))
        generated = np.maximum(batch.held - batch.prompt, 0.0) / batch.allowed
        moments = np.linspace(0.0, batch.left.max(), NUM_MOMENTS)[:, None]
        num_longer = len(seen) - np.searchsorted(seen, generated, side="right")
        outlived = np.searchsorted(seen, generated + moments / batch.allowed, side="right")
        alive = (len(seen) - outlived) / np.maximum(num_longer, 1) * (moments <= batch.left)
        blocks = (batch.held + moments) / view.block_size + 0.5
        spread = np.sqrt((alive * (1 - alive) * blocks**2).sum(axis=1))
        peak = ((alive * blocks).sum(axis=1) + self.deviations * spread).max()
        return max(0, int(peak - np.ceil(batch.held / view.block_size).sum()))


def remember_shares(event: Event) -> None:
    for request in ended_by(event):
        SHARES.append(request.num_generated / (request.limit - request.num_prompt))


SCHEDULERS: dict[str, dict[str, Any]] = {
    "headway": {"name": "headway"},
    "vllm_v1": {"name": "vllm_v1"},
    "headway, shares only": {"name": "headway", "headroom": future_peak(shares_only())},
}


def row(changes: dict[str, Any], regime: Regime) -> dict[str, float]:
    SHARES.clear()
    config = preset(**{"num_blocks": regime.num_blocks, "max_model_len": MAX_LENGTH, **changes})
    requests = open_ended(regime.requests())
    run = simulate(requests, config, load_profile(PROFILE), observers=[remember_shares])
    assert not run.rejected, run.rejected[0]
    summary, ends = summarize(run.metrics), sorted(x.finished for x in run.metrics.requests)
    num_first = min(64, len(ends))
    return {
        "output_tokens_per_second": round(summary["output_tokens_per_second"], 1),
        "ttft_p50": round(summary["ttft"]["p50"], 3),
        "ttft_p99": round(summary["ttft"]["p99"], 3),
        "mean_running": round(summary["per_step"]["running"], 1),
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
    """Send 32 chats at once without max_tokens; returns the rate and the maximum running."""
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
        max_running = 0
        while not chats.done():
            max_running = max(max_running, await num_running(client))
            await asyncio.sleep(0.2)
        tokens, seconds = sum(await chats), perf_counter() - start
    rate = round(tokens / seconds, 1)
    return {"output_tokens_per_second": rate, "tokens": tokens, "max_running": max_running}


async def num_running(client: httpx.AsyncClient) -> int:
    lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
    return sum(
        int(float(x.split()[-1])) for x in lines if ":num_requests_running" in x and x[0] != "#"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="Workload file; adds two regimes.")
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
        result[name] = {"requests": len(regime.requests()), "num_blocks": regime.num_blocks}
        for scheduler, changes in SCHEDULERS.items():
            print(f"{name}: {scheduler}", file=sys.stderr)
            result[name][scheduler] = row(changes, regime)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
