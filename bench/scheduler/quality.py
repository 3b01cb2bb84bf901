"""Quality of decisions: steps, preemptions and recomputed tokens on nano-vLLM's workload.

    python -m bench.scheduler.quality         prints one JSON object
    python -m bench.scheduler.quality --seeds 10 [--profiles NAME ...]     on random workloads

256 requests, input and output each uniform in 100-1024, all submitted at the start, max_num_seqs
512, max_num_batched_tokens 16,384, 16-token blocks, KV caches of 65,536 and 32,768 tokens. `known`:
every request generates max_tokens. `unknown`: the outputs are the same, but max_tokens is 1024 for
all, so that the scheduler does not know where they end. Rows are preset vllm_v1 with one slot
changed, as named. `vllm_measured` has the measurements of vLLM V1 (steps, preemptions, recomputed
tokens; plain and with watermarks). It ignores max_tokens, so it compares with both kinds.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from random import Random
from typing import Any

from bench.harness import Bench, Figures
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset

POOLS = (65_536, 32_768)
NUMBERS = {"max_num_seqs": 512, "max_num_batched_tokens": 16_384, "block_size": 16}
V1 = {"name": "vllm_v1"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "nano_vllm": {"name": "nano_vllm"},
    "vllm_v1": V1,
    "watermark(0.01)": {**V1, "headroom": "watermark(0.01)"},
    "watermark(0.05)": {**V1, "headroom": "watermark(0.05)"},
    "back_off(watermark(0.01))": {**V1, "headroom": "back_off(watermark(0.01))"},
    "reserve_outputs(1.0)": {**V1, "headroom": "reserve_outputs(1.0)"},
    "future_peak(limit)": {**V1, "headroom": "future_peak(limit)"},
    "future_peak(learned)": {**V1, "headroom": "future_peak(learned)"},
    "future_peak(limit), shortest_first":
        {**V1, "headroom": "future_peak(limit)", "queue": "shortest_first"},
    "future_peak(learned), shortest_first":
        {**V1, "headroom": "future_peak(learned)", "queue": "shortest_first"},
    "victim least_work": {**V1, "victim": "least_work"},
    "victim fewest_private_blocks": {**V1, "victim": "fewest_private_blocks"},
    "swap": {**V1, "swap": "swap", "num_host_blocks": 4096},
    "headway": {"name": "headway"},
}  # fmt: skip
VLLM_MEASURED = {
    "65536": {"plain": [2510, 161, 66447], "0.01": [2519, 60, 29310], "0.05": [2570, 18, 11527]},
    "32768": {"plain": [4406, 198, 70153], "0.05": [4481, 17, 10253]},
}


def nano_vllm_workload(unknown_lengths: bool = False) -> list[WorkloadRequest]:
    """nano-vLLM's benchmark: 256 requests at once, input and output each 100 to 1024 tokens.

    The lengths are those that its benchmark draws after seed(0). With `unknown_lengths` the outputs
    are the same, but max_tokens is 1024 for all: the scheduler does not know where they end.
    """
    random, space = Random(0), TokenSpace()
    prompts: list[range] = []
    for _ in range(256):
        prompts.append(space.take(random.randint(100, 1024)))
        for _ in prompts[-1]:
            random.randint(0, 10_000)  # nano-vLLM draws a token here
    outputs = [random.randint(100, 1024) for _ in prompts]
    return [
        WorkloadRequest(
            id=str(place), pieces=(prompt,), num_output=output,
            max_tokens=1024 if unknown_lengths else output,
        )
        for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]  # fmt: skip


def row(changes: dict[str, Any], num_tokens: int, is_unknown: bool) -> dict[str, int]:
    config = preset(**{**NUMBERS, "num_blocks": num_tokens // 16, **changes})
    run = simulate(nano_vllm_workload(is_unknown), config, load_profile("qwen3-0.6b-h200"))
    summary = summarize(run.metrics)
    return {
        "steps": summary["steps"],
        "preemptions": summary["preemptions"],
        "recomputed": summary["recomputed_tokens"],
        "swapped_blocks": summary["swapped_blocks"]["out"],
    }


SEEDED = ("vllm_v1", "headway", "nano_vllm")  # the first is the one that others are compared with
PROFILES = ("qwen3-0.6b-h200", "llama3.1-8b-a100-80gb")
LENGTHS = "requests=256,prompt=uniform(100,1024),output=uniform(100,1024)"


def seeded_run(name: str, profile: str, pool: int, is_unknown: bool, seed: int) -> dict[str, float]:
    config = preset(name, **NUMBERS, num_blocks=pool // 16)
    text = f"{LENGTHS},seed={seed}" + (",max_tokens=1024" if is_unknown else "")
    run = simulate(parse_synthetic(text).generate(), config, load_profile(profile))
    summary = summarize(run.metrics)
    return {
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "mean_ttft": summary["ttft"]["mean"],
        "preemptions": summary["preemptions"],
    }


def spread(runs: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and deviation of each figure, and its ratio to `base` where that is another preset."""
    found: dict[str, Any] = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        found[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values)}
        if runs is not base and key != "preemptions":
            ratios = [run[key] / other[key] for run, other in zip(runs, base, strict=True)]
            found[key]["ratio"] = [statistics.mean(ratios), min(ratios), max(ratios)]
    return found


def seeded(num_seeds: int, profiles: list[str]) -> dict[str, Any]:
    """The same distributions of lengths, drawn again for each seed, on each profile.

    For each preset: mean and standard deviation over seeds and, for presets other than the first,
    the ratio to the first on the same seed (mean, lowest, highest).
    """
    result: dict[str, Any] = {"seeds": num_seeds, "ratio_to": SEEDED[0]}
    for profile in profiles:
        for kind, is_unknown in (("known", False), ("unknown", True)):
            for pool in POOLS:
                runs = {
                    name: [
                        seeded_run(name, profile, pool, is_unknown, seed)
                        for seed in range(1, num_seeds + 1)
                    ]
                    for name in SEEDED
                }
                result[f"{profile}, {kind}, {pool} tokens"] = {
                    name: spread(each, runs[SEEDED[0]]) for name, each in runs.items()
                }
    return result


def fixed() -> dict[str, Any]:
    result: dict[str, Any] = {"columns": ["steps", "preemptions", "recomputed"]}
    for kind, is_unknown in (("known", False), ("unknown", True)):
        result[kind] = {
            str(pool): {name: row(c, pool, is_unknown) for name, c in SCHEDULERS.items()}
            for pool in POOLS
        }
    result["vllm_measured"] = VLLM_MEASURED
    return result


def measure(asked: Namespace) -> Figures:
    if asked.seeds is None:
        return fixed()
    if asked.seeds < 2:
        raise SystemExit("--seeds must be 2 or more: a spread needs two runs")
    return seeded(asked.seeds, asked.profiles)


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--seeds", type=int, help="run seeds 1 to N of the workload; 2 or more")
    bench.option("--profiles", nargs="+", default=list(PROFILES), help="with --seeds")
    bench.main(measure)
