"""Options of the commands that run a model, and the LLM and sampling parameters they describe.

Imports the model code only when a model is loaded, so that the simulator's commands start quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from headway.cli.options import common as options
from headway.cli.options.common import check_writable
from headway.cli.options.packages import check_extras
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

_model, sampling_option = options.panel("Model"), options.panel("Sampling")
MODEL_HELP = "Bundled model name, model folder, .gguf file or Hugging Face id."
KV_MEMORY_DEFAULT = "a fraction of the free memory"

Device = Annotated[
    str, _model("cpu, cuda, cuda:1, or auto: a GPU if there is one, otherwise the CPU.")
]
Dtype = Annotated[
    str,
    _model("float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU."),
]
Quantization = Annotated[
    str,
    _model(
        "none; on a CPU int8 (8-bit matrix products with the file's quantized weights) or auto (the "
        "fastest); on a GPU fp8 (8-bit weights and activations). A file in fp8 runs in fp8 if the "
        "GPU has it."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(options.SchedulerOptions):
    """The model, its execution, and the scheduler."""

    model: Annotated[
        str,
        _model(MODEL_HELP, "--model", "-m"),
    ] = "smollm2-135m"
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    load_format: Annotated[
        str,
        _model(
            "auto, safetensors, gguf, or dummy: random weights, which needs only a config.json."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        _model(
            "auto: the model's dtype; 8 bits, with small rounding errors: on a GPU fp8 (half the "
            "size), on a CPU int8 (about a quarter; needs the native kernels)."
        ),
    ] = "auto"
    attention: Annotated[
        str,
        _model("Attention kernels on a GPU: triton; or flashinfer or flash-attn if installed."),
    ] = "triton"
    deterministic: Annotated[
        bool,
        _model(
            "Compute the same bits for a request in any batch; slower on a GPU.",
            "--deterministic",
        ),
    ] = False
    kv_memory: Annotated[
        str | None,
        _model("Memory of the KV cache, e.g. 2GiB.", show_default=KV_MEMORY_DEFAULT),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        _model("Fraction of GPU memory that may be used, including other processes."),
    ] = 0.9
    tensor_parallel_size: Annotated[
        int, _model("Divide the model among this many GPUs, or processes on a CPU.")
    ] = 1
    tensor_parallel_sums: Annotated[
        str,
        _model(
            "exact: the same results as on one device, bit for bit on a CPU; fast: add partial "
            "sums; or auto: exact on a CPU, fast on GPUs."
        ),
    ] = "auto"
    threads: Annotated[
        int | None, _model("CPU threads of each process.", show_default="chosen by torch")
    ] = None
    trace_out: Annotated[
        Path | None, _model("Write a trace of all decisions to this file; see `headway trace`.")
    ] = None
    trace_blocks: Annotated[bool, _model(options.TRACE_BLOCKS, "--trace-blocks")] = False
    trace_redact: Annotated[bool, _model(options.TRACE_REDACT, "--trace-redact")] = False
    preset: options.Preset = "headway"
    async_scheduling: Annotated[
        bool | None,
        options.scheduler_option(
            options.ASYNC_SCHEDULING,
            "--async-scheduling/--no-async-scheduling",
            show_default="on with a GPU",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        options.scheduler_option(options.MAX_NUM_SEQS, show_default="64; on a GPU from the preset"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        options.scheduler_option(
            options.MAX_NUM_BATCHED_TOKENS, show_default="512; on a GPU from the preset"
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        options.scheduler_option(options.MAX_MODEL_LEN, show_default="the model's limit"),
    ] = None

    def load(self, **defaults: Any) -> LLM:
        """Load the model; `defaults` are scheduler settings for options that are not given."""
        options.import_from_working_directory()
        if self.trace_out is not None:
            check_writable(self.trace_out)
        settings = defaults | self.changes()
        with _loading_bar() as progress:
            return _llm_class()(
                self.model, device=self.device, dtype=self.dtype,
                quantization=self.quantization,
                load_format=self.load_format, preset=self.preset, attention=self.attention,
                kv_cache_dtype=self.kv_cache_dtype, kv_memory=self.kv_memory,
                deterministic=self.deterministic,
                gpu_memory_utilization=self.gpu_memory_utilization, threads=self.threads,
                tensor_parallel_size=self.tensor_parallel_size,
                tensor_parallel_sums=self.tensor_parallel_sums,
                async_scheduling=self.async_scheduling, trace_out=self.trace_out,
                trace_blocks=self.trace_blocks, trace_redact=self.trace_redact, progress=progress, **settings,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled, and when the output ends."""

    max_tokens: Annotated[int, sampling_option("Maximum number of output tokens.")] = 128
    temperature: Annotated[float, sampling_option("Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[
        float, sampling_option("Sample from the most probable tokens up to this total probability.")
    ] = 1
    top_k: Annotated[int, sampling_option("Sample from the K most probable tokens; 0: all.")] = 0
    min_p: Annotated[
        float, sampling_option("Minimum probability relative to the most probable token.")
    ] = 0
    repetition_penalty: Annotated[
        float, sampling_option("Above 1, repeated tokens are less probable.")
    ] = 1
    seed: Annotated[int | None, sampling_option("Random seed.", show_default="random")] = None
    stop: Annotated[list[str] | None, sampling_option("Stop string. May be repeated.")] = None

    def params(self) -> SamplingParams:
        """The sampling parameters of a request; InvalidRequest for an invalid value."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)})


def resolved(dtype: str, quantization: str, device: str) -> str:
    """The name of the precision that these options select on a device."""
    check_extras("running a model", "torch")
    from headway.model import devices, precision

    return precision.resolved(dtype, quantization, devices.use_device(device))


def _llm_class() -> type[LLM]:
    check_extras("running a model", "torch")
    from headway.llm import LLM

    return LLM


@contextmanager
def _loading_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, removed when the model is loaded; yields a function to update it."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("starting", total=None)  # importing torch takes a while
        yield lambda title, done, total: progress.update(
            task, description=title, completed=done, total=total
        )
