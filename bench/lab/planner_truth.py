"""Predicted against measured: the simulator's answers beside real runs of the same requests.

    python -m bench.lab.planner_truth                       the bundled model on this machine
    python -m bench.lab.planner_truth --shape llama-8b --out bench/results/planner_truth_gpu.json

Measures a profile first, or takes one with --profile. Then runs every pair of workload and settings
in real time, and simulates the same requests with the same settings. `pairs` has the relative error
of each figure, positive if the prediction is too high. `grid` ranks settings by output tokens per
second: rank correlation, and how far the predicted best is from the measured best. Measured figures
are medians of --repeat runs. bfloat16 on a GPU, random weights with --shape.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

from bench.harness import SHAPES, Bench, Figures, log, medians
from headway import LLM, Config, preset
from headway.lab.cost import Profile, load_profile, save_profile
from headway.lab.real.profiling import measure
from headway.lab.real.run import run_workload
from headway.lab.simulate import simulate, with_profile
from headway.lab.summary import summarize
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.stats import RunStats

Values = dict[str, float]
GOALS = {"output_tokens_per_second": 0.05, "end_to_end_mean": 0.07, "ttft_mean": 0.15,
         "tbt_p99": 0.20, "tbt_max": 0.20}  # fmt: skip
Pair = tuple[str, str, str, dict[str, Any]]  # name, workload, preset, settings
# RATE is replaced: a share of the rate at which an offline run of the same requests completes them.
CPU_PAIRS: tuple[Pair, ...] = (
    ("offline", "requests=60,prompt=uniform(16,200),output=uniform(16,96)", "headway", {}),
    ("few rows", "requests=32,prompt=uniform(16,200),output=uniform(16,96)", "headway",
     {"max_num_seqs": 8}),
    ("steady 70 %", "requests=60,arrivals=poisson(0.7*RATE),prompt=lognormal(120,0.7,8,600),"
     "output=lognormal(48,0.7,4,200)", "vllm_v1", {}),
    ("overload 130 %", "requests=60,arrivals=poisson(1.3*RATE),prompt=lognormal(120,0.7,8,600),"
     "output=lognormal(48,0.7,4,200)", "headway", {}),
    ("long prompts, budget 512", "requests=40,arrivals=poisson(0.6*RATE),"
     "prompt=0.9*uniform(16,100)+0.1*fixed(900),output=uniform(16,64)", "vllm_v1",
     {"max_num_batched_tokens": 512}),
    ("long prompts, budget 128", "requests=40,arrivals=poisson(0.6*RATE),"
     "prompt=0.9*uniform(16,100)+0.1*fixed(900),output=uniform(16,64)", "vllm_v1",
     {"max_num_batched_tokens": 128}),
    ("shared prefixes", "requests=60,arrivals=poisson(0.7*RATE),prompt=uniform(8,64),"
     "output=uniform(8,48),prefix=4x256@0.8", "headway", {}),
    ("little memory, recompute", "requests=40,prompt=uniform(16,128),output=uniform(32,96)",
     "vllm_v1", {"num_blocks": 120}),
    ("little memory, swap", "requests=40,prompt=uniform(16,128),output=uniform(32,96)", "vllm",
     {"num_blocks": 120, "num_host_blocks": 120}),
    ("prefill first", "requests=48,arrivals=poisson(0.7*RATE),prompt=uniform(16,200),"
     "output=uniform(16,64)", "nano_vllm", {}),
)  # fmt: skip
GPU_PAIRS: tuple[Pair, ...] = (
    ("offline", "requests=400,prompt=uniform(100,1024),output=uniform(100,1024)", "headway", {}),
    ("few rows", "requests=160,prompt=uniform(100,1024),output=uniform(100,512)", "headway",
     {"max_num_seqs": 32}),
    ("steady 70 %", "requests=400,arrivals=poisson(0.7*RATE),prompt=lognormal(600,0.8,16,6000),"
     "output=lognormal(200,0.7,8,1000)", "vllm_v1", {}),
    ("overload 130 %", "requests=500,arrivals=poisson(1.3*RATE),prompt=lognormal(600,0.8,16,6000),"
     "output=lognormal(200,0.7,8,1000)", "headway", {}),
    ("long prompts, budget 8192", "requests=300,arrivals=poisson(0.6*RATE),"
     "prompt=0.9*uniform(50,400)+0.1*fixed(8000),output=uniform(50,250)", "vllm_v1",
     {"max_num_batched_tokens": 8192}),
    ("long prompts, budget 1024", "requests=300,arrivals=poisson(0.6*RATE),"
     "prompt=0.9*uniform(50,400)+0.1*fixed(8000),output=uniform(50,250)", "vllm_v1",
     {"max_num_batched_tokens": 1024}),
    ("shared prefixes", "requests=400,arrivals=poisson(0.7*RATE),prompt=uniform(50,300),"
     "output=uniform(50,250),prefix=4x2048@0.8", "headway", {}),
    ("little memory, recompute", "requests=300,prompt=uniform(100,600),output=uniform(200,600)",
     "vllm_v1", {"num_blocks": 5000}),
    ("little memory, swap", "requests=300,prompt=uniform(100,600),output=uniform(200,600)", "vllm",
     {"num_blocks": 5000, "num_host_blocks": 5000}),
    ("prefill first", "requests=300,arrivals=poisson(0.7*RATE),prompt=uniform(100,1024),"
     "output=uniform(50,400)", "nano_vllm", {}),
)  # fmt: skip
CPU_GRID = ("requests=40,prompt=0.8*uniform(16,100)+0.2*fixed(400),output=uniform(8,64)",
            {"max_num_seqs": (2, 6, 16, 40), "max_num_batched_tokens": (48, 128, 512)})  # fmt: skip
GPU_GRID = ("requests=300,prompt=0.8*uniform(50,400)+0.2*fixed(3000),output=uniform(50,400)",
            {"max_num_seqs": (16, 48, 128, 256), "max_num_batched_tokens": (512, 2048, 8192)})  # fmt: skip


class Runner:
    """A loaded model, its profile, and both ways to run a workload."""

    def __init__(self, llm: LLM, profile: Profile, repeat: int) -> None:
        self.llm, self.profile, self.repeat = llm, profile, repeat
        self.is_on_gpu = llm.loaded.is_on_gpu

    def config(self, name: str, settings: dict[str, Any]) -> Config:
        """A preset with the limits that the model was loaded with, and then these settings."""
        loaded = self.llm.config
        limits = {
            key: getattr(loaded, key)
            for key in ("block_size", "num_blocks", "num_host_blocks", "max_num_seqs",
                        "max_num_batched_tokens", "max_model_len")
        }  # fmt: skip
        return with_profile(preset(name, **{**limits, **settings}), self.profile)

    def predicted(self, requests: list[WorkloadRequest], config: Config) -> Values:
        is_async = self.llm.engine.async_scheduling
        return figures(simulate(requests, config, self.profile, async_scheduling=is_async).metrics)

    def measured(self, requests: list[WorkloadRequest], config: Config) -> tuple[Values, Values]:
        """Medians over the runs, and their spread: (largest - smallest) / median."""
        runs = [figures(run_workload(self.llm, requests, config)) for _ in range(self.repeat)]
        middle = medians(runs)
        spread = {
            key: (max(run[key] for run in runs) - min(run[key] for run in runs)) / (value or 1)
            for key, value in middle.items()
        }
        return middle, spread

    def requests(self, text: str, config: Config) -> list[WorkloadRequest]:
        """The workload, with RATE replaced by the rate that this setting completes offline."""
        head, _, rest = text.partition("poisson(")
        if not rest:
            return parse_synthetic(text).generate()
        share, _, tail = rest.partition("*RATE)")
        offline = parse_synthetic(f"{head}at_once{tail}").generate()
        seconds = simulate(offline, config, self.profile).metrics.ended_at
        rate = float(share) * len(offline) / seconds
        return parse_synthetic(f"{head}poisson({rate:.4f}){tail}").generate()


def figures(stats: RunStats) -> Values:
    summary = summarize(stats)
    return {
        "output_tokens_per_second": summary["output_tokens_per_second"],
        "end_to_end_mean": summary["end_to_end"]["mean"],
        "ttft_mean": summary["ttft"]["mean"],
        "tbt_p99": summary["time_between_tokens"]["p99"],
        "tbt_max": summary["time_between_tokens"]["max"],
        "preemptions": summary["preemptions"],
        "steps": summary["steps"],
    }


def pair(runner: Runner, each: Pair) -> Figures:
    name, text, base, settings = each
    config = runner.config(base, settings)
    requests = runner.requests(text, config)
    predicted = runner.predicted(requests, config)
    measured, spread = runner.measured(requests, config)
    errors = {key: predicted[key] / measured[key] - 1 for key in GOALS if measured[key]}
    misses = [key for key, error in errors.items() if abs(error) > GOALS[key]]
    shown = ", ".join(f"{key} {error:+.1%}" for key, error in errors.items())
    log(f"{name}: {shown}")
    return {
        "name": name, "workload": text, "preset": base, "settings": settings, "errors": errors,
        "misses": misses, "predicted": predicted, "measured": measured, "spread": spread,
    }  # fmt: skip


def grid(runner: Runner, text: str, knobs: dict[str, tuple[int, ...]]) -> Figures:
    key, rows = "output_tokens_per_second", []
    requests = parse_synthetic(text).generate()
    for values in product(*knobs.values()):
        settings = dict(zip(knobs, values, strict=True))
        config = runner.config("headway", settings)
        measured, _ = runner.measured(requests, config)
        rows.append((settings, runner.predicted(requests, config)[key], measured[key]))
        log(rows[-1])
    best = max(measured for _, _, measured in rows)
    chosen = max(rows, key=lambda row: row[1])
    return {
        "workload": text,
        "rows": [
            {"settings": settings, "predicted": predicted, "measured": measured}
            for settings, predicted, measured in rows
        ],
        "chosen": chosen[0],
        "chosen_below_best": 1 - chosen[2] / best,
        "rank_correlation": spearman([row[1] for row in rows], [row[2] for row in rows]),
    }


def spearman(left: list[float], right: list[float]) -> float:
    """The correlation of ranks; there are no ties among measured times."""
    ranks = [[sorted(values).index(value) for value in values] for values in (left, right)]
    return statistics.correlation(*ranks)


def load(options: Namespace) -> LLM:
    if options.shape:
        return LLM(str(SHAPES / options.shape), load_format="dummy", max_model_len=20000)
    # Rows and budget as large as any pair needs; every pair runs with at most these.
    return LLM(options.model, max_num_seqs=64, max_num_batched_tokens=512)


def measure_all(options: Namespace) -> Figures:
    with load(options) as llm:
        return run_all(llm, options)


def run_all(llm: LLM, options: Namespace) -> Figures:
    if options.profile:
        profile, held_out = load_profile(options.profile), None
    else:
        found = measure(llm, options.shape or options.model, is_quick=False)
        profile, held_out = found.profile, found.error._asdict()
        log((held_out, *found.warnings))
    if options.save_profile:
        save_profile(profile, options.save_profile)
    runner = Runner(llm, profile, options.repeat)
    pairs = GPU_PAIRS if runner.is_on_gpu else CPU_PAIRS
    wanted = options.only or [*(name for name, *_ in pairs), "grid"]
    rows = [pair(runner, each) for each in pairs if each[0] in wanted]
    return {
        "model": options.shape or options.model, "device": llm.loaded.device,
        "held_out": held_out, "goals": GOALS, "pairs": rows,
        "grid": grid(runner, *(GPU_GRID if runner.is_on_gpu else CPU_GRID))
        if "grid" in wanted else None,
    }  # fmt: skip


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m")
    bench.option("--shape", help="a folder of bench/shapes, with random weights")
    bench.option("--profile", help="use this profile instead of measuring one")
    bench.option("--save-profile", type=Path, help="write the measured profile here")
    bench.option("--repeat", type=int, default=3, help="measured runs of each pair")
    bench.option("--only", nargs="*", help="names of pairs, or grid")
    bench.main(measure_all)
