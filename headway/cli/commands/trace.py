"""`headway trace`: summarize a recorded run, export it, replay it, or compare it with another."""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from headway.cli.options import common as options
from headway.cli.options.common import argument, option
from headway.cli.view import render
from headway.errors import ConfigError
from headway.lab.summary import summarize
from headway.record.diff import diff
from headway.record.perfetto import to_perfetto
from headway.record.reader import complete, read_journal
from headway.record.replay import check_replay
from headway.record.stats import stats_of
from headway.scheduler.policies.text import ANY, READY_MADE


def trace_command(
    file: Path = argument(MISSING, "Trace file, written with --trace-out."),
    perfetto: Path | None = option(None, "Export the trace for ui.perfetto.dev to this file."),
    diff_with: Path | None = option(
        None,
        "Show the first different decision between this trace and FILE; exit with 1 if there is "
        "one.",
        "--diff",
    ),
    replay: bool = option(False, "Repeat all decisions and check that they are equal.", "--replay"),
    allow_own_policies: bool = options.ALLOW_OWN_POLICIES,
    json_: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Summarize a trace file, export it, replay it, or compare it with another."""
    if sum(map(bool, (perfetto, diff_with, replay))) > 1:
        raise ConfigError("--perfetto, --diff and --replay cannot be combined; give one of them")
    options.import_from_working_directory()  # the recorded policies may be there
    with complete(file):
        if perfetto:
            _export(file, perfetto, json_)
        elif diff_with:
            _diff(file, diff_with, json_)
        elif replay:
            own = ANY if allow_own_policies else READY_MADE
            num_steps = check_replay(read_journal(file), own)
            text = f"{render.counted(num_steps, 'step')} replayed; all decisions are equal"
            print(json.dumps({"equal_steps": num_steps}) if json_ else text)
        else:
            metrics = stats_of(read_journal(file))
            if not json_:
                settings = (f"[dim]{k}[/] {escape(str(v))}" for k, v in metrics.config.items())
                Console().print("  ".join(settings))
            render.print_run(file.name, summarize(metrics), metrics.config, as_json=json_)


def _export(file: Path, target: Path, as_json: bool) -> None:
    events = list(to_perfetto(read_journal(file)))
    with options.written(target) as output:
        output.write(json.dumps({"traceEvents": events}).encode())
    text = f"{render.counted(len(events), 'event')} written to {target}; open the file in ui.perfetto.dev"
    print(json.dumps({"events": len(events)}) if as_json else text)


def _diff(file: Path, other: Path, as_json: bool) -> None:
    """Print the first difference; exit code 1 if there is one."""
    are_distinct = file.name != other.name
    names = (file.name, other.name) if are_distinct else (str(file), str(other))
    found = diff(read_journal(file), read_journal(other), names)
    if as_json:
        print(json.dumps(found._asdict()))
    else:
        is_equal, console = found.step is None, Console()
        where = "have equal decisions" if is_equal else f"differ from step {found.step} on"
        console.print(f"[bold]{escape(names[0])} and {escape(names[1])} {where}[/]", soft_wrap=True)
        for line in found.lines:
            console.print(f"  {line}", highlight=False, markup=False)
    if found.step is not None:
        raise typer.Exit(1)
