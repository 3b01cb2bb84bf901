"""Options that several commands share.

Options that belong together are one dataclass; `spread` lets a command take them as one argument.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from headway.errors import FormatError
from headway.scheduler.policies.presets import PRESETS, SLOTS
from headway.scheduler.policies.queue import custom

SCHEDULER = "Scheduler"
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


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


def _slot(name: str) -> Any:
    known = ", ".join(f.__name__ for f in SLOTS[name] if f is not custom)
    text = f"{SLOT_HELP[name]}: {known}, or module:function."
    return Annotated[str | None, scheduler_option(text, show_default="from the preset")]


def number_flag(text: str, default: str = "from the preset") -> Any:
    """The annotation of a scheduler option that is a whole number."""
    return Annotated[int | None, scheduler_option(text, show_default=default)]


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
Flags = dict[str, Any]  # by the name of a field: its option, or an annotation with another type
SCHEDULER_FLAGS: Flags = {
    **{name: _slot(name) for name in SLOTS},
    "max_num_seqs": number_flag(MAX_NUM_SEQS),
    "max_num_batched_tokens": number_flag(MAX_NUM_BATCHED_TOKENS),
    "num_scheduler_steps": number_flag("Decode steps per plan while no request waits."),
    "block_size": number_flag("Tokens in a KV cache block."),
    "num_blocks": number_flag("KV cache blocks on the device.", default="as many as fit"),
    "num_host_blocks": number_flag(
        "KV cache blocks in host memory, for swapping.",
        default="0; up to num_blocks if the swap rule may swap",
    ),
    "max_model_len": number_flag(MAX_MODEL_LEN),
}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace some parameters of a command by several options each.

    Their annotations are dataclasses whose fields have options, or `Annotated[type, Flags]`: flags
    for the fields of a dataclass, for its method `from_flags`, or for a dict of those given.
    """
    hints = get_type_hints(command, include_extras=True)
    taken = inspect.signature(command).parameters.values()
    groups = {name: found for name, hint in hints.items() if (found := _flags_of(hint))}
    shown = [p.replace(annotation=hints[p.name]) for p in taken if p.name not in groups]
    of_groups = [
        inspect.Parameter(name, KEYWORD_ONLY, default=default, annotation=annotation)
        for _, flags in groups.values() for name, (annotation, default) in flags.items()
    ]  # fmt: skip
    # The scheduler's options are many; --help shows them last.
    of_groups.sort(key=lambda p: p.annotation.__metadata__[0].rich_help_panel == SCHEDULER)
    shown += of_groups

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (make, flags) in groups.items():
            given[name] = make(**{flag: given.pop(flag) for flag in flags})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _flags_of(hint: Any) -> tuple[Callable[..., Any], dict[str, tuple[Any, Any]]] | None:
    """What makes a group from its options, and their annotations and defaults by name; or None."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint, _fields_of(hint)
    flags = next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, dict)), {})
    if not flags:
        return None
    kind: Any = getattr(hint.__origin__, "__origin__", hint.__origin__)  # dict of dict[str, Any]
    known: dict[str, tuple[Any, Any]] = {} if kind is dict else _fields_of(kind)
    options = {}
    for name, flag in flags.items():
        type_, default = known.get(name, (None, None))
        is_annotation = hasattr(flag, "__metadata__")
        options[name] = (flag if is_annotation else Annotated[type_, flag], default)
    return (_given if kind is dict else getattr(kind, "from_flags", kind)), options


@cache
def _fields_of(group: Any) -> dict[str, tuple[Any, Any]]:
    """Annotations and defaults of a dataclass; evaluating the annotations takes a while."""
    hints = get_type_hints(group, include_extras=True)
    return {f.name: (hints[f.name], f.default) for f in fields(group)}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file; FormatError if it cannot be written."""
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None


@contextmanager
def stderr_progress(*columns: ProgressColumn) -> Iterator[Progress]:
    """Progress bars on stderr with these columns after the title, removed at the end."""
    console, title = Console(stderr=True), TextColumn("{task.description}", markup=False)
    is_hidden = not console.is_terminal
    with Progress(title, *columns, console=console, transient=True, disable=is_hidden) as progress:
        yield progress


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, removed at the end; yields a function that advances it."""
    with stderr_progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
