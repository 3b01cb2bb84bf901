"""Size and speed of the KV cache in each type, on this CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from timeit import repeat

import torch

from headway.model.backends.base import PassArguments, kv_itemsize
from headway.model.backends.native.backend import NativeBackend, NativePass, unsupported_reason
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig

NUM_SEQUENCES, NUM_TOKENS, BLOCK_SIZE = 32, 256, 16
NUM_LAYERS = 4  # read in turn, so that no cache holds the next layer
TRIES = 4


@dataclass(frozen=True, slots=True)
class KvProbe:
    """A type of the KV cache, and the attention of a decode step that reads it."""

    dtype: str
    token_bytes: int  # one token in all layers
    seconds: float  # one layer, NUM_SEQUENCES sequences of NUM_TOKENS tokens


def probe_kv_cache(config: ModelConfig) -> list[KvProbe]:
    """Measure the types of the KV cache (about a second); none if the kernels cannot run the model."""
    if unsupported_reason(config) is not None:
        return []
    found = []
    for dtype in (torch.float32, torch.int8):
        backend = NativeBackend(kv_dtype=dtype)
        token_bytes = config.kv_bytes(kv_itemsize(backend, config))
        name = str(dtype).removeprefix("torch.")
        found.append(KvProbe(name, token_bytes, _seconds(backend, config)))
    return found


def _seconds(backend: NativeBackend, config: ModelConfig) -> float:
    """The best of several attempts, because other load only adds time."""
    config = replace(config, num_layers=NUM_LAYERS)
    width = NUM_TOKENS // BLOCK_SIZE
    num_blocks, ends = NUM_SEQUENCES * width, torch.full((NUM_SEQUENCES,), NUM_TOKENS)
    batch = ForwardBatch(
        tokens_t=torch.zeros(NUM_SEQUENCES, dtype=torch.int64),
        positions_t=ends - 1,
        slots_t=torch.full((NUM_SEQUENCES,), -1),
        tables_sw=torch.arange(num_blocks, dtype=torch.int32).view(NUM_SEQUENCES, width),
        starts_s=torch.arange(NUM_SEQUENCES + 1, dtype=torch.int32),
        ends_s=ends.to(torch.int32),
        sampled_n=torch.zeros(0, dtype=torch.int64),
    )
    blocks = backend.kv_blocks(config, num_blocks, BLOCK_SIZE).zero_()
    angles = torch.zeros(NUM_TOKENS, config.head_dim // 2)
    steps = NativePass(backend, PassArguments(config, batch, blocks, angles, angles))
    heads = config.num_heads + 2 * config.num_kv_heads
    qkv = torch.ones(NUM_SEQUENCES, heads * config.head_dim)

    def attend() -> None:
        for layer in range(NUM_LAYERS):
            steps.attention(layer, qkv)

    return min(repeat(attend, number=1, repeat=TRIES)) / NUM_LAYERS
