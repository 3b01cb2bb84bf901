"""Draft rules, simulated: `by_cost` beside every fixed number of drafts, from 1 to 256 requests.

    python -m bench.scheduler.drafts                              prints one JSON object
    python -m bench.scheduler.drafts --profiles NAME ... --loads 1 8 64 --accept 0.6

All requests of a cell arrive at once, with 256 prompt tokens and 256 output tokens, and each draft
is right with the probability `accept`. Figures are output tokens per second, with preset vllm_v1:
without drafts, with the best of `fixed(1)` to `fixed(8)` or none, and with `by_cost`. `of_best` and
`of_none` compare by_cost with these; `lowest` has the lowest of all cells. Cells with few requests
are means over seeds, so that at least 32 requests count. Each profile runs without and with async
scheduling, which drafts make wait.
"""

from __future__ import annotations

from argparse import Namespace
from statistics import fmean

from bench.harness import Bench, Figures, log
from headway.lab.cost import Profile, known_profiles, load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset

MOST = 8
NUM_COUNTED = 32  # requests of a cell, over all seeds
OF_BEST, OF_NONE = 0.98, 0.99  # what by_cost must reach
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPT = (0.3, 0.6, 0.8)


def tokens_per_second(
    draft: str, load: int, accept: float, profile: Profile, *, is_async: bool = False
) -> float:
    """The mean over seeds."""
    config = preset("vllm_v1", num_blocks=profile.num_blocks(16), draft=draft)
    found = []
    for seed in range(-(-NUM_COUNTED // load)):
        text = f"requests={load},prompt=256,output=256,accept={accept},seed={seed}"
        requests = parse_synthetic(text).generate()
        run = simulate(requests, config, profile, async_scheduling=is_async)
        found.append(summarize(run.metrics)["output_tokens_per_second"])
    return fmean(found)


def cell(load: int, accept: float, profile: Profile, *, is_async: bool = False) -> Figures:
    rules = ["none", *(f"fixed({count})" for count in range(1, MOST + 1))]
    fixed = [tokens_per_second(r, load, accept, profile, is_async=is_async) for r in rules]
    own = tokens_per_second(f"by_cost(most={MOST})", load, accept, profile, is_async=is_async)
    best = max(fixed)
    return {
        "none": round(fixed[0], 1), "best": round(best, 1), "best_rule": rules[fixed.index(best)],
        "by_cost": round(own, 1), "of_best": round(own / best, 4), "of_none": round(own / fixed[0], 4),
    }  # fmt: skip


def measure(asked: Namespace) -> Figures:
    report: Figures = {}
    for name in asked.profiles:
        for is_async in (False, True):
            title = f"{name}, {'async' if is_async else 'sync'}"
            log(title)
            report[title] = {
                f"{accept}": {
                    f"{load}": cell(load, accept, load_profile(name), is_async=is_async)
                    for load in asked.loads
                }
                for accept in asked.accept
            }
    cells = [c for each in report.values() for row in each.values() for c in row.values()]
    lowest = {name: min(each[name] for each in cells) for name in ("of_best", "of_none")}
    is_ok = lowest["of_best"] >= OF_BEST and lowest["of_none"] >= OF_NONE
    return {"lowest": lowest, "ok": is_ok, **report}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--profiles", nargs="+", default=known_profiles())
    bench.option("--loads", nargs="+", type=int, default=list(LOADS), help="concurrent requests")
    bench.option("--accept", nargs="+", type=float, default=list(ACCEPT))
    bench.main(measure)
