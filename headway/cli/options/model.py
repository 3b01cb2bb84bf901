"""Options of the commands that run a model, and how they become an LLM and sampling params.

Options that belong together are one dataclass; `spread` lets a command take them as one argument.
Imports nothing of the model before one is asked for: the simulator's commands stay light.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from headway.cli.options import common as options
from headway.cli.options.packages import check_extras
from headway.errors import FormatError
from headway.sampling_params import SamplingParams
from headway.scheduler.presets import NUMBERS, SLOTS

if TYPE_CHECKING:
    from headway.llm import LLM

MODEL, SAMPLING = "Model", "Sampling"
GPUS_SEATS, GPUS_TOKENS = "64; on a GPU the preset's", "512; on a GPU the preset's"
RENAMED = {"max_new_tokens": "max_tokens", "samples": "n"}  # options with a name of their own


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of a dataclass type are given as their fields, an option each."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    taken = inspect.signature(command).parameters.values()
    shown = [p.replace(annotation=hints[p.name]) for p in taken if p.name not in groups]
    for group in groups.values():
        kinds = get_type_hints(group, include_extras=True)
        shown += [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name]
            )
            for f in fields(group)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _model(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=MODEL, **more)


def _sampling(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SAMPLING, **more)


def _scheduler(text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=options.SCHEDULER, **more)


Device = Annotated[str, _model("auto: a GPU if one can be used; cpu, cuda, cuda:1.")]
Precision = Annotated[
    str,
    _model(
        "auto: bfloat16 on a GPU, else float32, which is exact. Also float16, and on a CPU fast "
        "(what this machine does best) and quantized."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, how it computes, and how it is scheduled."""

    model: Annotated[
        str,
        _model("A bundled name, a model's folder, a .gguf file or a hub id.", "--model", "-m"),
    ] = "smollm2-135m"
    device: Device = "auto"
    precision: Precision = "auto"
    load_format: Annotated[
        str, _model("auto, safetensors, gguf, or dummy: random weights, a config.json is enough.")
    ] = "auto"
    kv_cache_dtype: Annotated[
        str, _model("auto: as the model computes; fp8: half of that, GPU only.")
    ] = "auto"
    attention: Annotated[
        str, _model("Of a GPU: triton; flashinfer or flash-attn if installed.")
    ] = "triton"
    kv_memory: Annotated[
        str | None,
        _model("Memory for keys and values, e.g. 2GiB.", show_default="a share of what is free"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, _model("Share of a GPU's memory that may be in use, by all there is in it.")
    ] = 0.9
    threads: Annotated[int | None, _model("CPU threads.", show_default="torch's choice")] = None
    trace_out: Annotated[
        Path | None, _model("Write every decision to this file; see `headway trace`.")
    ] = None
    preset: options.Preset = "headway"
    depth: Annotated[
        int | None,
        _scheduler(
            "Plans in flight while the next is made: 0 or 1.", show_default="1 on a GPU, else 0"
        ),
    ] = None
    recipe: options.Recipe = None
    queue: options.Queue = None
    chunk: options.Chunk = None
    headroom: options.Headroom = None
    victim: options.Victim = None
    swap: options.Swap = None
    max_requests: Annotated[
        int | None, _scheduler("Seats: requests that run at once.", show_default=GPUS_SEATS)
    ] = None
    max_tokens: Annotated[
        int | None, _scheduler("Tokens computed by one step.", show_default=GPUS_TOKENS)
    ] = None
    decode_steps: options.DecodeSteps = None
    block_size: options.BlockSize = None
    num_blocks: options.NumBlocks = None
    num_host_blocks: options.NumHostBlocks = None
    max_length: Annotated[
        int | None,
        _scheduler("Longest prompt and output together.", show_default="the model's"),
    ] = None

    def load(self, **defaults: Any) -> LLM:
        """The model, ready to run; `defaults` are scheduler settings that no option changed."""
        options.see_own_policies()
        if self.trace_out is not None:
            check_writable(self.trace_out)
        given = {name: getattr(self, name) for name in (*SLOTS, *NUMBERS)}
        settings = defaults | {name: value for name, value in given.items() if value is not None}
        with _loading_bar() as progress:
            return _llm_class()(
                self.model, device=self.device, precision=self.precision,
                load_format=self.load_format, preset=self.preset, attention=self.attention,
                kv_cache_dtype=self.kv_cache_dtype, kv_memory=self.kv_memory,
                gpu_memory_utilization=self.gpu_memory_utilization, threads=self.threads,
                depth=self.depth, trace_out=self.trace_out, progress=progress, **settings,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, and when a text ends."""

    max_new_tokens: Annotated[
        int, _sampling("Longest output, in tokens. (--max-tokens is the step's budget.)")
    ] = 128
    temperature: Annotated[float, _sampling("0 takes the most probable token.")] = 0.0
    top_p: Annotated[float, _sampling("Only the likeliest tokens of this summed probability.")] = 1
    top_k: Annotated[int, _sampling("Only so many of the likeliest tokens; 0: all.")] = 0
    min_p: Annotated[float, _sampling("Only tokens of this share of the best one's chance.")] = 0
    repetition_penalty: Annotated[float, _sampling("Above 1, what was there is less likely.")] = 1
    seed: Annotated[int | None, _sampling("For the same text again.", show_default="random")] = None
    stop: Annotated[list[str] | None, _sampling("A text that ends it. May be repeated.")] = None

    def params(self) -> SamplingParams:
        """The same, as a request carries it; InvalidRequest for what makes no sense."""
        given = {RENAMED.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**given)


def check_writable(path: Path) -> None:
    """FormatError if a file cannot be written: better now than after the run."""
    try:
        path.open("w", encoding="utf-8").close()
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None


def resolved(precision: str, device: str) -> str:
    """The precision that auto means on a device, given as its text."""
    check_extras("running a model", "torch")
    from headway.model import devices
    from headway.model import precision as precisions

    return precisions.resolved(precision, devices.use_device(device))


def _llm_class() -> type[LLM]:
    check_extras("running a model", "torch")
    from headway.llm import LLM

    return LLM


@contextmanager
def _loading_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, gone when the model is there; yields what is told how far it has come."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("starting", total=None)  # importing torch takes a while
        yield lambda title, done, total: progress.update(
            task, description=title, completed=done, total=total
        )
