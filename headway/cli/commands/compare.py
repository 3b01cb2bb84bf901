"""`headway compare`: one workload under several schedulers or routing rules, or the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console

from headway.cli.commands import replicas as replicas_command
from headway.cli.options.common import JSON, argument, option, progress_bar
from headway.cli.options.planner import PLOT, check_plot, save_plot
from headway.cli.options.simulation import DEFAULT_WORKLOAD, WORKLOAD, SimulationOptions, without
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cluster import ReplicasResult
from headway.lab.plots import distribution
from headway.lab.simulate import SimulationResult, simulate
from headway.lab.summary import Summary, summarize
from headway.lab.svg import Plot
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies.presets import PRESETS, read_changes

DEMO = SimulationOptions(profile="llama3.1-8b-a100-80gb")
DEMO_WORKLOAD = (
    "requests=150,arrivals=poisson(20),prompt=lognormal(500,0.8),"
    "output=lognormal(150,0.8),prefix=3x256@0.4"
)
MAX_NUM_SEQS, LONG, SHORT, NUM_WAITING = 8, 500, 10, 350
DEMO_CHANGES = {"num_blocks": 1200, "num_host_blocks": 1200, "max_num_seqs": 64}
WIDTH = 40
SHADES = " ▁▂▃▄▅▆▇█"

ALL_PRESETS = ",".join(PRESETS)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The schedulers or the routing rules to compare."""

    presets: str = option(ALL_PRESETS, "Comma-separated presets.")
    variant: list[str] | None = option(
        None,
        "A further scheduler: 'name: preset; slot=value; number=value'. May be repeated.",
        "--variant",
    )
    replicas: int | None = option(None, replicas_command.REPLICAS, metavar="N")
    routes: str | None = option(
        None, "Comma-separated routing rules to compare, with one preset and --replicas."
    )
    plot: Path | None = PLOT
    demo: bool = option(
        False, "Show static against continuous batching, then all presets.", "--demo"
    )


def compare_command(
    compared: CompareOptions,
    workload: str = argument(DEFAULT_WORKLOAD, WORKLOAD),
    json_: bool = JSON,
    *,
    simulation: Annotated[SimulationOptions, without("preset")],
) -> None:
    """Run one workload under several presets and variants, and show the results side by side.

    With --replicas, compare routing rules instead, under the first preset.
    """
    check_plot(compared.plot)
    machine = simulation.machine
    if compared.demo:
        given = compared.variant, compared.replicas, compared.routes, compared.plot
        if workload != DEFAULT_WORKLOAD or simulation != SimulationOptions() or any(given):
            raise ConfigError("--demo has its own workloads and settings; give only --json with it")
        run_demo(as_json=json_)
        return
    results: Mapping[str, SimulationResult | ReplicasResult]
    if compared.replicas is None and compared.routes is None:
        configs = _configs(compared, simulation)
        requests = simulation.workload(workload).requests()
        title = f"{len(requests)} requests on {machine.name}"
        results = runs = run_all(requests, configs, simulation)
        summaries = summaries_of(runs)
        shown = render.comparison(title, summaries)
    else:
        requests, number, results = _run_routes(compared, simulation, workload)
        title = f"{len(requests)} requests on {number} x {machine.name}"
        summaries = {name: result.summary() for name, result in results.items()}
        shown = replicas_command.routes_table(title, summaries)
    render.show(summaries, shown, as_json=json_)
    save_plot(_ttft_plot(title, results), compared.plot)


def _configs(compared: CompareOptions, simulation: SimulationOptions) -> dict[str, Config]:
    """The schedulers by name; ConfigError if there are none or two have one name."""
    names = filter(None, map(str.strip, compared.presets.split(",")))
    configs = {name: simulation.config(name) for name in names}
    if not configs and not compared.variant:
        raise ConfigError(f"nothing to compare; give --presets ({ALL_PRESETS}) or --variant")
    for text in compared.variant or ():
        name, base, own = parse_variant(text)
        if name in configs:
            raise ConfigError(f"variant {name!r}: this name is already used")
        configs[name] = simulation.config(base, **own)
    return configs


