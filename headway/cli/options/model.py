"""Options of the commands that run a model, and the LLM and sampling parameters they describe.

Imports the model code only when a model is loaded, so that the simulator's commands start quickly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import BarColumn, TaskProgressColumn

from headway.cli.options import common as options
from headway.cli.options.common import Flags, check_writable
from headway.cli.options.packages import check_extras
from headway.options import EngineOptions
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

_model = partial(options.flag, panel="Model")
sampling_option = partial(options.option, panel="Sampling")
MODEL_HELP = "Bundled model name, model folder, .gguf file or Hugging Face id."

FLAGS: Flags = {  # of the fields of EngineOptions
    "model": _model(MODEL_HELP, "--model", "-m"),
    "device": _model("cpu, cuda, cuda:1, or auto: a GPU if there is one, otherwise the CPU."),
    "dtype": _model("float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU."),
    "quantization": _model(
        "none; on a CPU int8 (8-bit matrix products with the file's quantized weights) or auto "
        "(the fastest); on a GPU fp8 (8-bit weights and activations). A file in fp8 or in "
        "integers of 4 bits runs so if the GPU can and dtype is auto.",
        show_default="none",
    ),
    "load_format": _model(
        "auto, safetensors, gguf, or dummy: random weights, which needs only a config.json."
    ),
    "kv_cache_dtype": _model(
        "auto: the model's dtype; 8 bits, with small rounding errors: on a GPU fp8 (half the "
        "size), on a CPU int8 (about a quarter; needs the native kernels)."
    ),
    "attention": _model(
        "Attention kernels on a GPU: triton; or flashinfer or flash-attn if installed."
    ),
    "deterministic": _model(
        "Compute the same bits for a request in any batch; slower on a GPU.", "--deterministic"
    ),
    "kv_memory": Annotated[
        str | None,
        _model("Memory of the KV cache, e.g. 2GiB.", show_default="a fraction of the free memory"),
    ],
    "gpu_memory_utilization": _model(
        "Fraction of GPU memory that may be used, including other processes."
    ),
    "tensor_parallel_size": _model("Divide the model among this many GPUs, or processes on a CPU."),
    "tensor_parallel_sums": _model(
        "exact: the same results as on one device, bit for bit on a CPU; fast: add partial "
        "sums; or auto: exact on a CPU, fast on GPUs."
    ),
    "threads": _model("CPU threads of each process.", show_default="chosen by torch"),
    "trace_out": Annotated[
        Path | None, _model("Write a trace of all decisions to this file; see `headway trace`.")
    ],
    "trace_blocks": _model(options.TRACE_BLOCKS, "--trace-blocks"),
    "trace_redact": _model(options.TRACE_REDACT, "--trace-redact"),
    "preset": options.Preset,
    "async_scheduling": options.scheduler_flag(
        options.ASYNC_SCHEDULING,
        "--async-scheduling/--no-async-scheduling",
        show_default="on with a GPU",
    ),
    **options.SCHEDULER_FLAGS,
    "max_num_seqs": options.number_flag(
        options.MAX_NUM_SEQS, default="64; on a GPU from the preset"
    ),
    "max_num_batched_tokens": options.number_flag(
        options.MAX_NUM_BATCHED_TOKENS, default="512; on a GPU from the preset"
    ),
    "max_model_len": options.number_flag(options.MAX_MODEL_LEN, default="the model's limit"),
}
TEMPLATE = options.flag(
    "File with a Jinja chat template.", panel="Server", show_default="the model's own"
)
USED_BY_PROFILE = ("device", "dtype", "quantization", "threads", "load_format", "kv_memory")
USED_BEFORE_LOADING = (
    "device", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "gpu_memory_utilization",
)  # fmt: skip
EngineFlags = Annotated[EngineOptions, FLAGS]
ServedFlags = Annotated[EngineOptions, {**FLAGS, "chat_template": Annotated[Path | None, TEMPLATE]}]
ProfileFlags = Annotated[EngineOptions, {name: FLAGS[name] for name in USED_BY_PROFILE}]
SizeFlags = Annotated[EngineOptions, {name: FLAGS[name] for name in USED_BEFORE_LOADING}]


def load_model(chosen: EngineOptions, **defaults: Any) -> LLM:
    """Load the model; `defaults` are used for options that are not given."""
    options.import_from_working_directory()
    check_extras("running a model", "torch")
    if chosen.trace_out is not None:
        check_writable(Path(chosen.trace_out))
    given = {name: value for name, value in asdict(chosen).items() if value is not None}
    with options.stderr_progress(BarColumn(), TaskProgressColumn()) as bars:
        task = bars.add_task("starting", total=None)  # importing torch takes a while

        def show(title: str, done: int, total: int) -> None:
            bars.update(task, description=title, completed=done, total=total)

        from headway.llm import LLM

        return LLM(**{**defaults, **given}, progress=show)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled, and when the output ends."""

    max_tokens: int = sampling_option(128, "Maximum number of output tokens.")
    temperature: float = sampling_option(0.0, "Sampling temperature; 0 is greedy.")
    top_p: float = sampling_option(
        1, "Sample from the most probable tokens up to this total probability."
    )
    top_k: int = sampling_option(0, "Sample from the K most probable tokens; 0: all.")
    min_p: float = sampling_option(0, "Minimum probability relative to the most probable token.")
    repetition_penalty: float = sampling_option(1, "Above 1, repeated tokens are less probable.")
    seed: int | None = sampling_option(None, "Random seed.", show_default="random")
    stop: list[str] | None = sampling_option(None, "Stop string. May be repeated.")

    def params(self) -> SamplingParams:
        """The sampling parameters of a request; InvalidRequest for an invalid value."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)})


def uses_gpu(device: str) -> bool:
    """Whether --device selects a GPU."""
    if device != "auto":
        return device != "cpu"
    from headway.model.devices import why_no_cuda

    return why_no_cuda() is None
