"""`headway simulate`: one workload with one scheduler on a virtual clock, on one replica or several."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import typer

from headway.cli.commands import replicas as replicas_command
from headway.cli.options.common import JSON, argument, option, progress_bar, written
from headway.cli.options.simulation import (
    DEFAULT_WORKLOAD,
    WORKLOAD,
    SimulationFlags,
    SimulationOptions,
)
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.fleet.routing import DEFAULT_ROUTE
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import WorkloadRequest


def simulate_command(
    trace: replicas_command.TraceFlags,
    workload: str = argument(DEFAULT_WORKLOAD, WORKLOAD),
    replicas: int | None = option(None, replicas_command.REPLICAS, metavar="N"),
    route: str | None = option(
        None,
        f"Which replica gets a request: {replicas_command.KNOWN}, or module:function.",
        show_default=DEFAULT_ROUTE,
    ),
    disaggregate: str | None = option(
        None,
        "Run P prefill and D decode replicas, and as many colocated ones to compare with.",
        metavar="P:D",
    ),
    json_: bool = JSON,
    *,
    simulation: SimulationFlags,
) -> None:
    """Run a workload through the scheduler on a virtual clock and report the result.

    The exit code is 1 if all requests were rejected.
    """
    config, title = simulation.config(), f"{simulation.preset} on "
    if disaggregate is None and replicas is None:
        if route is not None:
            raise ConfigError(f"--route {route} needs --replicas or --disaggregate")
        requests = simulation.workload(workload).requests()
        rejected = _run_one(title, requests, config, trace, simulation, as_json=json_)
    else:
        number = _pools(disaggregate, replicas, trace.trace_out)
        rule = replicas_command.read_route(route)
        requests = simulation.workload(workload).requests()
        if isinstance(number, tuple):
            rejected = replicas_command.compare_pools(
                requests, config, simulation, number, route=rule, as_json=json_
            ).rejected
        else:
            found = replicas_command.run_replicas(
                requests, config, simulation, number, rule, trace=trace
            )
            rejected = found.rejected
            title += f"{number} x {simulation.machine.name}, route {found.route}"
            replicas_command.print_replicas(title, found, as_json=json_)
    if len(rejected) == len(requests):
        render.print_error(f"all requests were rejected; the first: {rejected[0][1]}")
        raise typer.Exit(1)


def _run_one(
    title: str,
    requests: list[WorkloadRequest],
    config: Config,
    trace: replicas_command.TraceFlags,
    simulation: SimulationOptions,
    *,
    as_json: bool,
) -> list[tuple[str, str]]:
    """Simulate one replica and print its report; the rejected requests with their reasons."""
    total, path = sum(request.n for request in requests), trace.trace_out
    with (
        written(path) if path else nullcontext() as file,
        progress_bar(f"simulating {simulation.preset}", total) as progress,
    ):
        result = simulate(
            requests, config, simulation.machine, async_scheduling=simulation.async_scheduling,
            trace=file, trace_blocks=trace.trace_blocks, trace_redact=trace.trace_redact,
            progress=progress,
        )  # fmt: skip
    summary, facts = summarize(result.metrics, len(result.rejected)), result.metrics.config
    title += simulation.machine.name
    render.print_run(title, summary, facts, result.rejected, as_json=as_json)
    return result.rejected


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
    return replicas_command.read_pools(disaggregate)
