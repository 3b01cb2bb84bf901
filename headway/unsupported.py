"""Arguments of vLLM that Headway does not have, and why; for the errors of `LLM` and `serve`."""

from __future__ import annotations

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
    "speculative_config": "there is no speculative decoding",
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


def unsupported(name: str) -> str | None:
    """A sentence about an argument, in Python's or in the command line's form; None if unknown."""
    reason = UNSUPPORTED.get(name.removeprefix("--").removeprefix("no-").replace("-", "_"))
    return None if reason is None else f"{name} is not supported: {reason}"
