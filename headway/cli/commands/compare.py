"""`headway compare`: one workload under several schedulers, or several routing rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from headway.cli.commands import replicas as replicas_command
from headway.cli.options import common as options
from headway.cli.options.planner import PlotFile, check_plot, save_plot
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cluster import ReplicasResult
from headway.lab.cost import Profile, load_profile
from headway.lab.plots import distribution
from headway.lab.simulate import SimulationResult, simulate
from headway.lab.summary import Summary, summarize
from headway.lab.svg import Plot
from headway.lab.workload.request import WorkloadRequest
from headway.scheduler.policies.presets import PRESETS, read_changes

ALL_PRESETS = ",".join(PRESETS)
Presets = Annotated[str, typer.Option(help="Comma-separated presets.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="A further scheduler: 'name: preset; slot=value; number=value'. May be repeated.",
    ),
]


@options.spread
def compare_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    presets: Presets = ALL_PRESETS,
    variant: Variants = None,
    replicas: replicas_command.Replicas = None,
    routes: replicas_command.Routes = None,
    plot: PlotFile = None,
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    *,
    selection: options.WorkloadOptions,
    scheduler: options.SchedulerOptions,
) -> None:
    """Run one workload under several presets and variants, and show the results side by side.

    With --replicas, compare routing rules instead, under the first preset.
    """
    check_plot(plot)
    chosen, changes = load_profile(profile), scheduler.changes()
    if replicas is not None or routes is not None:
        number = replicas_command.read_replicas(8 if replicas is None else replicas)
        rules = replicas_command.read_routes(routes or replicas_command.KNOWN)
        if variant or (presets != ALL_PRESETS and "," in presets):
            raise ConfigError("--routes compares rules under one preset; use --presets NAME")
        name = "headway" if presets == ALL_PRESETS else presets
        config = options.make_config(name, chosen, changes)
        requests = selection.load(workload)
        results = replicas_command.compare_routes(
            requests, config, chosen, number, rules, async_scheduling=async_scheduling
        )
        title = f"{len(requests)} requests on {number} x {chosen.name}"
        replicas_command.print_routes(title, results, as_json=json_)
        save_plot(_ttft_plot(title, results), plot)
        return
    configs = {
        name: options.make_config(name, chosen, changes)
        for name in filter(None, map(str.strip, presets.split(",")))
    }
    if not configs and not variant:
        raise ConfigError(f"nothing to compare; give --presets ({ALL_PRESETS}) or --variant")
    for text in variant or ():
        name, base, own = parse_variant(text)
        if name in configs:
            raise ConfigError(f"variant {name!r}: this name is already used")
        configs[name] = options.make_config(base, chosen, {**changes, **own})
    requests = selection.load(workload)
    runs = run_all(requests, configs, chosen, async_scheduling)
    summaries, title = summaries_of(runs), f"{len(requests)} requests on {chosen.name}"
    if json_:
        print(json.dumps(summaries, indent=2))
    else:
        Console().print(render.comparison(title, summaries))
    save_plot(_ttft_plot(title, runs), plot)


def _ttft_plot(title: str, results: Mapping[str, SimulationResult | ReplicasResult]) -> Plot:
    """The cumulative distribution of the time to first token of each run."""
    times = {
        name: np.array(
            [
                1e3 * (x.first_token - x.arrival)
                for x in result.metrics.requests
                if x.first_token >= 0
            ]
        )
        for name, result in results.items()
    }
    return distribution(f"{title}: time to first token", times)


def summaries_of(results: dict[str, SimulationResult]) -> dict[str, Summary]:
    return {
        name: summarize(result.metrics, len(result.rejected)) for name, result in results.items()
    }


def run_all(
    requests: list[WorkloadRequest],
    configs: dict[str, Config],
    profile: Profile,
    async_scheduling: bool,
) -> dict[str, SimulationResult]:
    """Simulate the workload under every config; the results by name."""
    results, total = {}, sum(request.n for request in requests)
    for name, config in configs.items():
        with options.progress_bar(f"simulating {name}", total) as progress:
            results[name] = simulate(
                requests, config, profile, async_scheduling=async_scheduling, progress=progress
            )
    return results


def parse_variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Name, preset and changes of 'name: preset; slot=value; ...'; ConfigError if invalid."""
    name, colon, rest = text.partition(":")
    base, *changes = [part.strip() for part in rest.split(";")]
    pairs = [change.partition("=") for change in changes if change]
    if not colon or not name.strip() or not all(equals for _, equals, _ in pairs):
        raise ConfigError(
            f"a variant must look like 'name: preset; slot=value; number=value', not {text!r}"
        )
    try:
        values = read_changes({key.strip(): value.strip() for key, _, value in pairs})
    except ConfigError as error:
        raise ConfigError(f"variant {name.strip()!r}: {error}") from None
    return name.strip(), base, values
