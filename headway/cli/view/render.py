"""Summaries and profiles as tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headway.cli.options.common import stderr
from headway.lab.cost import Machine, Profile
from headway.lab.doctor.diagnose import Finding, diagnose
from headway.lab.profiling.calibration import HeldOutError
from headway.lab.summary import Summary
from headway.record.stats import STATISTICS

LATENCIES = {
    "ttft": "time to first token", "time_between_tokens": "time between tokens",
    "longest_stall": "longest stall", "end_to_end": "end to end", "queue_time": "queue time",
}  # fmt: skip
MAX_LISTED = 5
MAX_ERROR = 0.2  # a larger error of a profile gives a warning


def print_run(
    title: str,
    summary: Summary,
    config: dict[str, Any],
    rejected: Sequence[tuple[str, str]] = (),
    *,
    as_json: bool,
    findings: list[Finding] | None = None,
    table: Table | None = None,
) -> None:
    """Print the report of a run with the doctor's findings, as tables or as one JSON object."""
    findings = diagnose(summary, config) if findings is None else findings
    if as_json:
        doctor = [finding._asdict() for finding in findings]
        print_json({"config": config, **summary, "doctor": doctor})
        return
    console = Console()
    console.print(report(title, summary), *(("", table) if table else ()))
    _print_rejected(console, rejected)
    _print_findings(console, findings)


def report(title: str, summary: Summary) -> Group:
    """One run: throughput, latencies, scheduler statistics."""
    return Group(f"\n[bold]{escape(title)}[/]", _pairs(_facts(summary)), "", _latencies(summary))


def _latencies(summary: Summary) -> Table:
    """A row for each latency; for the time to first token also one for each prompt length."""
    rows = {name: summary[key] for key, name in LATENCIES.items()}
    classes = {
        f"  prompts {each['from']:,}-{each['to'] - 1:,}": each for each in summary["ttft_by_prompt"]
    }
    first, *others = rows
    names = (first, *(classes if len(classes) > 1 else ()), *others)
    return table(
        ("", *STATISTICS),
        [(n, *(seconds((rows | classes)[n][mark]) for mark in STATISTICS)) for n in names],
        no_wrap=True,
    )


def _facts(summary: Summary) -> dict[str, str]:
    step, swapped = summary["per_step"], summary["swapped_blocks"]
    reasons = summary["waiting_steps_by_reason"]
    facts = {
        "requests": f"{summary['completed']:,} of {summary['requests']:,} completed",
        "time": f"{summary['seconds']:,.1f} s, {counted(summary['steps'], 'step')}",
        "throughput": f"{summary['requests_per_second']:,.2f} requests/s, "
        f"{summary['output_tokens_per_second']:,.0f} output tokens/s",
        "running per step": f"{step['running']:.1f} ({step['running_share']:.1%} of max_num_seqs)",
        "tokens per step": f"{step['tokens']:,.0f} ({step['tokens_share']:.1%} of the budget), "
        f"{step['prefill_share']:.0%} prefill",
        "preemptions": f"{summary['preemptions']:,} ({summary['preemptions_by_swap']:,} by swap, "
        f"{summary['preemptions_for_priority']:,} for priority)",
        "recomputed": f"{summary['recomputed_tokens']:,} tokens "
        f"({summary['recompute_tax']:.2%} of all computed)",
        "swapped blocks": f"{swapped['out']:,} out, {swapped['in']:,} in",
        "prefix cache": f"{summary['cache_hit_ratio']:.1%} of prompt tokens hit",
        "waited for": ", ".join(f"{k} ({counted(v, 'step')})" for k, v in reasons.items()) or "-",
    }
    if summary["drafted_tokens"]:
        facts["drafts"] = (
            f"{summary['drafted_tokens']:,} tokens, {summary['accepted_share']:.1%} accepted; "
            f"{summary['tokens_per_verification']:.2f} tokens per verification"
        )
    if summary["clients"] > 1:
        facts["fairness"] = f"{summary['fairness']:.3f} over {summary['clients']} clients"
    if summary["deadlines"]:
        missed, total = summary["deadline_misses"], summary["deadlines"]
        facts["deadlines"] = f"{missed:,} of {total:,} missed"
    return facts


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    left: Container[str] | None = (),
    *,
    no_wrap: bool = False,
    **style: Any,
) -> Table:
    """A table without a frame. The first column and those in `left` are aligned left; None: none."""
    made = Table(**{"header_style": "bold", "box": None, "pad_edge": False} | style)
    for place, column in enumerate(columns):
        is_left = left is not None and (not place or column in left)
        made.add_column(column, justify="left" if is_left else "right", no_wrap=no_wrap)
    for row in rows:
        made.add_row(*row)
    return made


plain_table = partial(table, no_wrap=True, header_style="dim", padding=(0, 2, 0, 0))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def show(value: object, *tables: RenderableType, as_json: bool) -> None:
    """Print a value as JSON, or these tables."""
    if as_json:
        print_json(value)
    else:
        Console().print(*tables)


def _pairs(rows: Mapping[str, str]) -> Table:
    """A table of names and values."""
    return table(("", ""), rows.items(), ("", ""), show_header=False)


