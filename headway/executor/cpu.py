"""Runs plans on a CPU: block copies first, then one forward pass over all tokens of the plan.

`launch` returns when the plan has run. Knows rows and blocks, but no queues and no policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway.config import Config
from headway.executor.pooling import Pooler
from headway.executor.row_table import RowTable
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.executor.sampling.sampler import Sampler
from headway.model.decoder import Decoder
from headway.plan import Chunk, Column, Copy, Plan, StepResult

NO_CHUNKS: list[Chunk] = []


@dataclass(slots=True)
class CompletedStep:
    """A plan that has run."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class CpuExecutor:
    """A decoder, its KV blocks on device and host, and the rows of the running requests."""

    def __init__(
        self, decoder: Decoder, config: Config, now: Callable[[], float] = time.monotonic
    ) -> None:
        size = config.block_size
        self.decoder = decoder
        model, window = decoder.config, config.sliding_window or None
        wanted = model.sliding_window if model.windowed_layers else None
        assert window == wanted, f"sliding_window is {window}, that of the model {wanted}"
        make, num_blocks = decoder.backend.kv_blocks, config.num_blocks
        self.device_blocks = make(model.layers_of_kind(windowed=False), num_blocks, size)
        self.window_blocks: Tensor | None = None
        if window is not None:
            num_blocks = config.num_window_blocks
            self.window_blocks = make(model.layers_of_kind(windowed=True), num_blocks, size)
        self.host_blocks = torch.empty(
            (config.num_host_blocks, *self.device_blocks.shape[1:]), dtype=self.device_blocks.dtype
        )
        self.rows = RowTable(config.max_num_seqs, size, config.max_model_len, window)
        self.sampler = Sampler(
            config.max_num_seqs, decoder.config.vocab_size, self.device_blocks.device
        )
        self.pooler = Pooler()
        self.model_seconds = 0.0  # total time in forward passes and logits
        self.now = now

    @torch.inference_mode()
    def launch(self, plan: Plan) -> CompletedStep:
        started = self.now()
        _copy(self.device_blocks, self.host_blocks, plan.copies_out)
        _copy(self.host_blocks, self.device_blocks, plan.copies_in)
        for admission in plan.admitted:
            self.rows.add_request(admission.request)
        for chunk in plan.chunks:
            if chunk.is_last:
                request = chunk.request
                self.sampler.add_request(request.row, request, request.tokens)
        self.rows.grow(plan)
        result, extras = StepResult(started=started), ExtraOutputs()
        for step in range(plan.num_steps if plan.decodes else 1):
            self._run(plan, NO_CHUNKS if step else plan.chunks, result, extras)
            result.failed = self.sampler.grammars.take_failed(step) | result.failed
        if extras:
            result.extra = extras
        result.ended = self.now()
        return CompletedStep(result)

    def _run(
        self, plan: Plan, chunks: list[Chunk], result: StepResult, extras: ExtraOutputs
    ) -> None:
        """Run one forward pass and sample its tokens."""
        if not (plan.decodes or chunks):
            return
        batch = self.rows.batch(plan.rows, chunks)
        begun = time.perf_counter()
        hidden = self.decoder.forward(batch, self.device_blocks, window_blocks=self.window_blocks)
        logits = self.decoder.logits(hidden[batch.sampled_n]) if len(batch.sampled_n) else None
        self.model_seconds += time.perf_counter() - begun
        last = [chunk for chunk in chunks if chunk.is_last]
        first_tokens = np.array([chunk.request.row for chunk in last], dtype=np.intp)
        rows = np.concatenate([plan.rows, first_tokens])
        tokens = self._sample(logits, rows)
        if plan.decodes:
            column: Column = tokens[: len(plan.decodes)]
            result.decode_tokens.append(column)
            self.rows.advance(plan.rows, tokens[: len(plan.decodes)])
        self._finish_chunks(chunks, tokens[len(plan.decodes) :], result)
        requests = (*plan.decodes, *(chunk.request for chunk in last))
        extras.add_logprobs(self.sampler.take_logprobs(), requests)
        starts = batch.starts_s[len(plan.decodes) : -1].tolist()
        extras.score_prompts(self.decoder, chunks, hidden, starts)
        extras.embeddings |= self.pooler.pool(self.decoder, chunks, hidden, starts)

    def _sample(self, logits: Tensor | None, rows: np.ndarray) -> np.ndarray:
        if logits is None:
            return np.zeros(0, dtype=np.intc)
        sample, shard = partial(self.sampler.sample, logits, rows), self.decoder.shard
        found = sample() if shard is None else shard.sampled(sample, len(rows), logits.device)
        tokens: np.ndarray = found.to(torch.int32).cpu().numpy()
        return tokens

    def _finish_chunks(self, chunks: list[Chunk], tokens: np.ndarray, result: StepResult) -> None:
        sampled = iter(tokens.tolist())
        for chunk in chunks:
            self.rows.lengths[chunk.request.row] = chunk.end
            if chunk.is_last:
                result.first_tokens.append(next(sampled))
                self.rows.last[chunk.request.row] = result.first_tokens[-1]


def _copy(source: Tensor, target: Tensor, copies: list[Copy]) -> None:
    """Copy whole blocks; a block is contiguous on both sides."""
    for copy in copies:
        target[copy.target].copy_(source[copy.source], non_blocking=True)
