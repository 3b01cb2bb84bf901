"""`headway trace`: what is in a recorded run, and how two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.cli import render
from headway.engine.metrics import Metrics
from headway.engine.trace import read_trace
from headway.errors import FormatError
from headway.lab.diff import diff
from headway.lab.doctor import examine
from headway.lab.perfetto import to_perfetto
from headway.lab.replay import check_replay
from headway.lab.summary import summarize


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
    console = Console()
    if perfetto:
        events = list(to_perfetto(read_trace(file)))
        try:
            perfetto.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        except OSError as error:
            raise FormatError(perfetto, None, f"cannot be written: {error.strerror}") from None
        console.print(f"{len(events)} events written to {perfetto}; open it in ui.perfetto.dev")
    elif diff_with:
        names = (file.name, diff_with.name) if file.name != diff_with.name else ("left", "right")
        parting = diff(read_trace(file), read_trace(diff_with), names)
        if json_:
            print(json.dumps(parting._asdict()))
            return
        where = (
            "take the same decisions" if parting.step is None else f"part at step {parting.step}"
        )
        console.print(f"[bold]{names[0]} and {names[1]} {where}[/]")
        for line in parting.lines:
            console.print(f"  {line}", highlight=False, markup=False)
    elif replay:
        num_steps = check_replay(read_trace(file))
        console.print(f"{num_steps} steps decided anew: every decision is the recorded one")
    else:
        _summarize(file, json_, console)


def _summarize(file: Path, as_json: bool, console: Console) -> None:
    lines = read_trace(file)
    metrics = Metrics(next(lines))
    for line in lines:
        metrics.add(line)
    summary = summarize(metrics)
    findings = examine(summary, metrics.config)
    if as_json:
        doctor = [finding._asdict() for finding in findings]
        print(json.dumps({"config": metrics.config, **summary, "doctor": doctor}, indent=2))
        return
    console.print(render.settings(metrics.config))
    console.print(render.report(file.name, summary))
    render.print_findings(console, findings)
