"""Runs plans with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import headway.model  # noqa: F401  # sets torch's switches before torch is loaded
from headway.config import Config

if TYPE_CHECKING:
    from headway.executor.cpu import TorchExecutor
    from headway.executor.gpu.executor import DeviceExecutor
    from headway.model.decoder import Decoder

Progress = Callable[[str, int, int], None]  # (what is being done, done, total)


def make_executor(
    decoder: Decoder,
    config: Config,
    progress: Progress | None = None,
    *,
    enforce_eager: bool = False,
) -> TorchExecutor | DeviceExecutor:
    """The executor for where a decoder's weights are, ready to run."""
    if not decoder.norm.is_cuda:
        from headway.executor.cpu import TorchExecutor

        return TorchExecutor(decoder, config)
    from headway.executor.gpu.executor import DeviceExecutor  # needs triton
    from headway.executor.gpu.memory import ADVICE
    from headway.model.devices import explaining

    with explaining("the KV cache does not fit on the GPU", ADVICE):
        executor = DeviceExecutor(decoder, config)
        if enforce_eager:
            executor.graphs.disable()
            executor.mixed.graphs.disable()
        executor.warm_up(progress)
    return executor


def count_blocks(decoder: Decoder, config: Config, utilization: float) -> int:
    """Blocks that a GPU with such a decoder on it has room for: see `memory`."""
    from headway.executor.gpu.memory import num_blocks_for  # needs triton

    return num_blocks_for(decoder, config, utilization)
