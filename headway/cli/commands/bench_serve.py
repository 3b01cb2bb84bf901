"""`headway bench serve`: load on a running server, in the words of `vllm bench serve`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headway.cli.options.common import Json, progress_bar
from headway.cli.options.loadgen import AskOptions, LoadgenOptions, Run
from headway.cli.options.model import check_writable, spread
from headway.errors import ConfigError
from headway.lab import plots
from headway.lab.loadgen import report as serve_report
from headway.lab.loadgen.load import Load, send
from headway.lab.loadgen.requests import Wording
from headway.lab.workload.jobs import Job

PICTURES = (".png", ".svg", ".pdf")
SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
Goodput = Annotated[
    str | None,
    typer.Option(help="Count the requests a second within these ms: ttft:500,tpot:50,e2el:9000."),
]
PlotFile = Annotated[
    str | None,
    typer.Option(
        "--plot",
        help="Draw the latencies: .png, .svg or .pdf by matplotlib, .txt as text, - here. One load: "
        "the share within a time; several: median and p99 of each.",
    ),
]


@spread
def serve_command(
    goodput: Goodput = None,
    plot: PlotFile = None,
    json_: Json = False,
    *,
    asking: AskOptions,
    load: LoadgenOptions,
) -> None:
    """Load on a running server: streaming requests, their latencies and rates.

    A request is sent when it is due, however slow the server is. One that is not counted goes first,
    to see that the server answers. Outputs have their full length if it knows ignore_eos.
    """
    limits = serve_report.parse_goodput(goodput) if goodput else {}
    _check_plot(plot)
    runs = load.runs(asking.seed)
    wording = asking.wording()
    _warm(asking, wording, runs[0].jobs[0])
    loads = [_measure(asking, wording, run, number) for number, run in enumerate(runs)]
    results = [
        _describe(run, wording) | serve_report.report(load.outcomes, load.most_open, limits)
        for run, load in zip(runs, loads, strict=True)
    ]
    if json_:
        print(json.dumps(results[0] if len(results) == 1 else {"runs": results}, indent=2))
    else:
        _show(results, loads)
    if plot is not None:
        _draw(plot, runs, loads, results)
    if not any(result["completed"] for result in results):
        raise typer.Exit(1)


def _measure(asking: AskOptions, wording: Wording, run: Run, number: int) -> Load:
    """One load; prompts of its own, else it would find those of the one before cached."""
    wording = replace(wording, seed=wording.seed + number)
    with progress_bar(run.title, len(run.jobs)) as advance:
        return send(
            asking.address, wording, run.jobs, concurrency=run.concurrency,
            timeout=asking.timeout, api_key=asking.api_key, tell=lambda: advance(1),
        )  # fmt: skip


def _warm(asking: AskOptions, wording: Wording, job: Job) -> None:
    """A first request; ConfigError with the server's own words if it fails."""
    wording = replace(wording, seed=wording.seed + (1 << 32))  # a prompt that is not used again
    job = replace(job, arrival=0.0, num_output=min(2, job.num_output))
    (outcome,) = send(
        asking.address, wording, [job], timeout=asking.timeout, api_key=asking.api_key
    ).outcomes
    if outcome.error is not None:
        raise ConfigError(
            f"the server at {asking.url} failed a first request: {outcome.error} {outcome.detail}"
        )


def _describe(run: Run, wording: Wording) -> dict[str, Any]:
    """What was asked, with vLLM's keys."""
    rate = "inf" if run.rate is not None and math.isinf(run.rate) else run.rate
    return {
        "backend": "openai-chat" if wording.kind == "chat" else "openai",
        "model_id": wording.model,
        "num_prompts": len(run.jobs),
        "request_rate": rate,  # None: of a trace, or whatever the concurrency gives
        "max_concurrency": run.concurrency,
    }


def _show(results: Sequence[dict[str, Any]], loads: Sequence[Load]) -> None:
    console = Console()
    if len(results) > 1:
        _show_sweep(console, results)
    else:
        _show_one(console, results[0])
    for result, load in zip(results, loads, strict=True):
        for kind, count in result["errors"].items():
            detail = next(o.detail for o in load.outcomes if o.error == kind)
            console.print(f"{count:,} x {kind}: {detail[:300]}", style="red", markup=False)
        if (late := result["p99_send_delay_ms"]) > 100:
            console.print(f"requests left up to {late:,.0f} ms late: this machine sends no faster",
                          style="yellow")  # fmt: skip


