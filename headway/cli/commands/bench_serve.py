"""`headway bench serve`: load a running server, with the options and result keys of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.options.common import JSON, option, progress_bar
from headway.cli.options.loadgen import LoadgenOptions, LoadSpec, TargetOptions
from headway.cli.options.planner import check_plot, save_plot
from headway.cli.view import render
from headway.errors import ConfigError
from headway.lab import plots
from headway.lab.loadgen import report
from headway.lab.loadgen.load import LoadGenerator, send
from headway.lab.loadgen.requests import RequestFormat
from headway.lab.workload.request import WorkloadRequest

PLOTTED = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
SWEPT = {
    "ttft p50": "median_ttft_ms", "p99": "p99_ttft_ms", "itl p50": "median_itl_ms",
    "p99 ms": "p99_itl_ms", "max ms": "max_itl_ms",
}  # fmt: skip
MAX_SEND_DELAY = 100  # ms; a larger p99 gives a warning


def serve_command(
    goodput: str | None = option(
        None, "Count requests per second that meet these limits in ms: ttft:500,tpot:50,e2el:9000."
    ),
    plot: str | None = option(
        None,
        "Plot latencies to a file: .svg, .html or .txt, .png or .pdf with matplotlib; - prints. "
        "One load gives its distribution, several give median and p99 of each.",
    ),
    json_: bool = JSON,
    *,
    target: TargetOptions,
    load: LoadgenOptions,
) -> None:
    """Send streaming requests to a running server and measure latencies and rates.

    A request is sent at its arrival time, even if the server is slow. One warm-up request is sent
    first and not counted. Outputs have their full length if the server supports ignore_eos.
    """
    limits = report.parse_goodput(goodput) if goodput else {}
    _check_plot(plot)
    specs = load.loads(target.seed)
    request_format = target.request_format()
    _warm_up(target, request_format, specs[0].requests[0])
    loads = [_measure(target, request_format, spec, place) for place, spec in enumerate(specs)]
    results = [report.report(load.outcomes, load.max_concurrency, limits) for load in loads]
    if json_:
        runs = [
            _describe(spec, request_format) | result.as_json()
            for spec, result in zip(specs, results, strict=True)
        ]
        render.print_json(runs[0] if len(runs) == 1 else {"runs": runs})
    else:
        _show(results, loads, specs)
    if plot is not None:
        _draw(plot, specs, loads, results)
    if not any(result.completed for result in results):
        raise typer.Exit(1)


def _measure(
    target: TargetOptions, request_format: RequestFormat, spec: LoadSpec, place: int
) -> LoadGenerator:
    """Run one load with its own prompts, which the server has not cached in an earlier load."""
    request_format = replace(request_format, seed=request_format.seed + place)
    with progress_bar(spec.title, len(spec.requests)) as advance:
        return send(
            target.address, request_format, spec.requests, concurrency=spec.concurrency,
            timeout=target.timeout, api_key=target.api_key, on_done=lambda: advance(1),
        )  # fmt: skip


def _warm_up(
    target: TargetOptions, request_format: RequestFormat, request: WorkloadRequest
) -> None:
    """Send one request; ConfigError with the server's message if it fails."""
    request_format = replace(request_format, seed=request_format.seed + (1 << 32))  # unused
    request = replace(request, arrival=0.0, num_output=min(2, request.num_output))
    (outcome,) = send(
        target.address, request_format, [request], timeout=target.timeout, api_key=target.api_key
    ).outcomes
    if outcome.error is not None:
        raise ConfigError(
            f"the warm-up request to {target.base_url} failed: {outcome.error} {outcome.detail}"
        )


def _describe(spec: LoadSpec, request_format: RequestFormat) -> dict[str, object]:
    """The load, with vLLM's keys."""
    return {
        "backend": "openai-chat" if request_format.kind == "chat" else "openai",
        "model_id": request_format.model,
        "num_prompts": len(spec.requests),
        "request_rate": _rate(spec),  # None for a trace or a closed loop
        "max_concurrency": spec.concurrency,
    }