def _run_routes(
    compared: CompareOptions, simulation: SimulationOptions, workload: str
) -> tuple[list[WorkloadRequest], int, dict[str, ReplicasResult]]:
    """The requests, the number of replicas, and the result under each routing rule."""
    number = replicas_command.read_replicas(8 if compared.replicas is None else compared.replicas)
    rules = replicas_command.read_routes(compared.routes or replicas_command.KNOWN)
    is_default = compared.presets == ALL_PRESETS
    if compared.variant or (not is_default and "," in compared.presets):
        raise ConfigError("--routes compares rules under one preset; use --presets NAME")
    config = simulation.config("headway" if is_default else compared.presets)
    requests = simulation.workload(workload).requests()
    return requests, number, {
        name: replicas_command.run_replicas(requests, config, simulation, number, rule, title=name)
        for name, rule in rules.items()
    }  # fmt: skip


def _ttft_plot(title: str, results: Mapping[str, SimulationResult | ReplicasResult]) -> Plot:
    """The cumulative distribution of the time to first token of each run."""
    times = {}
    for name, result in results.items():
        served = [each for each in result.metrics.requests if each.first_token >= 0]
        times[name] = np.array([1e3 * (each.first_token - each.arrival) for each in served])
    return distribution(f"{title}: time to first token", times)


def summaries_of(results: dict[str, SimulationResult]) -> dict[str, Summary]:
    return {
        name: summarize(result.metrics, len(result.rejected)) for name, result in results.items()
    }


def run_all(
    requests: list[WorkloadRequest], configs: dict[str, Config], simulation: SimulationOptions
) -> dict[str, SimulationResult]:
    """Simulate the workload under every config; the results by name."""
    results, total = {}, sum(request.n for request in requests)
    for name, config in configs.items():
        with progress_bar(f"simulating {name}", total) as progress:
            results[name] = simulate(
                requests, config, simulation.machine, progress=progress,
                async_scheduling=simulation.async_scheduling,
            )  # fmt: skip
    return results


def parse_variant(text: str) -> tuple[str, str, dict[str, str | int]]:
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


def run_demo(*, as_json: bool) -> None:
    """Run and print the demo."""
    console = Console()
    running = {name: running_per_step(name) for name in ("static", "vllm_v1", "headway")}
    shares = {name: sum(counts[:LONG]) / LONG / MAX_NUM_SEQS for name, counts in running.items()}
    requests = parse_synthetic(DEMO_WORKLOAD).generate()
    configs = {name: DEMO.config(name, **DEMO_CHANGES) for name in PRESETS}
    summaries = summaries_of(run_all(requests, configs, DEMO))
    if as_json:
        render.print_json({"utilization": shares, "presets": summaries})
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
    title = f"{len(requests)} requests with shared prefixes on {DEMO.machine.name}, small KV cache"
    console.print(render.comparison(title, summaries))
    console.print(
        "\n[dim]recomp: tokens recomputed after preemptions; between tokens: p50/p99/max[/]"
        "\nNext: [bold]headway simulate --help[/], [bold]headway models --presets[/], "
        "docs/policies.md"
    )


def running_per_step(name: str) -> list[float]:
    """Running requests at every step: one long request, and short ones that can replace each other."""
    space, lengths = TokenSpace(), [LONG, *[SHORT] * (MAX_NUM_SEQS - 1 + NUM_WAITING)]
    requests = [
        WorkloadRequest(id=str(i), pieces=(space.take(16),), num_output=length, max_tokens=length)
        for i, length in enumerate(lengths)
    ]
    config = replace(DEMO.config(name), max_num_seqs=MAX_NUM_SEQS)
    return list(simulate(requests, config, DEMO.machine).metrics.steps["running"])


def bars(values: list[float], longest: int) -> str:
    """A row of bars, each the mean of a few steps; as wide as its share of the longest run."""
    width = max(1, round(WIDTH * len(values) / longest))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / max(1, b - a) for a, b in pairwise(bounds)]
    shades = (SHADES[round(mean / MAX_NUM_SEQS * (len(SHADES) - 1))] for mean in means)
    return "".join(shades).ljust(WIDTH)