def _together(times: dict[str, float], *marks: str, seconds_from: float) -> str:
    """Several statistics of a latency; the last one chooses the unit of all."""
    values = [times[mark] for mark in marks]
    unit, scale = ("s", 1.0) if values[-1] >= seconds_from else ("ms", 1e3)
    figures = (f"{v * scale:.1f}" if v * scale < 99.95 else f"{v * scale:,.0f}" for v in values)
    return f"{'/'.join(figures)} {unit}"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "req/s": lambda s: f"{s['requests_per_second']:.2f}",
    "tok/s": lambda s: f"{s['output_tokens_per_second']:,.0f}",
    "steps": lambda s: f"{s['steps']:,}",
    "TTFT p50/p99": lambda s: _together(s["ttft"], "p50", "p99", seconds_from=1.0),
    "between tokens": lambda s: _together(
        s["time_between_tokens"], "p50", "p99", "max", seconds_from=10.0
    ),
    "accepted": lambda s: f"{s['accepted_share']:.0%}",
    "preempt": lambda s: f"{s['preemptions']:,}",
    "recomp": lambda s: f"{s['recomputed_tokens']:,}",
    "hits": lambda s: f"{s['cache_hit_ratio']:.0%}",
    "unfair": lambda s: f"{1 - s['fairness']:.0%}",
    "late": lambda s: f"{s['deadline_misses']:,}",
    "rejected": lambda s: f"{s['rejected']:,}",
}

FIRST_HIDDEN = (
    "steps",
    "req/s",
    "recomp",
    "unfair",
    "hits",
    "accepted",
    "late",
)  # in a narrow terminal


def comparison(title: str, summaries: dict[str, Summary], header: str = "scheduler") -> Group:
    """Several runs, a row each, without the columns that are zero in all rows.

    No value is cut off: in a narrow terminal some columns are left out, and a note names them.
    """
    cells = {name: [show(summary) for summary in summaries.values()]
             for name, show in COLUMNS.items()}  # fmt: skip
    cells = {name: cell for name, cell in cells.items() if set(cell) - {"0", "0%"}}
    widths = {name: 1 + max(map(len, (name, *cell))) for name, cell in cells.items()}
    left, hidden = Console().width - 1 - max(map(len, (header, *summaries))), list[str]()
    for name in FIRST_HIDDEN:
        if sum(widths.values()) > left and widths.pop(name, 0):
            hidden.append(name)
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(escape(header), style="bold", overflow="fold")
    for name in widths:
        table.add_column(name, justify="right", no_wrap=True)
    for name, *row in zip(summaries, *(cells[shown] for shown in widths), strict=True):
        table.add_row(escape(name), *row)
    note = [f"\n[dim]too narrow for {', '.join(hidden)}[/]"] if hidden else []
    return Group(f"[bold]{escape(title)}[/]", "", table, *note)


def _print_findings(console: Console, findings: list[Finding]) -> None:
    found = "[bold]The doctor found[/]" if findings else "[green]The doctor found no problems.[/]"
    console.print(f"\n{found}")
    for finding in findings:
        table = Table.grid(padding=(0, 0, 0, 2))
        for name, style in {"symptom": "yellow", "cause": "dim", "remedy": "green"}.items():
            table.add_row(f"[{style}]{name}[/]", escape(getattr(finding, name)))
        console.print(table, "", highlight=False)


def _print_rejected(console: Console, rejected: Sequence[tuple[str, str]]) -> None:
    """The number of rejected requests, and the reasons of the first few."""
    if rejected:
        verb = "was" if len(rejected) == 1 else "were"
        console.print(f"\n[red]{counted(len(rejected), 'request')} {verb} rejected[/]")
        for _, reason in rejected[:MAX_LISTED]:
            console.print(f"  {reason}", highlight=False, markup=False)


def counted(number: int, noun: str) -> str:
    """A number with its noun, which gets an s unless the number is 1."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def seconds(value: float) -> str:
    """A time with a fitting unit."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def print_error(text: str) -> None:
    stderr().print(f"[bold red]error:[/] {escape(text)}")


def print_profile(profile: Profile, error: HeldOutError, out: Path) -> None:
    """The numbers of a new profile, its error, and the next command."""
    console = Console()
    console.print(f"\n[bold]{escape(profile.name)}[/]", highlight=False)
    console.print(_pairs(_machine(profile.machine)))
    console.print("\n[bold]Error on a held-out run[/]")
    errors = {
        "step time": f"{error.median:.1%} (median), {error.p90:.1%} (p90)",
        "sum of all steps": f"{error.total:+.1%}",
        "simulated duration": f"{error.simulated:+.1%}",
        "simulated time to first token, p50": f"{error.ttft:+.1%}",
    }
    console.print(_pairs(errors))
    path = escape(str(out))
    next_command = f"Next: [bold]headway simulate --profile {path}[/]"
    console.print(f"\nWritten to {path}. {next_command}", highlight=False, soft_wrap=True)


def _machine(machine: Machine) -> dict[str, str]:
    copies = f"{machine.copy_bandwidth / 1e9:,.2f} GB/s, plus {_short(machine.copy_seconds)} each"
    return {
        "memory bandwidth": f"{machine.bandwidth / 1e9:,.2f} GB/s",
        "arithmetic": f"{machine.flops / 1e9:,.1f} GFLOP/s",
        "overlap of the two": f"{machine.overlap:.0%} of the shorter",
        "fixed time per forward pass": _short(machine.fixed_seconds),
        "minimum attention time": _short(machine.attention_seconds),
        "scheduling between steps": _short(machine.host_seconds),
        "copies between device and host": copies,
    }


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def warn_of_profile(error: HeldOutError, undetermined: Sequence[str]) -> None:
    """Print warnings on stderr: rates that are not determined, and a large error."""
    warnings = list(undetermined)
    worst = max(error.median, abs(error.total), abs(error.simulated))
    if worst > MAX_ERROR:
        warnings.append(
            f"the profile's error on a held-out run is {worst:.0%}; profile again while no other "
            "program uses this machine"
        )
    for warning in warnings:
        stderr().print(f"[yellow]warning:[/] {warning}")
