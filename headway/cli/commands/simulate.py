"""`headway simulate` and `headway demo`: runs on a virtual clock.

`simulate` runs one workload with one scheduler, on one replica or several. `demo` shows static
against continuous batching, and the presets side by side.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.cli.commands import replicas as replicas_command
from headway.cli.commands.compare import run_all, summaries_of
from headway.cli.commands.disaggregate import compare_pools, parse_pools
from headway.cli.options import common as options
from headway.cli.view import render
from headway.errors import ConfigError, FormatError
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies.presets import PRESETS

TraceOut = Annotated[
    Path | None, typer.Option(help="Write a trace of all decisions; see `headway trace`.")
]
Disaggregate = Annotated[
    str | None,
    typer.Option(
        metavar="P:D",
        help="Run P prefill and D decode replicas, and as many colocated ones to compare with.",
    ),
]

DEMO_PROFILE = "llama3.1-8b-a100-80gb"
DEMO_WORKLOAD = (
    "requests=150,arrivals=poisson(20),prompt=lognormal(500,0.8),"
    "output=lognormal(150,0.8),prefix=3x256@0.4"
)
MAX_NUM_SEQS, LONG, SHORT, NUM_WAITING = 8, 500, 10, 350
DEMO_CHANGES = {"num_blocks": 1200, "num_host_blocks": 1200, "max_num_seqs": 64}
WIDTH = 40
SHADES = " ▁▂▃▄▅▆▇█"


@options.spread
def simulate_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    preset: options.Preset = "headway",
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    trace_out: TraceOut = None,
    trace_blocks: Annotated[
        bool, typer.Option("--trace-blocks", help=options.TRACE_BLOCKS)
    ] = False,
    trace_redact: Annotated[
        bool, typer.Option("--trace-redact", help=options.TRACE_REDACT)
    ] = False,
    replicas: replicas_command.Replicas = None,
    route: replicas_command.Route = None,
    disaggregate: Disaggregate = None,
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    *,
    selection: options.WorkloadOptions,
    scheduler: options.SchedulerOptions,
) -> None:
    """Run a workload through the scheduler on a virtual clock and report the result.

    The exit code is 1 if all requests were rejected.
    """
    chosen = load_profile(profile)
    config = options.make_config(preset, chosen, scheduler.changes())
    if disaggregate is not None or replicas is not None:
        pools = _pools(disaggregate, replicas, trace_out)
        rule = replicas_command.read_route(route)
        requests = selection.load(workload)
        if isinstance(pools, tuple):
            rejected = compare_pools(
                requests, config, chosen, pools, route=rule, async_scheduling=async_scheduling,
                as_json=json_,
            ).rejected  # fmt: skip
        else:
            several = replicas_command.run_replicas(
                requests, config, chosen, pools, rule, async_scheduling=async_scheduling,
                trace_out=trace_out, trace_blocks=trace_blocks, trace_redact=trace_redact,
            )  # fmt: skip
            rejected = several.rejected
            title = f"{preset} on {pools} x {chosen.name}, route {several.route}"
            replicas_command.print_replicas(title, several, as_json=json_)
        _check_rejected(rejected, requests)
        return
    if route is not None:
        raise ConfigError(f"--route {route} needs --replicas or --disaggregate")
    requests = selection.load(workload)
    total = sum(request.n for request in requests)
    try:
        with (
            trace_out.open("wb") if trace_out else nullcontext() as file,
            options.progress_bar(f"simulating {preset}", total) as progress,
        ):
            result = simulate(
                requests,
                config,
                chosen,
                async_scheduling=async_scheduling,
                trace=file,
                trace_blocks=trace_blocks,
                trace_redact=trace_redact,
                progress=progress,
            )
    except OSError as error:
        raise FormatError(trace_out, None, f"cannot be written: {error.strerror}") from None
    summary = summarize(result.metrics, len(result.rejected))
    title = f"{preset} on {chosen.name}"
    render.print_run(title, summary, result.metrics.config, result.rejected, as_json=json_)
    _check_rejected(result.rejected, requests)


def _pools(
    disaggregate: str | None, replicas: int | None, trace_out: Path | None
) -> tuple[int, int] | int:
    """The numbers of prefill and decode replicas, or the number of colocated ones."""
    if disaggregate is None:
        return replicas_command.read_replicas(replicas or 0)
    if replicas is not None:
        raise ConfigError(
            "--replicas cannot be used with --disaggregate, which has its own numbers"
        )
    if trace_out:
        raise ConfigError("--trace-out cannot be used with --disaggregate")
    return parse_pools(disaggregate)


def _check_rejected(rejected: list[tuple[str, str]], requests: list[WorkloadRequest]) -> None:
    if len(rejected) == len(requests):
        render.print_error(f"all requests were rejected; the first: {rejected[0][1]}")
        raise typer.Exit(1)


def demo_command(json_: options.Json = False) -> None:
    """Compare static with continuous batching, and all presets, on small simulated workloads."""
    console, profile = Console(), load_profile(DEMO_PROFILE)
    running = {name: running_per_step(name) for name in ("static", "vllm_v1", "headway")}
    shares = {name: sum(counts[:LONG]) / LONG / MAX_NUM_SEQS for name, counts in running.items()}
    requests = parse_synthetic(DEMO_WORKLOAD).generate()
    configs = {name: options.make_config(name, profile, DEMO_CHANGES) for name in PRESETS}
    summaries = summaries_of(run_all(requests, configs, profile, False))
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
        "\n[dim]recomp: tokens recomputed after preemptions; between tokens: p50/p99/max[/]"
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
    profile = load_profile(DEMO_PROFILE)
    config = replace(options.make_config(name, profile, {}), max_num_seqs=MAX_NUM_SEQS)
    return list(simulate(requests, config, profile).metrics.steps["running"])


def bars(values: list[float], longest: int) -> str:
    """A row of bars, each the mean of a few steps; as wide as its share of the longest run."""
    width = max(1, round(WIDTH * len(values) / longest))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / max(1, b - a) for a, b in pairwise(bounds)]
    shades = (SHADES[round(mean / MAX_NUM_SEQS * (len(SHADES) - 1))] for mean in means)
    return "".join(shades).ljust(WIDTH)
