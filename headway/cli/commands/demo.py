"""`headway demo`: what continuous batching is for, in two pictures. `make run` runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from rich.console import Console

from headway.cli.commands.compare import run_all
from headway.cli.options import common as options
from headway.cli.view import render
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.jobs import Job, TokenSpace
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.run_stats import RunStats
from headway.scheduler.presets import PRESETS

PROFILE = "llama3.1-8b-a100-80gb"
WORKLOAD = (
    "requests=150,arrivals=poisson(20),prompt=lognormal(500,0.8),"
    "output=lognormal(150,0.8),prefix=3x256@0.4"
)
NUM_SEATS, LONG, SHORT, NUM_WAITING = 8, 500, 10, 350
SMALL = {"num_blocks": 1200, "num_host_blocks": 1200, "max_num_seqs": 64}
WIDTH = 40
SHADES = " ▁▂▃▄▅▆▇█"


def demo_command(json_: options.Json = False) -> None:
    """Compare static with continuous batching and the presets, on small workloads."""
    console, profile = Console(), load_profile(PROFILE)
    seats = {name: seats_in_use(name) for name in ("static", "vllm_v1", "headway")}
    shares = {name: sum(used[:LONG]) / LONG / NUM_SEATS for name, used in seats.items()}
    jobs = parse_synthetic(WORKLOAD).jobs()
    configs = {name: options.make_config(name, profile, SMALL) for name in PRESETS}
    summaries = run_all(jobs, configs, profile, False)
    if json_:
        print(json.dumps({"utilisation": shares, "presets": summaries}, indent=2))
        return
    console.print(
        f"\n[bold]Seats in use, step by step.[/] {NUM_SEATS} seats; one request of {LONG} tokens, "
        f"seven of {SHORT},\nand {NUM_WAITING} more of {SHORT} waiting. "
        "How full the seats are while the long one runs:\n"
    )
    most = max(map(len, seats.values()))
    for name, used in seats.items():
        console.print(
            f"  {name:8}[cyan]{strip(used, most)}[/]{shares[name]:5.0%}, all done in "
            f"{len(used):,} steps",
            highlight=False,
        )
    console.print()
    title = f"{len(jobs)} requests with shared prefixes, {profile.name}, a small KV cache"
    console.print(render.comparison(title, summaries))
    console.print(
        "\n[dim]redone: tokens computed again after a preemption; between tokens: p50/p99[/]"
        "\nNext: [bold]headway simulate --help[/], [bold]headway presets[/], "
        "docs/policies.md"
    )


def seats_in_use(name: str) -> list[float]:
    """Seats that generate, at every step of the course's example."""
    space, lengths = TokenSpace(), [LONG, *[SHORT] * (NUM_SEATS - 1 + NUM_WAITING)]
    jobs = [
        Job(id=str(i), pieces=(space.take(16),), num_output=length, max_tokens=length)
        for i, length in enumerate(lengths)
    ]
    profile = load_profile(PROFILE)
    config = replace(options.make_config(name, profile, {}), max_num_seqs=NUM_SEATS)
    metrics: RunStats = simulate(jobs, config, profile).metrics
    return list(metrics.steps["running"])


def strip(values: list[float], longest: int) -> str:
    """A row of bars, one for every stretch of steps; as wide as its share of the longest run."""
    width = max(1, round(WIDTH * len(values) / longest))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / max(1, b - a) for a, b in pairwise(bounds)]
    bars = (SHADES[round(mean / NUM_SEATS * (len(SHADES) - 1))] for mean in means)
    return "".join(bars).ljust(WIDTH)