def _show_one(console: Console, result: dict[str, Any]) -> None:
    good = result["request_goodput"]
    console.print(
        f"\n[bold]{result['completed']:,} requests[/] completed and {result['failed']:,} failed in "
        f"{result['duration']:.1f} s; {result['total_input_tokens']:,} prompt and "
        f"{result['total_output_tokens']:,} output tokens, at most "
        f"{result['max_concurrent_requests']:,} requests at once\n"
        f"[bold]{result['output_throughput']:,.1f} output tokens/s[/], "
        f"{result['request_throughput']:,.2f} requests/s"
        + ("" if good is None else f", {good:,.2f} requests/s within the objectives")
        + "\n",
        highlight=False,
    )
    table = Table(header_style="bold", box=None, pad_edge=False)
    marks = ("mean", "median", "p90", "p99")
    for column in ("milliseconds", *marks):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for key, name in serve_report.NAMES.items():
        table.add_row(name, *(f"{result[f'{mark}_{key}_ms']:,.1f}" for mark in marks))
    console.print(table)


def _show_sweep(console: Console, results: Sequence[dict[str, Any]]) -> None:
    columns = {
        "req/s": "request_throughput", "good/s": "request_goodput", "tok/s": "output_throughput",
        "ttft p50": "median_ttft_ms", "p99": "p99_ttft_ms", "itl p50": "median_itl_ms",
        "p99 ms": "p99_itl_ms",
    }  # fmt: skip
    if results[0]["request_goodput"] is None:
        del columns["good/s"]
    table = Table(header_style="bold", box=None, pad_edge=False)
    key = "request_rate" if results[0]["max_concurrency"] is None else "max_concurrency"
    for title in ("rate" if key == "request_rate" else "at once", "done", "failed", *columns):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        cells = (f"{result[name]:,.{'0' if title == 'tok/s' else '1'}f}"
                 for title, name in columns.items())  # fmt: skip
        table.add_row(str(result[key]), f"{result['completed']:,}", f"{result['failed']:,}", *cells)
    console.print(table)


def _check_plot(plot: str | None) -> None:
    """ConfigError for a name that says no format, before any load."""
    if plot not in (None, "-") and Path(plot or "").suffix not in (*PICTURES, ".txt"):
        raise ConfigError(f"plot must end in {', '.join(PICTURES)} or .txt, or be -: {plot!r}")
    if plot is not None and _is_file(plot):
        check_writable(Path(plot))


def _is_file(plot: str) -> bool:
    """Text to a file always can be; a picture only where matplotlib is."""
    return plot.endswith(".txt") or (plot != "-" and plots.has_matplotlib())


def _draw(
    plot: str, runs: Sequence[Run], loads: Sequence[Load], results: Sequence[dict[str, Any]]
) -> None:
    """To the file; on the screen if it is -, or if a picture cannot be made here."""
    if len(runs) == 1:
        times = serve_report.times_of(loads[0].outcomes)
        drawn = plots.shares("latency", {"TTFT": times["ttft"], "ITL": times["itl"]})
    else:
        is_rate = runs[0].rate is not None
        points = [
            (float(r.rate or r.concurrency or 0), x) for r, x in zip(runs, results, strict=True)
        ]
        drawn = plots.marks("latency", "requests/s" if is_rate else "at once", points, SHOWN)
    console = Console(stderr=True)
    if _is_file(plot):
        path = Path(plot)
        if path.suffix == ".txt":
            path.write_text(plots.text(drawn), encoding="utf-8")
        else:
            plots.save(drawn, path)
        console.print(f"plot: {path}", markup=False, highlight=False)
        return
    console.print(plots.text(drawn), markup=False, highlight=False)
    if plot != "-":
        console.print(
            f"no {plot}: matplotlib is not installed; pip install 'headway[lab]'", markup=False
        )
