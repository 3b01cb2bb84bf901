"""`headway trace`: what is in a recorded run, and how two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headway.cli.view import render
from headway.errors import ConfigError, FormatError, HeadwayError
from headway.lab.diff import diff
from headway.lab.doctor import examine
from headway.lab.replay import check_replay
from headway.lab.summary import summarize
from headway.observe.perfetto import to_perfetto
from headway.observe.run_stats import RunStats
from headway.observe.trace import read_trace


def trace_command(
    file: Annotated[Path, typer.Argument(help="A trace written with --trace-out.")],
    perfetto: Annotated[
        Path | None, typer.Option(help="Write it for ui.perfetto.dev to this file.")
    ] = None,
    diff_with: Annotated[
        Path | None, typer.Option("--diff", help="Another trace: where do they part, and why?")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Decide everything anew and check that it agrees.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Summarize a trace file, export it, replay it, or compare it with another."""
    if sum(map(bool, (perfetto, diff_with, replay))) > 1:
        raise ConfigError("choose one of --perfetto, --diff and --replay")
    try:
        if perfetto:
            _export(file, perfetto, json_)
        elif diff_with:
            _diff(file, diff_with, json_)
        elif replay:
            num_steps = check_replay(read_trace(file))
            text = f"{num_steps} steps decided anew: every decision is the recorded one"
            print(json.dumps({"equal_steps": num_steps}) if json_ else text)
        else:
            _summarize(file, json_)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, HeadwayError):
            raise
        problem = f"not a whole Headway trace: {type(error).__name__} {error}"
        raise FormatError(file, None, problem) from None


def _export(file: Path, target: Path, as_json: bool) -> None:
    events = list(to_perfetto(read_trace(file)))
    try:
        target.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    except OSError as error:
        raise FormatError(target, None, f"cannot be written: {error.strerror}") from None
    text = f"{len(events)} events written to {target}; open it in ui.perfetto.dev"
    print(json.dumps({"events": len(events)}) if as_json else text)


def _diff(file: Path, other: Path, as_json: bool) -> None:
    names = (file.name, other.name) if file.name != other.name else ("left", "right")
    parting = diff(read_trace(file), read_trace(other), names)
    if as_json:
        print(json.dumps(parting._asdict()))
        return
    where = "take the same decisions" if parting.step is None else f"part at step {parting.step}"
    console = Console()
    console.print(f"[bold]{escape(names[0])} and {escape(names[1])} {where}[/]")
    for line in parting.lines:
        console.print(f"  {line}", highlight=False, markup=False)


def _summarize(file: Path, as_json: bool) -> None:
    lines = read_trace(file)
    metrics = RunStats(next(lines))
    for line in lines:
        metrics.add(line)
    summary = summarize(metrics)
    findings = examine(summary, metrics.config)
    if as_json:
        doctor = [finding._asdict() for finding in findings]
        print(json.dumps({"config": metrics.config, **summary, "doctor": doctor}, indent=2))
        return
    console = Console()
    console.print(render.settings(metrics.config))
    console.print(render.report(file.name, summary))
    render.print_findings(console, findings)
