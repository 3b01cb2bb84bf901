"""Finds how many KV blocks fit on a GPU beside the weights, by running the largest step.

The step has `max_num_batched_tokens` prompt tokens, and samples `max_num_seqs` rows with logprobs
and edited logits, which is the most memory that sampling takes. Its peak stays free, and so does a
reserve for: the largest captured steps (decodes and mixed passes), because graphs keep memory of
their own; the executor's buffers; the staging buffers for swapping; partial results of attention,
of decodes once for each pool of memory, and of prompts with few tokens; and a fixed amount that
torch does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.config import Config
from headway.errors import ConfigError
from headway.executor import kv_blocks
from headway.executor.gpu.graphs import padded_rows
from headway.executor.gpu.mixed_pass import (
    PassSize,
    captured_sizes,
    max_captured_tokens,
    round_up_decodes,
)
from headway.executor.gpu.swap import MAX_STAGED_BLOCKS
from headway.executor.sampling.logprobs import SLICE, compute_logprobs
from headway.model.backends.gpu import GpuBackend
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.devices import size
from headway.model.kernels.attention.splits import (
    MAX_PREFILL_SPLITS,
    SHARED_NUMBERS,
    max_shared_rows,
    split_counts,
)
from headway.model.kernels.launch import compile_all
from headway.model.kernels.products.gated import in_two_kernels
from headway.model.kernels.products.tiles import device_limits

DRIVER_BYTES = 256 * 2**20  # bytes that the driver allocates later, for kernels and a workspace
GRAPH_LAYER_BYTES = 40 * 2**10  # bytes that the driver allocates per layer of a captured graph
NUM_POOLS = 3  # of memory: captured decodes, captured mixed passes, and all other passes
ADVICE = (
    "raise --gpu-memory-utilization (1 is all of it), lower --max-num-batched-tokens or "
    "--max-num-seqs, or use a smaller --dtype"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of GPU memory by use."""

    total: int
    weights: int
    others: int  # used by the driver, by torch and by other processes
    step: int  # peak of one step
    reserve: int  # for graphs, swapping and the driver
    block: int


def num_blocks_in(budget: Budget, utilization: float) -> int:
    """Blocks that fit into this fraction of GPU memory; ConfigError if not even one fits."""
    have = int(budget.total * utilization)
    need = budget.weights + budget.others + budget.step + budget.reserve
    if have < need + budget.block:
        missing = need + budget.block - have
        raise ConfigError(
            f"not enough GPU memory: the model needs at least {size(need + budget.block)} (weights "
            f"{size(budget.weights)}, others {size(budget.others)}, one step {size(budget.step)}, "
            f"reserve {size(budget.reserve)}, one KV block {size(budget.block)}), but "
            f"{utilization:g} of {size(budget.total)} is {size(have)}, {size(missing)} too little; "
            f"{ADVICE}"
        )
    return (have - need) // budget.block


def both(model: Budget, draft: Budget) -> Budget:
    """The budget of a model and its draft model. Each was measured with the weights of both loaded."""
    return Budget(
        total=model.total,
        weights=model.weights + draft.weights,
        others=model.others - draft.weights,
        step=max(model.step, draft.step),
        reserve=model.reserve + draft.reserve - DRIVER_BYTES,
        block=model.block + draft.block,
    )


def measure(decoder: Decoder, config: Config) -> Budget:
    """Measure the GPU memory that a loaded model needs besides its KV blocks."""
    device = decoder.norm.device
    blocks = kv_blocks.allocate(decoder, one_of_each(decoder.config, config))
    block_bytes = sum(each.nbytes for each in blocks if each is not None)
    # The first step loads kernels and a workspace, which stay allocated.
    num_tokens = config.max_num_batched_tokens
    with decoder.shortened(2), in_two_kernels():
        compile_all(lambda: run_step(decoder, config, num_tokens, *blocks))
    _peak(decoder, config, num_tokens, *blocks)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    step = _peak(decoder, config, num_tokens, *blocks)
    captured = config.max_num_seqs, max_captured_rows(decoder, config)
    reserve = sum(_peak(decoder, config, count, *blocks) for count in captured)
    reserve += DRIVER_BYTES + graph_bytes(decoder, config)
    reserve += buffer_bytes(decoder, config)
    reserve += NUM_POOLS * partial_bytes(decoder, config) + shared_bytes(decoder)
    reserve += 2 * min(MAX_STAGED_BLOCKS, config.num_host_blocks) * block_bytes
    torch.cuda.empty_cache()  # the KV blocks will be one allocation
    return Budget(
        total=total,
        weights=decoder.num_bytes,
        others=total - free - decoder.num_bytes,
        step=step,
        reserve=reserve,
        block=block_bytes,
    )


