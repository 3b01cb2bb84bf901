"""Options that several commands share, and the workload and config that they describe.

Options that belong together are one dataclass; `spread` lets a command take them as one argument.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
from headway.errors import FormatError
from headway.lab.cost import Profile
from headway.lab.simulate import config_for
from headway.lab.workload.files import load_workload
from headway.lab.workload.request import MAX_TOKENS, WorkloadRequest
from headway.scheduler.policies.presets import NUMBERS, PRESETS, SLOTS
from headway.scheduler.policies.queue import custom
from headway.scheduler.policies.text import ANY

SCHEDULER = "Scheduler"
DEFAULT_WORKLOAD = (
    "requests=200,arrivals=poisson(10),prompt=lognormal(300,0.8),output=lognormal(250,0.7)"
)


SLOT_HELP = {
    "batching": "How a step combines prompts and decodes",
    "queue": "Order of waiting requests",
    "chunk": "How prompts are split over steps",
    "headroom": "KV blocks that must stay free at an admission",
    "victim": "Which request is preempted first",
    "swap": "Whether a preempted request is swapped or recomputed",
}


def panel(name: str) -> Callable[..., Any]:
    """A function that makes an option in this panel of --help, from its help and its flags."""

    def option(text: str, *flags: str, **more: Any) -> Any:
        return typer.Option(*flags, help=text, rich_help_panel=name, **more)

    return option


scheduler_option = panel(SCHEDULER)
_workload = panel("Workload")


def _slot(name: str) -> Any:
    known = ", ".join(f.__name__ for f in SLOTS[name] if f is not custom)
    return _number(f"{SLOT_HELP[name]}: {known}, or module:function.")


def _number(text: str, default: str = "from the preset") -> Any:
    return scheduler_option(text, show_default=default)


Workload = Annotated[
    str,
    typer.Argument(
        help="Workload file (Azure .csv, Mooncake or Headway .jsonl, decision trace) or synthetic "
        "workload, "
        "e.g. 'arrivals=poisson(5),prompt=uniform(100,1024),output=lognormal(200,0.8)'."
    ),
]
ProfileName = Annotated[
    str, typer.Option("--profile", help="Name of a bundled profile, or a .json file.")
]
Preset = Annotated[str, scheduler_option(f"Scheduler preset: {', '.join(PRESETS)}.", "--preset")]
MAX_NUM_SEQS = "Maximum number of running requests."
MAX_NUM_BATCHED_TOKENS = "Maximum number of tokens computed in one step."
MAX_MODEL_LEN = "Maximum number of tokens of a request, prompt and output together."
TRACE_BLOCKS = "Write the numbers of all KV blocks into the trace, for the lab."
TRACE_REDACT = "Write lengths instead of token ids into the trace; it cannot be replayed."
ASYNC_SCHEDULING = "Schedule the next step while the current one runs."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
AllowOwnPolicies = Annotated[
    bool,
    typer.Option(
        "--allow-own-policies",
        help="Allow traces, and links to the lab, to name module:function policies, which are "
        "imported. The lab's page asks before each.",
    ),
]
AsyncScheduling = Annotated[
    bool, scheduler_option(ASYNC_SCHEDULING, "--async-scheduling/--no-async-scheduling")
]


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The policies and numbers of a scheduler; None keeps the preset's value."""

    batching: Annotated[str | None, _slot("batching")] = None
    queue: Annotated[str | None, _slot("queue")] = None
    chunk: Annotated[str | None, _slot("chunk")] = None
    headroom: Annotated[str | None, _slot("headroom")] = None
    victim: Annotated[str | None, _slot("victim")] = None
    swap: Annotated[str | None, _slot("swap")] = None
    max_num_seqs: Annotated[int | None, _number(MAX_NUM_SEQS)] = None
    max_num_batched_tokens: Annotated[int | None, _number(MAX_NUM_BATCHED_TOKENS)] = None
    num_scheduler_steps: Annotated[
        int | None, _number("Decode steps per plan while no request waits.")
    ] = None
    block_size: Annotated[int | None, _number("Tokens in a KV cache block.")] = None
    num_blocks: Annotated[
        int | None, _number("KV cache blocks on the device.", default="as many as fit")
    ] = None
    num_host_blocks: Annotated[
        int | None,
        _number(
            "KV cache blocks in host memory, for swapping.",
            default="0; up to num_blocks if the swap rule may swap",
        ),
    ] = None
    max_model_len: Annotated[int | None, _number(MAX_MODEL_LEN)] = None

    def changes(self) -> dict[str, Any]:
        """The values that differ from the preset."""
        given = {name: getattr(self, name) for name in (*SLOTS, *NUMBERS)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """How the requests of a workload are selected and changed."""

    limit: Annotated[int | None, _workload("Use only the first N requests.")] = None
    speed: Annotated[float, _workload("Divide arrival times by this factor.")] = 1.0
    allowed_tokens: Annotated[
        int | None,
        _workload(
            "max_tokens of requests whose workload file has none. If it is larger than the "
            "real output, the scheduler does not know when a request ends.",
            show_default="the real output",
            min=1,
            max=MAX_TOKENS,
        ),
    ] = None

    def load(self, workload: str) -> list[WorkloadRequest]:
        """The requests of a file or of a synthetic workload."""
        return load_workload(workload, self.limit, self.speed, self.allowed_tokens)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the dataclass parameters of a command by one option for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    taken = inspect.signature(command).parameters.values()
    shown = [p.replace(annotation=hints[p.name]) for p in taken if p.name not in groups]
    of_groups = [option for group in groups.values() for option in _options_of(group)]
    # The scheduler's options are many; --help shows them last.
    of_groups.sort(key=lambda p: p.annotation.__metadata__[0].rich_help_panel == SCHEDULER)
    shown += of_groups

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


@cache
def _options_of(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters; evaluating the annotations takes a while."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
        )
        for f in fields(group)
    ]


def make_config(name: str, profile: Profile, changes: dict[str, Any]) -> Config:
    """A preset with the changes of the command line; policies may be in the working directory."""
    import_from_working_directory()
    return config_for(name, profile, changes, ANY)


def import_from_working_directory() -> None:
    """Let module:function policies be found in the working directory."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def check_writable(path: Path) -> None:
    """FormatError if a file cannot be written; better now than after a long run.

    An existing file keeps its content; a new one is not left behind.
    """
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None
    if is_new:
        path.unlink()


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, removed at the end; yields a function that advances it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
