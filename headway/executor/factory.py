"""Creates the executor for a decoder, on the CPU or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import headway.model  # noqa: F401  # sets environment variables that torch reads when it loads
from headway.config import Config

if TYPE_CHECKING:
    from headway.executor.cpu import CpuExecutor
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.decoder import Decoder

Progress = Callable[[str, int, int], None]  # (phase, done, total)


def make_executor(
    decoder: Decoder,
    config: Config,
    progress: Progress | None = None,
    *,
    now: Callable[[], float] = time.monotonic,
    enforce_eager: bool = False,
    draft_decoder: Decoder | None = None,
) -> CpuExecutor | GpuExecutor:
    """Create the executor for the device of the decoder's weights, warmed up."""
    if not decoder.norm.is_cuda:
        from headway.executor.cpu import CpuExecutor

        return CpuExecutor(decoder, config, now, draft_decoder)
    from headway.executor.gpu.executor import GpuExecutor  # needs triton
    from headway.executor.gpu.memory import ADVICE
    from headway.model.devices import explain_out_of_memory

    with explain_out_of_memory("the KV cache does not fit in GPU memory", ADVICE):
        executor = GpuExecutor(decoder, config, now, draft_decoder)
        if enforce_eager:
            for graphs in executor.all_graphs:
                graphs.disable()
        executor.warm_up(progress)
    return executor


def count_blocks(
    decoder: Decoder, config: Config, utilization: float, draft_decoder: Decoder | None = None
) -> int:
    """How many KV blocks fit into this fraction of GPU memory beside everything else."""
    from headway.executor.gpu.memory import ADVICE, both, measure, num_blocks_in  # needs triton
    from headway.model.devices import explain_out_of_memory

    num_tokens = config.max_num_batched_tokens
    tried = f"a step of {num_tokens} tokens does not fit in GPU memory beside the weights"
    with explain_out_of_memory(tried, ADVICE):
        budget = measure(decoder, config)
        if draft_decoder is not None:
            budget = both(budget, measure(draft_decoder, config))
        return num_blocks_in(budget, utilization)
