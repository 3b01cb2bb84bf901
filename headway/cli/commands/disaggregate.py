"""`headway simulate --disaggregate P:D`: separate prefill and decode pools against colocated ones."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from headway.cli.commands.replicas import MAX_REPLICAS
from headway.cli.options import common as options
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.fleet.routing import RouteRule
from headway.lab.cluster import ReplicasResult, simulate_replicas
from headway.lab.cost import Profile
from headway.lab.summary import Summary
from headway.lab.workload.request import WorkloadRequest


def parse_pools(text: str) -> tuple[int, int]:
    """The numbers of prefill and decode replicas in 'P:D'; ConfigError if invalid."""
    parts = [part.strip() for part in text.split(":")]
    is_good = len(parts) == 2 and all(
        part.isascii() and part.isdigit() and 1 <= int(part) <= MAX_REPLICAS for part in parts
    )
    if not is_good:
        raise ConfigError(
            "--disaggregate must be prefill:decode, two numbers of replicas from 1 to "
            f"{MAX_REPLICAS} such as 1:1, not {text!r}"
        )
    return int(parts[0]), int(parts[1])


def compare_pools(
    requests: list[WorkloadRequest],
    config: Config,
    profile: Profile,
    pools: tuple[int, int],
    *,
    route: RouteRule,
    async_scheduling: bool,
    as_json: bool,
) -> ReplicasResult:
    """Run the requests on separate pools and on as many colocated replicas; print both."""
    num_prefill, num_decode = pools
    names = f"{num_prefill}:{num_decode} disaggregated", f"{sum(pools)} colocated"
    results: dict[str, ReplicasResult] = {}
    for name, number, decode in zip(
        names, (num_prefill, sum(pools)), ((config, num_decode), None), strict=True
    ):
        with options.progress_bar(f"simulating {name}", len(requests)) as progress:
            results[name] = simulate_replicas(
                requests, config, profile, number, route=route, decode=decode,
                async_scheduling=async_scheduling, progress=progress,
            )  # fmt: skip
    summaries = {name: result.summary() for name, result in results.items()}
    if as_json:
        render.print_json(
            dict(zip(("disaggregated", "colocated"), summaries.values(), strict=True))
        )
    else:
        title = f"{len(requests)} requests, {sum(pools)} replicas on {profile.name}"
        Console().print(
            render.comparison(title, summaries), "", _pools(summaries), _note(summaries)
        )
    return results[names[0]]


def _pools(summaries: dict[str, Summary]) -> Table:
    """A row for each pool: how busy it is, and what its steps compute."""
    columns = ("pool", "replicas", "busy", "steps", "running", "waiting", "prefill", "preempt")
    pools = [each for summary in summaries.values() for each in summary["pools"].items()]
    rows = (
        (
            name, str(pool["replicas"]), f"{pool['busy']:.0%}", f"{pool['steps']:,}",
            f"{step['running']:.1f}", f"{step['waiting']:.1f}", f"{step['prefill_share']:.0%}",
            f"{pool['preemptions']:,}",
        )
        for name, pool in pools for step in [pool["per_step"]]
    )  # fmt: skip
    return render.table(columns, rows, no_wrap=True, padding=(0, 1, 0, 0))


def _note(summaries: dict[str, Summary]) -> str:
    sent = next(iter(summaries.values()))["transfers"]
    return (
        f"\n{sent['requests']:,} transfers of {sent['tokens']:,} tokens, p99 "
        f"{render.seconds(sent['seconds']['p99'])}; busy: share of the time in steps; prefill: share "
        "of the tokens of a step"
    )
