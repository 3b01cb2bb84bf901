"""The options of one engine, from the keywords of `LLM` or the flags of a command to the loader."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headway.checks import Checked, count, number, one_of
from headway.errors import ConfigError
from headway.parallel.progress import MAX_RANKS
from headway.scheduler.policies.speculative_config import with_speculative_config

MAX_THREADS = 1024  # with far more, the thread pool of torch or of the kernels ends the process
SUMS = ("auto", "exact", "fast")
# Arguments of vLLM that Headway does not have, and why.
TENSOR_ONLY = "only tensor_parallel_size divides a model among devices"
NO_LORA = "there are no LoRA adapters"
TEXT_ONLY = "models take and return text only"
UNSUPPORTED = {
    "pipeline_parallel_size": TENSOR_ONLY,
    "data_parallel_size": TENSOR_ONLY,
    "enable_expert_parallel": TENSOR_ONLY,
    "distributed_executor_backend": TENSOR_ONLY,
    "enable_lora": NO_LORA,
    "lora_modules": NO_LORA,
    "lora_request": NO_LORA,
    "max_loras": NO_LORA,
    "max_lora_rank": NO_LORA,
    "limit_mm_per_prompt": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "enable_prefix_caching": "the prefix cache is always on",
    "enable_chunked_prefill": "the slot `chunk` says how prompts are split",
    "swap_space": "num_host_blocks sets the memory for swapping",
    "cpu_offload_gb": "weights are kept on the devices",
    "tokenizer": "the tokenizer is the model's own",
    "tokenizer_mode": "the tokenizer is the model's own",
    "hf_overrides": "a model's configuration is used as it is",
    "task": "a model generates text; `embed` computes embeddings",
    "runner": "a model generates text; `embed` computes embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Checked):
    """A model, where and how it runs, and its scheduler; `LLM` explains the fields.

    None: chosen by the model, the device or the preset. ConfigError if values are out of range or
    exclude each other.
    """

    prefix = ""
    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    chat_template: str | Path | None = None
    kv_cache_dtype: str = "auto"
    attention: str = "triton"
    deterministic: bool = False
    kv_memory: int | str | None = None
    gpu_memory_utilization: float = number(0.9, 0, 1, above=True)
    enforce_eager: bool = False
    seed: int | None = None
    tensor_parallel_size: int = count(1, 1, MAX_RANKS)
    tensor_parallel_sums: str = "auto"
    trust_remote_code: bool = False
    threads: int | None = count(None, 1, MAX_THREADS)
    trace_out: str | Path | None = None
    trace_blocks: bool = False
    trace_redact: bool = False
    async_scheduling: bool | None = None
    speculative_config: Any = None  # vLLM's form of `draft` and `drafter`
    preset: str = "headway"
    batching: Any = None
    queue: Any = None
    chunk: Any = None
    headroom: Any = None
    victim: Any = None
    swap: Any = None
    draft: Any = None
    drafter: Any = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_scheduler_steps: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        one_of("tensor_parallel_sums", self.tensor_parallel_sums, SUMS)
        if self.deterministic and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"deterministic needs one device, not tensor_parallel_size "
                f"{self.tensor_parallel_size}; use --tensor-parallel-size 1"
            )
        self.preset_changes()  # an invalid speculative_config is refused now

    def preset_changes(self) -> dict[str, Any]:
        """The scheduler's settings that differ from those of the preset."""
        names = [field.name for field in fields(self)]
        given = {name: getattr(self, name) for name in names[names.index("preset") + 1 :]}
        changes = {name: value for name, value in given.items() if value is not None}
        return with_speculative_config(changes, self.speculative_config)


def unsupported(name: str) -> str | None:
    """A sentence about an argument, in Python's or in the command line's form; None if unknown."""
    reason = UNSUPPORTED.get(name.removeprefix("--").removeprefix("no-").replace("-", "_"))
    return None if reason is None else f"{name} is not supported: {reason}"
