"""`headway simulate --replicas N` and `headway compare --routes`: several replicas and a router."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from headway.checks import whole_number
from headway.cli.options import common as options
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.fleet.routing import DEFAULT_ROUTE, ROUTES, RouteRule, parse_route
from headway.lab.cluster import ReplicasResult, simulate_replicas
from headway.lab.cost import Profile
from headway.lab.doctor.replicas import diagnose_replicas
from headway.lab.simulate import with_profile
from headway.lab.summary import Summary
from headway.lab.workload.request import WorkloadRequest
from headway.record.writer import JournalWriter, header

MAX_REPLICAS = 64
KNOWN = ", ".join(rule.__name__ for rule in ROUTES)
Replicas = Annotated[
    int | None,
    typer.Option(metavar="N", help=f"Run N replicas and a router, at most {MAX_REPLICAS}."),
]
Route = Annotated[
    str | None,
    typer.Option(
        help=f"Which replica gets a request: {KNOWN}, or module:function.",
        show_default=DEFAULT_ROUTE,
    ),
]
Routes = Annotated[
    str | None,
    typer.Option(help="Comma-separated routing rules to compare, with one preset and --replicas."),
]


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


def trace_paths(path: Path, number: int) -> list[Path]:
    """A file for each replica: run.jsonl becomes run.0.jsonl, run.1.jsonl, ..."""
    return [path.with_name(f"{path.stem}.{place}{path.suffix}") for place in range(number)]


def run_replicas(
    requests: list[WorkloadRequest],
    config: Config,
    profile: Profile,
    number: int,
    rule: RouteRule,
    *,
    title: str = "",
    async_scheduling: bool = False,
    trace_out: Path | None = None,
    trace_blocks: bool = False,
    trace_redact: bool = False,
) -> ReplicasResult:
    """Simulate with a progress bar; writes a trace for each replica if `trace_out` is given."""
    paths = trace_paths(trace_out, number) if trace_out else []
    total = sum(request.n for request in requests)
    with ExitStack() as stack:
        files = [stack.enter_context(options.written(path)) for path in paths]
        writers = [
            JournalWriter(file, header(
                with_profile(config, profile), async_scheduling, profile=profile.name,
                replica=str(place), has_blocks=trace_blocks, is_redacted=trace_redact,
            ))
            for place, file in enumerate(files)
        ]  # fmt: skip
        name = title or f"{number} replicas"
        progress = stack.enter_context(options.progress_bar(f"simulating {name}", total))
        return simulate_replicas(
            requests, config, profile, number, route=rule, async_scheduling=async_scheduling,
            observers=writers, progress=progress,
        )  # fmt: skip


def print_replicas(title: str, result: ReplicasResult, *, as_json: bool) -> None:
    """The report of the whole run, a row for each replica, and the doctor's findings."""
    summary, config = result.summary(), result.metrics.config
    findings = diagnose_replicas(summary, config)
    if as_json:
        doctor = [finding._asdict() for finding in findings]
        render.print_json({"config": config, **summary, "doctor": doctor})
        return
    console = Console()
    console.print(Group(render.report(title, summary), "", _table(summary["pools"]["colocated"])))
    render.print_rejected(console, result.rejected)
    render.print_findings(console, findings)


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


def compare_routes(
    requests: list[WorkloadRequest],
    config: Config,
    profile: Profile,
    number: int,
    rules: dict[str, RouteRule],
    *,
    async_scheduling: bool,
) -> dict[str, ReplicasResult]:
    """The result of a run under each rule."""
    return {
        name: run_replicas(
            requests, config, profile, number, rule, title=name, async_scheduling=async_scheduling
        )
        for name, rule in rules.items()
    }


def print_routes(title: str, results: dict[str, ReplicasResult], *, as_json: bool) -> None:
    """A row for each rule: latencies, hits and balance."""
    summaries = {name: result.summary() for name, result in results.items()}
    if as_json:
        render.print_json(summaries)
        return
    columns = ("route", "TTFT p50", "p90", "p99", "between p99", "total p90", "hits", "max/mean")
    rows = []
    for name, summary in summaries.items():
        times = [summary["ttft"][mark] for mark in ("p50", "p90", "p99")]
        times += [summary["time_between_tokens"]["p99"], summary["end_to_end"]["p90"]]
        busy = summary["pools"]["colocated"]["balance"]["busy"]
        hits = f"{summary['cache_hit_ratio']:.1%}"
        rows.append((f"[bold]{escape(name)}[/]", *map(render.seconds, times), hits, f"{busy:.2f}"))
    table = render.table(columns, rows, no_wrap=True, padding=(0, 1, 0, 0))
    note = (
        "\n[dim]between: time between tokens; total: end to end; hits: share of prompt tokens found "
        "in a cache; max/mean: of the replicas' busy time[/]"
    )
    Console().print(Group(f"[bold]{escape(title)}[/]", "", table, note))
