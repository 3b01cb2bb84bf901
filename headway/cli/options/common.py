"""Options that several commands share.

Options that belong together are the fields of one dataclass, each declared by `option`; `spread`
lets a command take them as one argument.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_origin, get_type_hints

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
from headway.scheduler.policies.presets import NONE, OPTIONAL, PRESETS, SLOTS
from headway.scheduler.policies.queue import custom

SCHEDULER = "Scheduler"
SLOT_HELP = {
    "batching": "How a step combines prompts and decodes",
    "queue": "Order of waiting requests",
    "chunk": "How prompts are split over steps",
    "headroom": "KV blocks that must stay free at an admission",
    "victim": "Which request is preempted first",
    "swap": "Whether a preempted request is swapped or recomputed",
    "draft": "Tokens that are drafted for a decoding request (speculative decoding)",
    "drafter": "What makes drafts",
}


def flag(text: str, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """An option with this help text, in a panel of --help."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **more)


def option(default: Any, text: str, *flags: str, **more: Any) -> Any:
    """A parameter of a command or a field of an options class: its default, and its `flag`."""
    return field(default=default, metadata={"option": flag(text, *flags, **more)})


def argument(default: Any, text: str, **more: Any) -> Any:
    """A parameter of a command that is given without a name; MISSING: it must be given."""
    return field(default=default, metadata={"option": typer.Argument(help=text, **more)})


scheduler_flag = partial(flag, panel=SCHEDULER)


def _slot(name: str) -> Any:
    known = ", ".join(f.__name__ for f in SLOTS[name] if f is not custom)
    known = f"{NONE}, {known}" if name in OPTIONAL else known
    text = f"{SLOT_HELP[name]}: {known}, module:function or 'module:name(number)'."
    return Annotated[str | None, scheduler_flag(text, show_default="from the preset")]


def number_flag(text: str, default: str = "from the preset") -> Any:
    """The annotation of a scheduler option that is a whole number."""
    return Annotated[int | None, scheduler_flag(text, show_default=default)]


Preset = Annotated[str, scheduler_flag(f"Scheduler preset: {', '.join(PRESETS)}.", "--preset")]
MAX_NUM_SEQS = "Maximum number of running requests."
MAX_NUM_BATCHED_TOKENS = "Maximum number of tokens computed in one step."
MAX_MODEL_LEN = "Maximum number of tokens of a request, prompt and output together."
TRACE_BLOCKS = "Write the numbers of all KV blocks into the trace, for the lab."
TRACE_REDACT = "Write lengths instead of token ids into the trace; it cannot be replayed."
SPECULATIVE_CONFIG = (
    "vLLM's JSON for speculative decoding, which sets --draft and --drafter: "
    '\'{"method": "ngram", "num_speculative_tokens": 4}\'.'
)
ASYNC_SCHEDULING = "Schedule the next step while the current one runs."
JSON = option(False, "Print one JSON object instead of tables.", "--json")
ALLOW_OWN_POLICIES = option(
    False,
    "Allow traces, and links to the lab, to name module:function policies, which are imported. "
    "The lab's page asks before each.",
    "--allow-own-policies",
)
Flags = dict[str, object]  # by the name of a field: its option, or an annotation with another type
SCHEDULER_FLAGS: Flags = {
    **{name: _slot(name) for name in SLOTS},
    "speculative_config": Annotated[str | None, scheduler_flag(SPECULATIVE_CONFIG)],
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
    """Make the command that Typer sees: one parameter for each option.

    A parameter has an `option` or `argument` as its default, or stands for several options. Its
    annotation is then an options class, or `Annotated[type, Flags]`: flags for the fields of a
    dataclass, for its method `from_flags`, or for a dict of those given.
    """
    hints, shown = get_type_hints(command, include_extras=True), list[inspect.Parameter]()
    groups: dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(declared := parameter.default, Field):
            default = parameter.empty if declared.default is MISSING else declared.default
            made = declared.metadata["option"]
            shown.append(_parameter(name, Annotated[hints[name], made], default))
        else:
            groups[name] = _group_of(hints[name])
            shown += groups[name][1]
    # The scheduler's options are many; --help shows them last.
    shown.sort(key=lambda p: p.annotation.__metadata__[0].rich_help_panel == SCHEDULER)
    defaults = {parameter.name: parameter.default for parameter in shown}

    @wraps(command)
    def run(**given: Any) -> None:
        given = {**defaults, **given}
        for name, (make, options) in groups.items():
            given[name] = make(**{each.name: given.pop(each.name) for each in options})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _group_of(hint: Any) -> tuple[Callable[..., Any], list[inspect.Parameter]]:
    """What makes an argument of a command from several options, and these."""
    kind = getattr(hint, "__origin__", hint)
    kind = get_origin(kind) or kind  # dict of dict[str, str]
    known = {each.name: each for each in fields(kind)} if is_dataclass(kind) else {}
    types, parameters = get_type_hints(kind) if known else {}, []
    own = {name: each.metadata.get("option") for name, each in known.items()}
    for name, declared in (own if kind is hint else hint.__metadata__[0]).items():
        is_typed = hasattr(declared, "__metadata__")
        annotation = declared if is_typed else Annotated[types[name], declared]
        default = known[name].default if name in known else None
        parameters.append(_parameter(name, annotation, default))
    return (_given if kind is dict else getattr(kind, "from_flags", kind)), parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _given(**values: object) -> dict[str, object]:
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


def stderr() -> Console:
    """A console for messages beside the output: one line each."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


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
