"""`headway demo`: static against continuous batching, and the presets side by side, simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from rich.console import Console

from headway.cli.commands.simulate import run_all
from headway.cli.options import common as options
from headway.cli.view import render
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.presets import PRESETS

PROFILE = "llama3.1-8b-a100-80gb"
WORKLOAD = (
    "requests=150,arrivals=poisson(20),prompt=lognormal(500,0.8),"
    "output=lognormal(150,0.8),prefix=3x256@0.4"
)
MAX_NUM_SEQS, LONG, SHORT, NUM_WAITING = 8, 500, 10, 350
SMALL = {"num_blocks": 1200, "num_host_blocks": 1200, "max_num_seqs": 64}
WIDTH = 40
SHADES = " ▁▂▃▄▅▆▇█"


def demo_command(json_: options.Json = False) -> None:
    """Compare static with continuous batching, and all presets, on small simulated workloads."""
    console, profile = Console(), load_profile(PROFILE)
    running = {name: running_per_step(name) for name in ("static", "vllm_v1", "headway")}
    shares = {name: sum(counts[:LONG]) / LONG / MAX_NUM_SEQS for name, counts in running.items()}
    requests = parse_synthetic(WORKLOAD).generate()
    configs = {name: options.make_config(name, profile, SMALL) for name in PRESETS}
    summaries = run_all(requests, configs, profile, False)
    if json_:
        print(json.dumps({"utilization": shares, "presets": summaries}, indent=2))
        return
    console.print(
        f"\n[bold]Running requests per step[/], at most {MAX_NUM_SEQS}. One request generates "
        f"{LONG} tokens,\n{MAX_NUM_SEQS - 1 + NUM_WAITING} requests generate {SHORT}. Percentage: "
        "utilization while the long request runs.\n"
    )
    longest = max(map(len, running.values()))
    for name, counts in running.items():
        console.print(
            f"  {name:8}[cyan]{bars(counts, longest)}[/]{shares[name]:5.0%}, {len(counts):,} steps "
            "in total",
            highlight=False,
        )
    console.print()
    title = f"{len(requests)} requests with shared prefixes on {profile.name}, small KV cache"
    console.print(render.comparison(title, summaries))
    console.print(
        "\n[dim]recomp: tokens recomputed after preemptions; between tokens: p50/p99[/]"
        "\nNext: [bold]headway simulate --help[/], [bold]headway presets[/], "
        "docs/policies.md"
    )


def running_per_step(name: str) -> list[float]:
    """Running requests at every step: one long request, and short ones that can replace each other."""
    space, lengths = TokenSpace(), [LONG, *[SHORT] * (MAX_NUM_SEQS - 1 + NUM_WAITING)]
    requests = [
        WorkloadRequest(id=str(i), pieces=(space.take(16),), num_output=length, max_tokens=length)
        for i, length in enumerate(lengths)
    ]
    profile = load_profile(PROFILE)
    config = replace(options.make_config(name, profile, {}), max_num_seqs=MAX_NUM_SEQS)
    return list(simulate(requests, config, profile).metrics.steps["running"])


def bars(values: list[float], longest: int) -> str:
    """A row of bars, each the mean of a few steps; as wide as its share of the longest run."""
    width = max(1, round(WIDTH * len(values) / longest))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / max(1, b - a) for a, b in pairwise(bounds)]
    shades = (SHADES[round(mean / MAX_NUM_SEQS * (len(SHADES) - 1))] for mean in means)
    return "".join(shades).ljust(WIDTH)
