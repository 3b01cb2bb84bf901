"""`headway simulate`: one workload, one scheduler. `headway compare`: one workload, several."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cli.options import common as options
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError, FormatError
from headway.lab.cost import Profile, load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import WorkloadRequest
from headway.scheduler import policy_text
from headway.scheduler.presets import NUMBERS, PRESETS, SLOTS

TraceOut = Annotated[
    Path | None, typer.Option(help="Write a trace of all decisions; see `headway trace`.")
]
ALL_PRESETS = ",".join(PRESETS)
Presets = Annotated[str, typer.Option(help="Comma-separated presets.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="A further scheduler: 'name: preset; slot=value; number=value'. May be repeated.",
    ),
]


@options.spread
def simulate_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    preset: options.Preset = "headway",
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    trace_out: TraceOut = None,
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    *,
    selection: options.WorkloadOptions,
    scheduler: options.SchedulerOptions,
) -> None:
    """Run a workload through the scheduler on a virtual clock and report the result."""
    chosen = load_profile(profile)
    config = options.make_config(preset, chosen, scheduler.changes())
    requests = selection.load(workload)
    total = sum(request.n for request in requests)
    try:
        with (
            trace_out.open("w", encoding="utf-8") if trace_out else nullcontext() as file,
            options.progress_bar(f"simulating {preset}", total) as progress,
        ):
            result = simulate(
                requests,
                config,
                chosen,
                async_scheduling=async_scheduling,
                trace=file,
                progress=progress,
            )
    except OSError as error:
        raise FormatError(trace_out, None, f"cannot be written: {error.strerror}") from None
    summary = summarize(result.metrics, len(result.rejected))
    title = f"{preset} on {chosen.name}"
    render.print_run(title, summary, result.metrics.config, result.rejected, as_json=json_)


@options.spread
def compare_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    presets: Presets = ALL_PRESETS,
    variant: Variants = None,
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    *,
    selection: options.WorkloadOptions,
    scheduler: options.SchedulerOptions,
) -> None:
    """Run one workload under several presets and variants, and show the results side by side."""
    chosen, changes = load_profile(profile), scheduler.changes()
    configs = {
        name: options.make_config(name, chosen, changes)
        for name in filter(None, map(str.strip, presets.split(",")))
    }
    if not configs and not variant:
        raise ConfigError(f"nothing to compare; give --presets ({ALL_PRESETS}) or --variant")
    for text in variant or ():
        name, base, own = parse_variant(text)
        if name in configs:
            raise ConfigError(f"variant {name!r}: this name is already used")
        configs[name] = options.make_config(base, chosen, {**changes, **own})
    requests = selection.load(workload)
    summaries = run_all(requests, configs, chosen, async_scheduling)
    if json_:
        print(json.dumps(summaries, indent=2))
        return
    Console().print(render.comparison(f"{len(requests)} requests on {chosen.name}", summaries))


def run_all(
    requests: list[WorkloadRequest],
    configs: dict[str, Config],
    profile: Profile,
    async_scheduling: bool,
) -> dict[str, Summary]:
    """Simulate the workload under every config; the summaries by name."""
    summaries, total = {}, sum(request.n for request in requests)
    for name, config in configs.items():
        with options.progress_bar(f"simulating {name}", total) as progress:
            result = simulate(
                requests, config, profile, async_scheduling=async_scheduling, progress=progress
            )
        summaries[name] = summarize(result.metrics, len(result.rejected))
    return summaries


def parse_variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Name, preset and changes of 'name: preset; slot=value; ...'; ConfigError if invalid."""
    name, colon, rest = text.partition(":")
    base, *changes = [part.strip() for part in rest.split(";")]
    pairs = [change.partition("=") for change in changes if change]
    if not colon or not name.strip() or not all(equals for _, equals, _ in pairs):
        raise ConfigError(
            f"a variant must look like 'name: preset; slot=value; number=value', not {text!r}"
        )
    values: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    known = dict.fromkeys((*SLOTS, *NUMBERS))
    for key in values:
        policy_text.lookup(f"slot or number in variant {name.strip()!r}", key, known)
    for key in NUMBERS:
        if key in values:
            try:
                values[key] = int(values[key])
            except ValueError:
                raise ConfigError(
                    f"variant {name.strip()!r}: {key} must be a whole number, not {values[key]!r}"
                ) from None
    return name.strip(), base, values
