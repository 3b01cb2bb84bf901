"""Summaries as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from headway.lab.doctor import Finding
from headway.lab.summary import Summary

MAX_LISTED = 5


def report(title: str, summary: Summary) -> Group:
    """One run: throughput, latencies, what the scheduler did."""
    latencies = Table(header_style="bold", box=None, pad_edge=False)
    for column in ("", "mean", "p50", "p90", "p99"):
        latencies.add_column(column, justify="left" if not column else "right")
    names = {
        "ttft": "time to first token", "time_between_tokens": "time between tokens",
        "end_to_end": "end to end", "queue_time": "queue time",
    }  # fmt: skip
    for key, name in names.items():
        values = (summary[key][mark] for mark in ("mean", "p50", "p90", "p99"))
        latencies.add_row(name, *map(seconds, values))
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(summary):
        facts.add_row(name, value)
    return Group(f"\n[bold]{escape(title)}[/]", facts, "", latencies)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    step, swapped = summary["per_step"], summary["swapped_blocks"]
    reasons = summary["waiting_steps_by_reason"]
    facts = [
        ("requests", f"{summary['completed']:,} of {summary['requests']:,} completed"),
        ("time", f"{summary['seconds']:,.1f} s, {summary['steps']:,} steps"),
        (
            "throughput",
            f"{summary['requests_per_second']:,.2f} requests/s, "
            f"{summary['output_tokens_per_second']:,.0f} output tokens/s",
        ),
        ("seats per step", f"{step['seats']:.1f} ({step['seats_share']:.1%})"),
        (
            "tokens per step",
            f"{step['tokens']:,.0f} ({step['tokens_share']:.1%} of the budget), "
            f"{step['prefill_share']:.0%} of them prefill",
        ),
        (
            "preemptions",
            f"{summary['preemptions']:,} ({summary['preemptions_by_swap']:,} by swap, "
            f"{summary['preemptions_for_priority']:,} for priority)",
        ),
        (
            "recomputed",
            f"{summary['recomputed_tokens']:,} tokens, tax {summary['recompute_tax']:.2%}",
        ),
        ("swapped blocks", f"{swapped['out']:,} out, {swapped['in']:,} in"),
        ("prefix cache", f"{summary['cache_hit_ratio']:.1%} of prompt tokens hit"),
        ("waited for", ", ".join(f"{k} ({v:,} steps)" for k, v in reasons.items()) or "nothing"),
    ]
    if summary["clients"] > 1:
        facts.append(("fairness", f"{summary['fairness']:.3f} over {summary['clients']} clients"))
    if summary["deadlines"]:
        missed, asked = summary["deadline_misses"], summary["deadlines"]
        facts.append(("deadlines", f"{missed:,} of {asked:,} missed"))
    return facts


def _pair(times: dict[str, float]) -> str:
    """p50 and p99 in the unit of the larger."""
    low, high = times["p50"], times["p99"]
    unit, scale = ("s", 1.0) if high >= 1 else ("ms", 1e3)
    return f"{low * scale:.1f} / {high * scale:.1f} {unit}"


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "req/s": lambda s: f"{s['requests_per_second']:.2f}",
    "tok/s": lambda s: f"{s['output_tokens_per_second']:,.0f}",
    "steps": lambda s: f"{s['steps']:,}",
    "TTFT p50/p99": lambda s: _pair(s["ttft"]),
    "between tokens": lambda s: _pair(s["time_between_tokens"]),
    "preempt": lambda s: f"{s['preemptions']:,}",
    "redone": lambda s: f"{s['recomputed_tokens']:,}",
    "hits": lambda s: f"{s['cache_hit_ratio']:.0%}",
    "unfair": lambda s: f"{1 - s['fairness']:.0%}",
    "late": lambda s: f"{s['deadline_misses']:,}",
    "refused": lambda s: f"{s['rejected']:,}",
}


def comparison(title: str, summaries: dict[str, Summary]) -> Group:
    """Several runs, a row each; columns that are zero for everybody are left out."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("scheduler", style="bold", no_wrap=True)
    shown = {
        name: show
        for name, show in COLUMNS.items()
        if any(show(summary) not in ("0", "0%") for summary in summaries.values())
    }
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(escape(name), *(show(summary) for show in shown.values()))
    return Group(f"[bold]{escape(title)}[/]", "", table)


def settings(config: dict[str, Any]) -> str:
    return "  ".join(f"[dim]{key}[/] {escape(str(value))}" for key, value in config.items())


def print_findings(console: Console, findings: list[Finding]) -> None:
    """The doctor's lines."""
    if not findings:
        console.print("\n[green]The doctor finds nothing wrong.[/]")
        return
    console.print("\n[bold]The doctor says[/]")
    for finding in findings:
        console.print(f"  [yellow]symptom[/]  {finding.symptom}", highlight=False)
        console.print(f"  [dim]cause[/]    {finding.cause}", highlight=False)
        console.print(f"  [green]remedy[/]   {finding.remedy}\n", highlight=False)


def print_rejected(console: Console, rejected: list[tuple[str, str]]) -> None:
    """Requests refused at the door, the first few with their reasons."""
    if rejected:
        console.print(f"\n[red]{len(rejected)} requests were refused[/]")
        for _, reason in rejected[:MAX_LISTED]:
            console.print(f"  {reason}", highlight=False, markup=False)


def seconds(value: float) -> str:
    """A time as people read it."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.1 else f"{value * 1e3:.1f} ms"
