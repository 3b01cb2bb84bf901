"""`headway simulate`: one workload with one scheduler on a virtual clock, on one replica or several."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.commands import replicas as replicas_command
from headway.cli.commands.disaggregate import compare_pools, parse_pools
from headway.cli.options import common as options
from headway.cli.options.simulation import DEFAULT_WORKLOAD, SimulationFlags, WorkloadText
from headway.cli.view import render
from headway.errors import ConfigError
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import WorkloadRequest

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


@options.spread
def simulate_command(
    workload: WorkloadText = DEFAULT_WORKLOAD,
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
    *,
    simulation: SimulationFlags,
) -> None:
    """Run a workload through the scheduler on a virtual clock and report the result.

    The exit code is 1 if all requests were rejected.
    """
    machine, config = simulation.machine, simulation.config()
    title, is_async = f"{simulation.preset} on ", simulation.async_scheduling
    trace: dict[str, Any] = {"trace_blocks": trace_blocks, "trace_redact": trace_redact}
    if disaggregate is not None or replicas is not None:
        pools = _pools(disaggregate, replicas, trace_out)
        rule = replicas_command.read_route(route)
        requests = simulation.workload(workload).requests()
        if isinstance(pools, tuple):
            rejected = compare_pools(
                requests, config, machine, pools, route=rule, async_scheduling=is_async,
                as_json=json_,
            ).rejected  # fmt: skip
        else:
            several = replicas_command.run_replicas(
                requests, config, machine, pools, rule, async_scheduling=is_async,
                trace_out=trace_out, **trace,
            )  # fmt: skip
            rejected = several.rejected
            title += f"{pools} x {machine.name}, route {several.route}"
            replicas_command.print_replicas(title, several, as_json=json_)
        _check_rejected(rejected, requests)
        return
    if route is not None:
        raise ConfigError(f"--route {route} needs --replicas or --disaggregate")
    requests = simulation.workload(workload).requests()
    total = sum(request.n for request in requests)
    with (
        options.written(trace_out) if trace_out else nullcontext() as file,
        options.progress_bar(f"simulating {simulation.preset}", total) as progress,
    ):
        result = simulate(
            requests, config, machine, async_scheduling=is_async, trace=file, progress=progress,
            **trace,
        )  # fmt: skip
    summary, facts = summarize(result.metrics, len(result.rejected)), result.metrics.config
    render.print_run(title + machine.name, summary, facts, result.rejected, as_json=json_)
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