def _rate(spec: LoadSpec) -> float | str | None:
    return "inf" if spec.rate == math.inf else spec.rate


def _show(
    results: Sequence[report.LoadReport], loads: Sequence[LoadGenerator], specs: Sequence[LoadSpec]
) -> None:
    console = Console()
    if len(results) > 1:
        console.print(_sweep_table(results, specs))
    else:
        console.print(_counts(results[0]), highlight=False)
        console.print(latency_table(results[0]))
    for result, load in zip(results, loads, strict=True):
        for kind, count in result.errors.items():
            detail = next(o.detail for o in load.outcomes if o.error == kind)
            console.print(f"{count:,} x {kind}: {detail[:300]}", style="red", markup=False)
        if (delay := result.p99_send_delay_ms) > MAX_SEND_DELAY:
            console.print(
                f"warning: requests were sent up to {delay:,.0f} ms late; this machine is too slow "
                "for the load",
                style="yellow",
            )


def _counts(result: report.LoadReport) -> str:
    good = result.request_goodput
    return (
        f"\n[bold]{result.completed:,} requests[/] completed and {result.failed:,} failed in "
        f"{result.duration:.1f} s; {result.total_input_tokens:,} prompt and "
        f"{result.total_output_tokens:,} output tokens, at most "
        f"{result.max_concurrent_requests:,} concurrent requests\n"
        f"[bold]{result.output_throughput:,.1f} output tokens/s[/], "
        f"{result.request_throughput:,.2f} requests/s"
        f"{'' if good is None else f', goodput {good:,.2f} requests/s'}\n"
    )


def latency_table(result: report.Report) -> Table:
    """The latencies of a report in milliseconds, a row each."""
    rows = (
        (
            name,
            *(f"{result.latencies[f'{each}_{key}_ms']:,.1f}" for each in report.ENGINE_STATISTICS),
        )
        for key, name in report.LATENCIES.items()
    )
    return render.table(("milliseconds", *report.ENGINE_STATISTICS), rows)


def _sweep_table(results: Sequence[report.LoadReport], specs: Sequence[LoadSpec]) -> Table:
    """A row for each load; `good/s` only with objectives."""
    first = "rate" if specs[0].concurrency is None else "concurrency"
    good = () if results[0].request_goodput is None else ("good/s",)
    rows = (
        (
            str(spec.concurrency or _rate(spec)), f"{result.completed:,}", f"{result.failed:,}",
            f"{result.request_throughput:,.1f}", *(f"{result.request_goodput:,.1f}" for _ in good),
            f"{result.output_throughput:,.0f}",
            *(f"{result.latencies[key]:,.1f}" for key in SWEPT.values()),
        )
        for spec, result in zip(specs, results, strict=True)
    )  # fmt: skip
    columns = (first, "done", "failed", "req/s", *good, "tok/s", *SWEPT)
    return render.table(columns, rows, None, no_wrap=True)


def _check_plot(plot: str | None) -> None:
    """ConfigError or FormatError for a plot that cannot be written, before any load."""
    if plot is None or plot == "-":
        return
    if Path(plot).suffix not in plots.SUFFIXES:
        raise ConfigError(f"plot must end in {', '.join(plots.SUFFIXES)}, or be -, not {plot!r}")
    check_plot(Path(plot))


def _draw(
    plot: str,
    specs: Sequence[LoadSpec],
    loads: Sequence[LoadGenerator],
    results: Sequence[report.LoadReport],
) -> None:
    """Write the plot to its file, or print it for -."""
    if len(specs) == 1:
        times = report.times_of(loads[0].outcomes)
        drawn = plots.distribution("latency", {"TTFT": times["ttft"], "ITL": times["itl"]})
    else:
        x = "concurrency" if specs[0].rate is None else "requests/s"
        at = (float(spec.rate or spec.concurrency or 0) for spec in specs)
        values = [(place, result.latencies) for place, result in zip(at, results, strict=True)]
        drawn = plots.sweep("latency", x, values, PLOTTED)
    if plot == "-":
        Console(stderr=True).print(plots.text(drawn), markup=False, highlight=False)
    else:
        save_plot(drawn, Path(plot))
