"""`headway compare`: one workload, several schedulers, side by side."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cli.options import common as options
from headway.cli.view import render
from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile, load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.jobs import Job
from headway.scheduler import policy_text as slots
from headway.scheduler.presets import NUMBERS, PRESETS, SLOTS

KNOWN = (*SLOTS, *NUMBERS)
ALL_PRESETS = ",".join(PRESETS)
Presets = Annotated[str, typer.Option(help="Comma-separated presets.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="One more scheduler: 'name: preset; slot=value; number=value'. May be repeated.",
    ),
]


def compare_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    presets: Presets = ALL_PRESETS,
    variant: Variants = None,
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    json_: options.Json = False,
    async_scheduling: options.AsyncScheduling = False,
    limit: options.Limit = None,
    speed: options.Speed = 1.0,
    allowed_tokens: options.AllowedTokens = None,
    recipe: options.Recipe = None,
    queue: options.Queue = None,
    chunk: options.Chunk = None,
    headroom: options.Headroom = None,
    victim: options.Victim = None,
    swap: options.Swap = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    num_scheduler_steps: options.NumSchedulerSteps = None,
    block_size: options.BlockSize = None,
    num_blocks: options.NumBlocks = None,
    num_host_blocks: options.NumHostBlocks = None,
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Run one workload under several presets and variants, and show them side by side."""
    chosen, changes = load_profile(profile), locals().copy()
    configs = {
        name: options.make_config(name, chosen, changes)
        for name in filter(None, map(str.strip, presets.split(",")))
    }
    if not configs and not variant:
        raise ConfigError(f"nothing to compare; presets: {ALL_PRESETS}")
    for text in variant or ():
        name, base, own = parse_variant(text)
        if name in configs:
            raise ConfigError(f"variant {name!r}: this name is taken")
        configs[name] = options.make_config(base, chosen, {**changes, **own})
    jobs = options.load_workload(workload, limit, speed, allowed_tokens)
    summaries = run_all(jobs, configs, chosen, async_scheduling)
    if json_:
        print(json.dumps(summaries, indent=2))
        return
    Console().print(render.comparison(f"{len(jobs)} requests on {chosen.name}", summaries))


def run_all(
    jobs: list[Job], configs: dict[str, Config], profile: Profile, async_scheduling: bool
) -> dict[str, Summary]:
    """A summary for every config."""
    summaries = {}
    for name, config in configs.items():
        with options.progress_bar(f"simulating {name}", sum(job.n for job in jobs)) as progress:
            run = simulate(
                jobs, config, profile, async_scheduling=async_scheduling, progress=progress
            )
        summaries[name] = summarize(run.metrics, len(run.rejected))
    return summaries


def parse_variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Name, preset and changes of 'name: preset; slot=value; ...'."""
    name, colon, rest = text.partition(":")
    base, *changes = [part.strip() for part in rest.split(";")]
    pairs = [change.partition("=") for change in changes if change]
    if not colon or not name.strip() or not all(equals for _, equals, _ in pairs):
        raise ConfigError(f"variant {text!r} is not 'name: preset; slot=value; number=value'")
    values: dict[str, Any] = {key.strip(): value.strip() for key, _, value in pairs}
    for key in values:
        slots.find(f"slot or number in variant {name.strip()!r}", key, dict.fromkeys(KNOWN))
    for key in NUMBERS:
        if key in values:
            try:
                values[key] = int(values[key])
            except ValueError:
                raise ConfigError(f"variant {name}: {key} must be a whole number") from None
    return name.strip(), base, values
