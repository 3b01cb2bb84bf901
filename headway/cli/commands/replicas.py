"""`headway simulate` and `headway compare` with several replicas: colocated, or in two pools."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from headway.checks import whole_number
from headway.cli.options import common as options
from headway.cli.options.common import option
from headway.cli.options.simulation import SimulationOptions
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.fleet.routing import DEFAULT_ROUTE, ROUTES, RouteRule, parse_route
from headway.lab.cluster import ReplicasResult, simulate_replicas
from headway.lab.doctor.replicas import diagnose_replicas
from headway.lab.simulate import as_simulated
from headway.lab.summary import Summary
from headway.lab.workload.request import WorkloadRequest
from headway.record.writer import JournalWriter, header

MAX_REPLICAS = 64
KNOWN = ", ".join(rule.__name__ for rule in ROUTES)
REPLICAS = f"Run N replicas and a router, at most {MAX_REPLICAS}."
NOTE = (
    "\n[dim]between: time between tokens; total: end to end; hits: share of prompt tokens found "
    "in a cache; max/mean: of the replicas' busy time[/]"
)


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """The trace of a simulated run, or of each of its replicas."""

    trace_out: Path | None = option(None, "Write a trace of all decisions; see `headway trace`.")
    trace_blocks: bool = option(False, options.TRACE_BLOCKS, "--trace-blocks")
    trace_redact: bool = option(False, options.TRACE_REDACT, "--trace-redact")


def read_replicas(number: int) -> int:
    """A number of replicas; ConfigError if it is out of range."""
    return whole_number("--replicas", number, 1, MAX_REPLICAS)


def read_route(text: str | None) -> RouteRule:
    """The rule of --route; ConfigError if it is unknown."""
    options.import_from_working_directory()
    return parse_route(text or DEFAULT_ROUTE)


def read_routes(text: str) -> dict[str, RouteRule]:
    """The rules of --routes by their texts; commas in parentheses separate numbers."""
    names = [name.strip() for name in re.split(r",(?![^()]*\))", text)]
    rules = {name: read_route(name) for name in names if name}
    if not rules:
        raise ConfigError(f"--routes must name routing rules ({KNOWN}), not {text!r}")
    return rules


def read_pools(text: str) -> tuple[int, int]:
    """The numbers of prefill and decode replicas in 'P:D'; ConfigError if invalid."""
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text, re.ASCII)
    if found is None or not all(1 <= int(number) <= MAX_REPLICAS for number in found.groups()):
        raise ConfigError(
            "--disaggregate must be prefill:decode, two numbers of replicas from 1 to "
            f"{MAX_REPLICAS} such as 1:1, not {text!r}"
        )
    return int(found[1]), int(found[2])


def run_replicas(
    requests: list[WorkloadRequest],
    config: Config,
    simulation: SimulationOptions,
    number: int,
    rule: RouteRule,
    *,
    title: str = "",
    trace: TraceFlags | None = None,
) -> ReplicasResult:
    """Simulate with a progress bar; write the trace of replica 0 of run.jsonl to run.0.jsonl."""
    total, profile = sum(request.n for request in requests), simulation.machine
    with ExitStack() as stack:
        writers = []
        if trace is not None and (path := trace.trace_out):
            for place in range(number):
                name = path.with_name(f"{path.stem}.{place}{path.suffix}")
                head = header(
                    as_simulated(config, profile, simulation.async_scheduling),
                    simulation.async_scheduling,
                    profile=profile.name, replica=str(place), has_blocks=trace.trace_blocks,
                    is_redacted=trace.trace_redact,
                )  # fmt: skip
                writers.append(JournalWriter(stack.enter_context(options.written(name)), head))
        bar = options.progress_bar(f"simulating {title or f'{number} replicas'}", total)
        return simulate_replicas(
            requests, config, profile, number, route=rule, observers=writers,
            async_scheduling=simulation.async_scheduling, progress=stack.enter_context(bar),
        )  # fmt: skip


def print_replicas(title: str, result: ReplicasResult, *, as_json: bool) -> None:
    """The report of the whole run, a row for each replica, and the doctor's findings."""
    summary, config = result.summary(), result.metrics.config
    render.print_run(
        title, summary, config, result.rejected, as_json=as_json,
        findings=diagnose_replicas(summary, config), table=_table(summary["pools"]["colocated"]),
    )  # fmt: skip


