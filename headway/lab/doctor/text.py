"""The doctor's findings and trials as plain text, for terminals and `GET /doctor`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

WIDTH = 98
Row = tuple[str, ...]
ROWS = {  # of a trial: name, path into a summary, unit
    "time to first token, p50": ("ttft", "p50", "s"),
    "time to first token, p99": ("ttft", "p99", "s"),
    "time between tokens, p50": ("time_between_tokens", "p50", "s"),
    "time between tokens, p99": ("time_between_tokens", "p99", "s"),
    "longest stall, p50": ("longest_stall", "p50", "s"),
    "longest stall, max": ("longest_stall", "max", "s"),
    "end to end, p50": ("end_to_end", "p50", "s"),
    "end to end, p99": ("end_to_end", "p99", "s"),
    "queue time, p99": ("queue_time", "p99", "s"),
    "output tokens per second": ("output_tokens_per_second", "", ""),
    "preemptions": ("preemptions", "", ""),
    "recompute tax": ("recompute_tax", "", "%"),
    "rejected": ("rejected", "", ""),
}


def show(value: float | None, unit: str) -> str:
    """A value with its unit; a share as percent, a time with a fitting unit."""
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "s":
        return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.1f} ms"
    figure = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
    return f"{figure}{unit}"


def findings_text(findings: Iterable[Mapping[str, Any]]) -> str:
    texts = []
    for finding in findings:
        parts = {**finding, "try": ", ".join(finding["changes"])}
        texts += [
            fill(parts[name], WIDTH, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)
            for name in ("symptom", "cause", "remedy", "try")
            if parts[name]
        ]
        texts.append("")
    return "\n".join(texts)


def diagnosis_text(found: Mapping[str, Any]) -> str:
    rows = [("", "now", "healthy", "")]
    for vital in found["vitals"]:
        mark = "" if vital["is_healthy"] else "!"
        rows.append((vital["name"], show(vital["value"], vital["unit"]), vital["healthy"], mark))
    findings = findings_text(found["findings"]) or "The doctor found no problems.\n"
    return f"Last {found['seconds']:.0f} s\n\n{_table(rows, left=(0, 2))}\n\n{findings}"


def trial_text(tried: Mapping[str, Any]) -> str:
    """A trial: what was recorded, and what is simulated before and after the change."""
    changes = ", ".join(f"{name}={value}" for name, value in tried["changes"].items())
    rows: list[Row] = [("", "measured", "simulated", changes)]
    for name, (key, mark, unit) in ROWS.items():
        values = (tried[run][key] for run in ("measured", "before", "after"))
        rows.append((name, *(show(value[mark] if mark else value, unit) for value in values)))
    about = (
        f"{tried['requests']:,} requests, {tried['steps']:,} steps of {tried['seconds']:,.0f} s; "
        f"costs: {_costs(tried['costs'])}"
    )
    return f"{fill(about, WIDTH)}\n\n{_table(rows)}\n"


def _costs(costs: Mapping[str, Any]) -> str:
    if costs["source"] == "profile":
        return f"profile {costs['name']}, because {costs['because']}"
    error = costs["median_error"]
    checked = "" if error is None else f", {error:.1%} median error on the others"
    return f"fitted to {costs['steps']:,} of the steps{checked}"


def _table(rows: Sequence[Row], left: Container[int] = (0,)) -> str:
    """Columns as wide as their longest cell; those in `left` are aligned left, the others right."""
    columns = []
    for place, cells in enumerate(zip(*rows, strict=True)):
        width, align = max(map(len, cells)), "<" if place in left else ">"
        columns.append([f"{cell:{align}{width}}" for cell in cells])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))
