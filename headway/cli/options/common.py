"""Options that several commands share, and how they become a workload, a profile and a config."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from headway.config import Config
from headway.lab.cost import Profile
from headway.lab.workload.files import adjust, read_jobs
from headway.lab.workload.jobs import MAX_TOKENS, Job
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies import recompute
from headway.scheduler.presets import NUMBERS, PRESETS, SLOTS, preset
from headway.scheduler.queues import custom

SCHEDULER, WORKLOAD = "Scheduler", "Workload"
DEFAULT_WORKLOAD = (
    "requests=200,arrivals=poisson(10),prompt=lognormal(300,0.8),output=lognormal(250,0.7)"
)


def _slot(name: str) -> Any:
    known = ", ".join(f.__name__ for f in SLOTS[name] if f is not custom)
    return typer.Option(
        help=f"{known}, or module:function.", rich_help_panel=SCHEDULER, show_default="preset's"
    )


def _number(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=SCHEDULER, show_default="preset's")


Workload = Annotated[
    str,
    typer.Argument(
        help="A trace file (Azure .csv, Mooncake .jsonl, Headway .jsonl) or a synthetic workload, "
        "e.g. 'arrivals=poisson(5),prompt=uniform(100,1024),output=lognormal(200,0.8)'."
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Only the first so many requests.", rich_help_panel=WORKLOAD)
]
Speed = Annotated[
    float, typer.Option(help="Arrivals so many times as fast.", rich_help_panel=WORKLOAD)
]
AllowedTokens = Annotated[
    int | None,
    typer.Option(
        help="max_tokens of requests in a trace file that does not say: above the real output, "
        "the scheduler does not know when they end.",
        rich_help_panel=WORKLOAD,
        show_default="the real output",
        min=1,
        max=MAX_TOKENS,
    ),
]
ProfileName = Annotated[str, typer.Option("--profile", help="A profile's name or a .json file.")]
Preset = Annotated[
    str, typer.Option("--preset", help=f"{', '.join(PRESETS)}.", rich_help_panel=SCHEDULER)
]
Recipe = Annotated[str | None, _slot("recipe")]
Queue = Annotated[str | None, _slot("queue")]
Chunk = Annotated[str | None, _slot("chunk")]
Headroom = Annotated[str | None, _slot("headroom")]
Victim = Annotated[str | None, _slot("victim")]
Swap = Annotated[str | None, _slot("swap")]
MaxNumSeqs = Annotated[int | None, _number("Seats: requests that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, _number("Tokens computed by one step.")]
NumSchedulerSteps = Annotated[int | None, _number("Decode steps per plan while nobody waits.")]
BlockSize = Annotated[int | None, _number("Tokens in a KV block.")]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="KV blocks on the device.", rich_help_panel=SCHEDULER, show_default="what fits"
    ),
]
NumHostBlocks = Annotated[int | None, _number("KV blocks on the host, for swap.")]
MaxModelLen = Annotated[int | None, _number("Longest prompt and output together.")]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan the next step while one runs.",
        rich_help_panel=SCHEDULER,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def load_workload(text: str, limit: int | None, speed: float, max_tokens: int | None) -> list[Job]:
    """Jobs from a file, or from a synthetic workload's text."""
    if "=" in text and not Path(text).exists():
        return adjust(parse_synthetic(text).jobs(), limit, speed)
    return read_jobs(text, limit=limit, speed=speed, max_tokens=max_tokens or 1)


def make_config(name: str, profile: Profile, changes: dict[str, Any]) -> Config:
    """A preset with what the command line changes; as many blocks as the profile has room for.

    Where the swap rule may use the host, as many there, unless told otherwise.
    """
    see_own_policies()
    changes = {k: v for k, v in changes.items() if v is not None and k in (*SLOTS, *NUMBERS)}
    config = preset(name, **changes)
    if "num_blocks" not in changes:
        changes["num_blocks"] = profile.num_blocks(config.block_size)
    if config.swap is not recompute:
        changes.setdefault("num_host_blocks", changes["num_blocks"])
    return preset(name, **changes)


def see_own_policies() -> None:
    """module:function policies live where the user is."""
    if "" not in sys.path:
        sys.path.insert(0, "")


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """A bar on stderr, gone when it is done; yields a function that advances it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
