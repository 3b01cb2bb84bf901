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
RENAMED = {"samples": "n"}  # options with a name of their own


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
Dtype = Annotated[
    str, _model("auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16 or float16.")
]
Quantization = Annotated[
    str,
    _model(
        "none; on a CPU also int8 (8-bit products of the file's quantized weights), or auto: "
        "whichever is fastest here."
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
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
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
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan the next step while one runs.",
            rich_help_panel=options.SCHEDULER,
            show_default="on for a GPU",
        ),
    ] = None
    recipe: options.Recipe = None
    queue: options.Queue = None
    chunk: options.Chunk = None
    headroom: options.Headroom = None
    victim: options.Victim = None
    swap: options.Swap = None
    max_num_seqs: Annotated[
        int | None, _scheduler("Seats: requests that run at once.", show_default=GPUS_SEATS)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _scheduler("Tokens computed by one step.", show_default=GPUS_TOKENS)
    ] = None
    num_scheduler_steps: options.NumSchedulerSteps = None
    block_size: options.BlockSize = None
    num_blocks: options.NumBlocks = None
    num_host_blocks: options.NumHostBlocks = None
    max_model_len: Annotated[
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
                self.model, device=self.device, dtype=self.dtype,
                quantization=self.quantization,
                load_format=self.load_format, preset=self.preset, attention=self.attention,
                kv_cache_dtype=self.kv_cache_dtype, kv_memory=self.kv_memory,
                gpu_memory_utilization=self.gpu_memory_utilization, threads=self.threads,
                async_scheduling=self.async_scheduling, trace_out=self.trace_out, progress=progress, **settings,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, and when a text ends."""

    max_tokens: Annotated[int, _sampling("Longest output, in tokens.")] = 128
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


def resolved(dtype: str, quantization: str, device: str) -> str:
    """The precision that these options mean on a device, as text."""
    check_extras("running a model", "torch")
    from headway.model import devices, precision

    return precision.resolved(dtype, quantization, devices.use_device(device))


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
