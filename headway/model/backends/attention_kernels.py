"""Attention of a pass on a GPU: the interface of gpu.py, and our Triton kernels."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headway.model.batch import ForwardBatch
from headway.model.kernels.attention.decode import decode_attention
from headway.model.kernels.attention.prefill import prefill_attention
from headway.model.kernels.attention.scoring import DEFAULT, Scoring

NUM_COUNTERS = 1024  # of tiles that programs share: more than there ever are


class AttentionKernels(Protocol):
    """Attention, after this pass's keys and values are in the cache; q and out are [T, H, D]."""

    fuses_decode: bool  # batches of decodes only use our fused kernel instead of this one
    supports_padding: bool  # accepts padding and empty sequences; does not wait for the device
    block_multiple: int  # the block size must be a multiple of it
    is_concurrent: bool  # decode and prefill may run at the same time

    def decode(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        """Compute the rows of the batch's decodes, which come first."""
        ...

    def prefill(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        """Compute the rows after the decodes; called for layers in order, from 0."""
        ...


class TritonAttention:
    fuses_decode, supports_padding, block_multiple, is_concurrent = True, True, 1, True
    _counters: Tensor | None = None  # see prefill_attention

    def decode(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        count = batch.num_decodes
        assert batch.row_ids_s is not None
        decode_attention(
            q[:count], out[:count], num_heads=q.shape[1], blocks=blocks, layer=layer,
            tables=batch.tables_sw, row_ids_s=batch.row_ids_s[:count],
            positions_s=batch.positions_t[:count], num_splits=batch.num_splits, scoring=scoring,
        )  # fmt: skip

    def prefill(
        self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, blocks: Tensor,
        scoring: Scoring = DEFAULT,
    ) -> None:  # fmt: skip
        assert batch.row_ids_s is not None
        if self._counters is None:
            self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=q.device)
        prefill_attention(
            q, out, blocks=blocks, layer=layer, tables=batch.tables_sw,
            row_ids_s=batch.row_ids_s[batch.num_decodes :], starts_s=batch.starts_s,
            ends_s=batch.ends_s, longest=batch.longest, num_tokens=len(q) - batch.num_decodes,
            counters=self._counters, scoring=scoring,
        )  # fmt: skip
