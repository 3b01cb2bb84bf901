"""Rules beside simpler ones, simulated on the 8B profile: hold_tbt, and chats without max_tokens.

    python -m bench.scheduler.rules                                     prints one JSON object
    python -m bench.scheduler.rules --only open_ended --trace azure2023_conv.csv     adds lengths
    python -m bench.scheduler.rules --only open_ended --url http://127.0.0.1:8000    32 chats

hold_tbt    the chunk rule against fixed token budgets, preset vllm_v1. For every workload and
            target: `split_any` with the default budget, `hold_tbt(target)`, and the largest fixed
            budget whose longest stall does not exceed the target, found by bisection. Longest
            stalls and times to first token in milliseconds
open_ended  the default headroom rule. Every request has max_tokens None and max_model_len is 8192,
            so each may generate thousands of tokens; most generate a few hundred. Columns: the
            presets `headway` and `vllm_v1`, and `headway` with a headroom rule that learns shares
            of the allowed output instead of lengths. `first_64_requests_per_second` is 64 divided
            by the time at which the 64th request ended

With --url nothing is simulated: start `headway serve` once with each preset, send the chats to each
in turn and compare the ratio; a single figure depends on the load of the machine.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from bench.harness import Bench, Figures, log
from headway import SchedulerView, preset
from headway.events import Event, ended_by
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.files import adjust, read_workload
from headway.lab.workload.request import ENDS, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.request import RequestParams
from headway.scheduler.policies.headroom import MOMENTS, PRIOR, Forecast, future_peak

bench = Bench(__doc__)
bench.option("--trace", help="workload file; adds two regimes to open_ended")
bench.option("--regime", help="run only the regimes whose name contains this text")
bench.option("--url", help="send 32 chats to the server at this address instead")
PROFILE = load_profile("llama3.1-8b-a100-80gb")
# hold_tbt.
TARGETS = (0.03, 0.05, 0.1)  # seconds
MAX_BUDGET, MIN_BUDGET, CLOSE = 8192, 16, 4  # tokens
WORKLOADS = {
    "chat": "requests=400,arrivals=poisson(6),prompt=lognormal(1200,1.0),output=lognormal(150,0.8)",
    "long prompts": "requests=150,arrivals=poisson(1.2),prompt=lognormal(6000,0.8),output=lognormal(200,0.6)",
    "short prompts": "requests=500,arrivals=poisson(20),prompt=lognormal(300,0.6),output=lognormal(120,0.8)",
    "bursts": "requests=300,arrivals=bursty(5,3),prompt=lognormal(1500,0.9),output=lognormal(150,0.8)",
}  # fmt: skip


def run(requests: list[WorkloadRequest], chunk: str, budget: int = MAX_BUDGET) -> Summary:
    config = preset(
        "vllm_v1", chunk=chunk, max_num_batched_tokens=budget, num_blocks=PROFILE.num_blocks(16)
    )
    return summarize(simulate(requests, config, PROFILE).metrics)


def largest_budget(requests: list[WorkloadRequest], target: float) -> int:
    """The largest fixed budget that keeps the target; MIN_BUDGET if none does."""
    low, high = MIN_BUDGET, MAX_BUDGET
    while high - low > CLOSE:
        middle = (low + high) // 2
        keeps = run(requests, "split_any", middle)["longest_stall"]["max"] <= target
        low, high = (middle, high) if keeps else (low, middle)
    return low


def shown(summary: Summary) -> dict[str, Any]:
    return {
        f"{name}_{mark}_ms": round(summary[key][mark] * 1e3, 1)
        for key, name, marks in (
            ("longest_stall", "stall", ("p50", "p99", "max")), ("ttft", "ttft", ("mean", "p50", "p99")),
        )
        for mark in marks
    }  # fmt: skip


@bench.part
def hold_tbt(_: Namespace) -> Figures:
    results: Figures = {}
    for name, text in WORKLOADS.items():
        requests = parse_synthetic(text).generate()
        rows = results[name] = {"split_any, budget 8192": shown(run(requests, "split_any"))}
        for target in TARGETS:
            budget = largest_budget(requests, target)
            rows[f"hold_tbt({target})"] = shown(run(requests, f"hold_tbt({target})"))
            fixed = shown(run(requests, "split_any", budget))
            rows[f"split_any, budget {budget}, for {target} s"] = fixed
    return results


# Chats without max_tokens.
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


def without_max_tokens(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    return [
        OpenEnded(id=str(place), arrival=each.arrival, pieces=each.pieces,
                  num_output=each.num_output, max_tokens=MAX_LENGTH)
        for place, each in enumerate(requests)
    ]  # fmt: skip


def draw(lengths: str, requests: int, arrivals: str = "at_once") -> list[WorkloadRequest]:
    return parse_synthetic(f"requests={requests},arrivals={arrivals},{lengths}").generate()


def shift(requests: int, rate: float) -> list[WorkloadRequest]:
    """Short outputs in the first half, long ones in the second."""
    short, long = (draw(part, requests // 2, f"poisson({rate})") for part in (CHAT, LONG))
    start = short[-1].arrival
    return short + [replace(request, arrival=request.arrival + start) for request in long]


@dataclass(frozen=True)
class Regime:
    """A workload and the number of 16-token KV blocks it is served with."""

    requests: Callable[[], list[WorkloadRequest]]
    num_blocks: int


REGIMES = {
    "burst of 32": Regime(lambda: draw(CHAT, 32), 3268),
    "burst of 32, cache just holds them": Regime(lambda: draw(CHAT, 32), 1200),
    "burst of 256": Regime(lambda: draw(CHAT, 256), 3268),
    "steady, small cache": Regime(lambda: draw(CHAT, 1000, "poisson(12)"), 1024),
    "10 % long outputs": Regime(lambda: draw(MIXED, 800, "poisson(12)"), 2048),
    "short, then long outputs": Regime(lambda: shift(600, 8.0), 2048),
    "long outputs from the start": Regime(lambda: draw(LONG, 256), 2048),
}  # fmt: skip


def trace_regimes(path: str) -> dict[str, Regime]:
    """The first 1,000 requests of a trace: all at once, and 8 times as fast as recorded."""
    requests = read_workload(path, limit=1000)
    at_once = [replace(request, arrival=0.0) for request in requests]
    return {
        "trace, at once": Regime(lambda: at_once, 4096),
        "trace, 8 times as fast": Regime(lambda: adjust(requests, None, 8.0), 1024),
    }


@dataclass(frozen=True)
class shares_only:
    """Headroom rule: outputs end at the same shares of max_tokens as earlier ones."""

    deviations: float = 2.5

    def __call__(self, batch: Forecast, view: SchedulerView) -> int:
        seen = np.sort(np.concatenate([PRIOR, np.asarray(SHARES)]))
        generated = np.maximum(batch.held - batch.prompt, 0.0) / batch.allowed
        moments = MOMENTS * batch.left.max()
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
    requests = without_max_tokens(regime.requests())
    run = simulate(requests, config, PROFILE, observers=[remember_shares])
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
    "What is {} made of?", "Say one sentence about {}.", "Why do people like {}?", "Define {}."
)  # fmt: skip


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


@bench.part
def open_ended(asked: Namespace) -> Figures:
    if asked.url:
        return asyncio.run(send_chats(asked.url))
    result: Figures = {}
    for name, regime in (REGIMES | (trace_regimes(asked.trace) if asked.trace else {})).items():
        if asked.regime and asked.regime not in name:
            continue
        result[name] = {"requests": len(regime.requests()), "num_blocks": regime.num_blocks}
        for scheduler, changes in SCHEDULERS.items():
            log(f"{name}: {scheduler}")
            result[name][scheduler] = row(changes, regime)
    return result


if __name__ == "__main__":
    bench.main()
