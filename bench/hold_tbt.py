"""The chunk rule hold_tbt against fixed token budgets: longest stalls and times to first token.

    python bench/hold_tbt.py         prints one JSON object

Preset vllm_v1 on the 8B profile. For every workload and target: `split_any` with the default
budget, `hold_tbt(target)`, and the largest fixed budget whose longest stall does not exceed the
target, found by bisection. Times are milliseconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset

PROFILE = load_profile("llama3.1-8b-a100-80gb")
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


def main() -> None:
    results: dict[str, Any] = {}
    for name, text in WORKLOADS.items():
        requests = parse_synthetic(text).generate()
        rows = results[name] = {"split_any, budget 8192": shown(run(requests, "split_any"))}
        for target in TARGETS:
            budget = largest_budget(requests, target)
            rows[f"hold_tbt({target})"] = shown(run(requests, f"hold_tbt({target})"))
            fixed = shown(run(requests, "split_any", budget))
            rows[f"split_any, budget {budget}, for {target} s"] = fixed
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