def one_of_each(model: ModelConfig, config: Config) -> Config:
    """The config with one KV block of each kind that the model has."""
    window = model.sliding_window or 0 if model.windowed_layers else 0
    return replace(
        config, num_blocks=1, num_host_blocks=0, sliding_window=window,
        num_window_blocks=min(window, 1),
    )  # fmt: skip


def graph_sizes(decoder: Decoder, config: Config) -> list[PassSize]:
    """The sizes of all captured mixed passes, largest first."""
    max_tokens = max_captured_tokens(decoder, config.max_num_batched_tokens)
    return captured_sizes(config.max_num_seqs, max_tokens, decoder.max_kv_heads)


def max_captured_rows(decoder: Decoder, config: Config) -> int:
    largest = graph_sizes(decoder, config)[0]
    return largest.decodes + largest.tokens


def graph_bytes(decoder: Decoder, config: Config) -> int:
    """Driver memory of all graphs; decodes have one graph per number of splits."""
    sizes = {padded_rows(count) for count in range(1, config.max_num_seqs + 1)}
    num_decodes = sum(len(split_counts(count * decoder.max_kv_heads)) for count in sizes)
    num_graphs = num_decodes + len(graph_sizes(decoder, config))
    return GRAPH_LAYER_BYTES * decoder.config.num_layers * num_graphs


def buffer_bytes(decoder: Decoder, config: Config) -> int:
    """Bytes of the executor's buffers: hidden states of a captured pass, and block tables."""
    row = decoder.config.hidden_size * decoder.norm.element_size()
    table = 4 * -(-config.max_model_len // config.block_size)
    table *= 2 if decoder.config.windowed_layers else 1
    hidden = max_captured_rows(decoder, config) * row
    return hidden + (config.max_num_seqs + 1) * table


def partial_bytes(decoder: Decoder, config: Config) -> int:
    """Bytes of the partial results of decode attention, at most."""
    model, backend = decoder.config, decoder.backend
    assert isinstance(backend, GpuBackend)
    max_positions = -(-config.max_model_len // config.block_size) * config.block_size
    counts = range(1, config.max_num_seqs + 1)
    sizes = {round_up_decodes(count, False) for count in counts} | set(map(padded_rows, counts))
    heads = model.num_heads, decoder.max_kv_heads
    most = max(
        backend.num_partials((num_rows, *heads), model.head_dim, num_splits, max_positions)
        for num_rows in sizes
        for num_splits in split_counts(num_rows * decoder.max_kv_heads)
    )
    return most * (model.head_dim + 2) * 4


def shared_bytes(decoder: Decoder) -> int:
    """Bytes of the partial results of programs that share queries of prompts."""
    num_rows = max_shared_rows(device_limits()[0]) * MAX_PREFILL_SPLITS
    return num_rows * (decoder.config.head_dim + SHARED_NUMBERS) * 4


def _peak(
    decoder: Decoder, config: Config, num_tokens: int, blocks: Tensor, windowed: Tensor | None
) -> int:
    """Bytes by which a step grows the memory that torch has reserved.

    Steps of fewer tokens do not need more. The gated product of the MLP runs in two kernels here,
    which need more memory than the one for Hopper GPUs.
    """
    device = blocks.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with in_two_kernels():
        run_step(decoder, config, num_tokens, blocks, windowed)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


@torch.inference_mode()
def run_step(
    decoder: Decoder,
    config: Config,
    num_tokens: int,
    blocks: Tensor,
    window_blocks: Tensor | None = None,
) -> None:
    """Run prompts of `num_tokens` in total, then every operation on the logits of all rows."""
    batch = prompt_batch(config, num_tokens, blocks.device)
    if window_blocks is not None:
        batch.windowed = replace(batch, window=decoder.config.sliding_window)
    hidden = decoder.forward(batch, blocks, window_blocks=window_blocks)
    logits = decoder.logits(hidden[batch.sampled_n])
    edited = logits.to(torch.float32, copy=True)
    compute_logprobs(logits[batch.sampled_n], edited.argmax(-1), 1)


def prompt_batch(config: Config, num_tokens: int, device: torch.device) -> ForwardBatch:
    """Prompts of `num_tokens` in total, none longer than the model allows, all in one block."""
    longest = min(num_tokens, config.max_model_len)
    starts = torch.tensor([*range(0, num_tokens, longest), num_tokens], dtype=torch.int32)
    lengths, width = starts.diff(), -(-longest // config.block_size)
    positions = torch.arange(num_tokens, device=device) % longest
    return ForwardBatch(
        tokens_t=torch.zeros_like(positions),
        positions_t=positions,
        slots_t=positions % config.block_size,
        tables_sw=torch.zeros((1, width), dtype=torch.int32, device=device),
        starts_s=starts.to(device),
        ends_s=lengths.to(device),
        sampled_n=torch.arange(min(max(config.max_num_seqs, SLICE), num_tokens), device=device),
        row_ids_s=torch.zeros(len(lengths), dtype=torch.int32, device=device),
        longest=longest,
    )
