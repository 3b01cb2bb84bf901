"""`headway simulate`: one workload, one scheduler, one report."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headway.cli.options import common as options
from headway.cli.view import render
from headway.errors import FormatError
from headway.lab.cost import load_profile
from headway.lab.doctor import examine
from headway.lab.simulate import simulate
from headway.lab.summary import summarize

TraceOut = Annotated[
    Path | None, typer.Option(help="Write every decision to this file; see `headway trace`.")
]


def simulate_command(
    workload: options.Workload = options.DEFAULT_WORKLOAD,
    preset: options.Preset = "headway",
    profile: options.ProfileName = "llama3.1-8b-a100-80gb",
    trace_out: TraceOut = None,
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
    """Run a workload through the scheduler on a virtual clock, and say how it went."""
    chosen = load_profile(profile)
    config = options.make_config(preset, chosen, locals())
    jobs = options.load_workload(workload, limit, speed, allowed_tokens)
    try:
        with (
            trace_out.open("w", encoding="utf-8") if trace_out else nullcontext() as file,
            options.progress_bar(f"simulating {preset}", sum(job.n for job in jobs)) as progress,
        ):
            run = simulate(
                jobs,
                config,
                chosen,
                async_scheduling=async_scheduling,
                trace=file,
                progress=progress,
            )
    except OSError as error:
        raise FormatError(trace_out, None, f"cannot be written: {error.strerror}") from None
    summary = summarize(run.metrics, len(run.rejected))
    findings = examine(summary, run.metrics.config)
    if json_:
        doctor = [finding._asdict() for finding in findings]
        print(json.dumps({"config": run.metrics.config, **summary, "doctor": doctor}, indent=2))
        return
    console = Console()
    console.print(render.report(f"{preset} on {chosen.name}", summary))
    render.print_rejected(console, run.rejected)
    render.print_findings(console, findings)
