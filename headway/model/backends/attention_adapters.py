"""Adapters to attention libraries, with gpu.py's interface: FlashInfer and FlashAttention 2.

Tests without these libraries call stand-ins that have the documented signatures.

FlashInfer plans its work on the host, which a captured graph does not allow. It therefore runs
prefills, and our kernels run decodes. FlashAttention runs both, over blocks of 256 positions. Models
with windows, sinks or scales of their own are refused before: `scoring` is the default one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.errors import ConfigError
from headway.model.backends.attention_kernels import AttentionKernels, TritonAttention
from headway.model.batch import ForwardBatch
from headway.model.kernels.attention.scoring import DEFAULT, Scoring

WORKSPACE_BYTES = 128 * 2**20  # bytes of workspace that FlashInfer recommends


class FlashInfer(TritonAttention):
    """Prefill by FlashInfer; planning waits for the device once per pass."""

    supports_padding = is_concurrent = False

    def __init__(self, library: Any, device: torch.device) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prompts = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def prefill(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        first = batch.num_decodes
        if layer == 0:  # one plan for all layers of the pass
            self._plan(q, batch, blocks)
        self._prompts.run(q[first:].contiguous(), blocks[:, layer], out=out[first:])

    def _plan(self, q: Tensor, batch: ForwardBatch, blocks: Tensor) -> None:
        first, size, ends = batch.num_decodes, blocks.shape[4], batch.ends_s.cpu()
        counts = (ends + size - 1) // size
        tables = _tables(batch, slice(first, None)).cpu()
        is_used = torch.arange(tables.shape[1]) < counts[:, None]
        self._prompts.plan(
            batch.starts_s.cpu() - first, _cumulative(counts), tables[is_used], (ends - 1) % size + 1,
            q.shape[1], blocks.shape[3], q.shape[2], size,
            causal=True, q_data_type=q.dtype, kv_data_type=blocks.dtype,
        )  # fmt: skip


class FlashAttention:
    """Prefill and decode by FlashAttention 2."""

    fuses_decode, supports_padding, block_multiple, is_concurrent = False, False, 256, False

    def __init__(self, library: Any) -> None:
        self._library = library

    def decode(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        rows = slice(batch.num_decodes)
        found = self._library.flash_attn_with_kvcache(
            q[rows, None], *_paged(blocks, layer), cache_seqlens=batch.positions_t[rows].int() + 1,
            block_table=_tables(batch, rows), causal=True,
        )  # fmt: skip
        out[rows] = found[:, 0]

    def prefill(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        first, tables = batch.num_decodes, _tables(batch, slice(batch.num_decodes, None))
        out[first:] = self._library.flash_attn_varlen_func(
            q[first:], *_paged(blocks, layer), cu_seqlens_q=batch.starts_s - first,
            cu_seqlens_k=_cumulative(batch.ends_s), max_seqlen_q=batch.longest,
            max_seqlen_k=tables.shape[1] * blocks.shape[4], causal=True, block_table=tables,
        )  # fmt: skip


def _tables(batch: ForwardBatch, rows: slice) -> Tensor:
    assert batch.row_ids_s is not None
    return batch.tables_sw[batch.row_ids_s[rows].long()]


def _cumulative(counts: Tensor) -> Tensor:
    """Cumulative sums, starting with 0."""
    return F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _paged(blocks: Tensor, layer: int) -> tuple[Tensor, ...]:
    """Keys and values of a layer as views [B, P, G, D]; not contiguous over heads."""
    return blocks[:, layer].transpose(2, 3).unbind(1)


def kernels_for(
    module: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> AttentionKernels:
    """Create the adapter to an installed module; ConfigError for types that it does not support."""
    if dtype == torch.float32:
        raise ConfigError(
            f"{module} does not support float32; use --dtype bfloat16 or float16, or "
            "--attention triton"
        )
    if module == "flashinfer":
        return FlashInfer(import_module(module), device)
    if kv_dtype not in (None, dtype):
        raise ConfigError(
            f"{module} does not support an 8-bit KV cache; use --kv-cache-dtype auto, or "
            "--attention triton"
        )
    return FlashAttention(import_module(module))