def _table(pool: Summary) -> Table:
    """A row for each replica, and one for the largest value divided by the mean."""
    columns = ("replica", "requests", "busy", "tokens", "hits", "TTFT p50", "p90", "running")
    rows = (
        (
            escape(each["name"]), f"{each['requests']:,}", f"{each['busy']:.0%}",
            f"{each['computed_tokens']:,}", f"{each['cache_hit_ratio']:.0%}",
            render.seconds(each["ttft"]["p50"]), render.seconds(each["ttft"]["p90"]),
            f"{each['per_step']['running']:.1f}",
        )
        for each in pool["each"]
    )  # fmt: skip
    table = render.table(columns, rows, no_wrap=True)
    shown = (f"{pool['balance'][name]:.2f}" for name in ("requests", "busy", "computed_tokens"))
    table.add_row("max / mean", *shown, style="dim")
    return table


def routes_table(title: str, summaries: dict[str, Summary]) -> Group:
    """A row for each rule: latencies, hits and balance."""
    columns = ("route", "TTFT p50", "p90", "p99", "between p99", "total p90", "hits", "max/mean")
    rows = []
    for name, summary in summaries.items():
        times = [summary["ttft"][mark] for mark in ("p50", "p90", "p99")]
        times += [summary["time_between_tokens"]["p99"], summary["end_to_end"]["p90"]]
        busy = summary["pools"]["colocated"]["balance"]["busy"]
        hits = f"{summary['cache_hit_ratio']:.1%}"
        rows.append((f"[bold]{escape(name)}[/]", *map(render.seconds, times), hits, f"{busy:.2f}"))
    table = render.table(columns, rows, no_wrap=True, padding=(0, 1, 0, 0))
    return Group(f"[bold]{escape(title)}[/]", "", table, NOTE)


def compare_pools(
    requests: list[WorkloadRequest],
    config: Config,
    simulation: SimulationOptions,
    pools: tuple[int, int],
    *,
    route: RouteRule,
    as_json: bool,
) -> ReplicasResult:
    """Run the requests on separate pools and on as many colocated replicas; print both."""
    num_prefill, num_decode = pools
    runs = {
        f"{num_prefill}:{num_decode} disaggregated": (num_prefill, (config, num_decode)),
        f"{sum(pools)} colocated": (sum(pools), None),
    }
    results: list[ReplicasResult] = []
    for name, (number, decode) in runs.items():
        with options.progress_bar(f"simulating {name}", len(requests)) as progress:
            results.append(simulate_replicas(
                requests, config, simulation.machine, number, route=route, decode=decode,
                async_scheduling=simulation.async_scheduling, progress=progress,
            ))  # fmt: skip
    separate, colocated = (result.summary() for result in results)
    title = f"{len(requests)} requests, {sum(pools)} replicas on {simulation.machine.name}"
    comparison = render.comparison(title, dict(zip(runs, (separate, colocated), strict=True)))
    tables = (comparison, "", _pools_table(separate, colocated), _pools_note(separate))
    render.show({"disaggregated": separate, "colocated": colocated}, *tables, as_json=as_json)
    return results[0]


def _pools_table(*summaries: Summary) -> Table:
    """A row for each pool: how busy it is, and what its steps compute."""
    columns = ("pool", "replicas", "busy", "steps", "running", "waiting", "prefill", "preempt")
    rows = (
        (
            name, str(pool["replicas"]), f"{pool['busy']:.0%}", f"{pool['steps']:,}",
            f"{step['running']:.1f}", f"{step['waiting']:.1f}", f"{step['prefill_share']:.0%}",
            f"{pool['preemptions']:,}",
        )
        for summary in summaries
        for name, pool in summary["pools"].items() for step in [pool["per_step"]]
    )  # fmt: skip
    return render.table(columns, rows, no_wrap=True, padding=(0, 1, 0, 0))


def _pools_note(summary: Summary) -> str:
    sent = summary["transfers"]
    return (
        f"\n{sent['requests']:,} transfers of {sent['tokens']:,} tokens, p99 "
        f"{render.seconds(sent['seconds']['p99'])}; busy: share of the time in steps; prefill: share "
        "of the tokens of a step"
    )
