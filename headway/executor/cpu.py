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
from headway.executor import kv_blocks
from headway.executor.draft_model import DraftMaker, DraftModel, completed, no_draft_model
from headway.executor.pooling import Pooler
from headway.executor.row_table import RowTable
from headway.executor.sampling.drafts import verify
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.executor.sampling.sampler import Sampler
from headway.model.backends.base import PassOutput
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.plan import Chunk, Copy, Plan, Rows, StepResult

NO_CHUNKS: list[Chunk] = []


@dataclass(slots=True)
class CompletedStep:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class CpuExecutor:
    """A decoder, its KV blocks on device and host, and the rows of the running requests."""

    def __init__(
        self,
        decoder: Decoder,
        config: Config,
        now: Callable[[], float] = time.monotonic,
        draft_decoder: Decoder | None = None,
    ) -> None:
        """`draft_decoder` makes the drafts of the drafter `model`."""
        self.decoder, self.now = decoder, now
        decoder.use_length(config.max_model_len)
        self.device_blocks, self.window_blocks = kv_blocks.allocate(decoder, config)
        self.host_blocks = _on_host(self.device_blocks, config.num_host_blocks)
        self._pools = [(self.device_blocks, self.host_blocks)]
        window, num_rows = config.sliding_window or None, config.max_num_seqs
        self.rows = RowTable(num_rows, config.block_size, config.max_model_len, window)
        self.draft_model: DraftModel | None = None
        self._make_drafts: DraftMaker = no_draft_model
        if draft_decoder is not None:
            self.draft_model = DraftModel(draft_decoder, config)
            self._make_drafts = partial(self.draft_model.make, self.rows)
            blocks = self.draft_model.blocks
            self._pools.append((blocks, _on_host(blocks, config.num_host_blocks)))
        device = self.device_blocks.device
        self.sampler = Sampler(num_rows, decoder.config.vocab_size, device)
        self.pooler = Pooler()
        self.model_seconds = 0.0  # total time in forward passes and logits
        self._batch: ForwardBatch | None = None  # of the latest pass
        self._forward: Callable[[], PassOutput] | None = None
        self._inference = torch.inference_mode()

    def launch(self, plan: Plan) -> CompletedStep:
        with self._inference:
            result, extras = StepResult(started=self.now()), ExtraOutputs()
            for on_device, on_host in self._pools:
                _copy(on_device, on_host, plan.copies_out)
                _copy(on_host, on_device, plan.copies_in)
            for admission in plan.admitted:
                self.rows.add_request(admission.request)
            for chunk in plan.chunks:
                if chunk.is_last:
                    request = chunk.request
                    self.sampler.add_request(request.row, request, request.tokens)
            self.rows.grow(plan)
            plan = completed(plan, self._make_drafts)
            for step in range(plan.num_steps if plan.decodes else 1):
                self._run(plan, NO_CHUNKS if step else plan.chunks, result, extras)
                if failed := self.sampler.grammars.take_failed(step):
                    result.failed = failed | result.failed
            if extras:
                result.extra = extras
            result.ended = self.now()
            return CompletedStep(result)

    def _run(
        self, plan: Plan, chunks: list[Chunk], result: StepResult, extras: ExtraOutputs
    ) -> None:
        """Run one forward pass and sample its tokens."""
        if not (plan.decodes or plan.drafts or chunks):
            return
        batch = self.rows.batch(plan.rows, chunks, plan.drafts)
        begun = time.perf_counter()
        if self.draft_model is not None:
            self.draft_model.compute(batch)
        output = self._output(batch)
        self.model_seconds += time.perf_counter() - begun
        last = [chunk.request for chunk in chunks if chunk.is_last]
        num_decodes, rows = len(plan.decodes), plan.rows
        if plan.drafts:
            self._verify(plan, output, num_decodes, result, extras)
            others = np.arange(num_decodes + len(last))
            others[num_decodes:] += plan.num_drafted
            output = output.at(others)
        if last:
            first_tokens = np.array([request.row for request in last], dtype=np.intp)
            rows = np.concatenate([rows, first_tokens])
        tokens = self._sample(output, rows)
        if plan.decodes:
            decoded: np.ndarray = tokens[:num_decodes]
            result.decode_tokens.append(decoded)
            self.rows.advance(plan.rows, decoded)
        if logprobs := self.sampler.take_logprobs():
            extras.add_logprobs(logprobs, (*plan.decodes, *last))
        if chunks:
            self._finish_chunks(chunks, tokens[num_decodes:], result)
            starts = batch.starts_s[num_decodes + len(plan.drafts) : -1].tolist()
            extras.score_prompts(self.decoder, chunks, output.hidden, starts)
            extras.embeddings |= self.pooler.pool(self.decoder, chunks, output.hidden, starts)

    def _output(self, batch: ForwardBatch) -> PassOutput:
        """Run the pass of a batch; a batch that comes again has the same pass."""
        if self._forward is None or batch is not self._batch:
            self._batch = batch
            self._forward = self.decoder.prepared(
                batch, self.device_blocks, window_blocks=self.window_blocks
            )
        return self._forward()

    def _verify(
        self, plan: Plan, output: PassOutput, first: int, result: StepResult, extras: ExtraOutputs
    ) -> None:
        """Sample after the last token of each request with drafts, then after drafts that are right."""

        def sample(places: Rows, rows: Rows) -> list[int]:
            return list(self._sample(output.at(first + places), rows).tolist())

        result.draft_tokens = verify(plan.drafts, sample, self.sampler, extras, result)
        for draft, tokens in zip(plan.drafts, result.draft_tokens, strict=True):
            self.rows.accept(draft, tokens)

    def _sample(self, output: PassOutput, rows: np.ndarray) -> np.ndarray:
        logits, shard = output.logits, self.decoder.shard
        if logits is None:
            return np.zeros(0, dtype=np.intc)
        if output.best is not None and self.sampler.takes_best(rows):
            return output.best
        sample = partial(self.sampler.sample, logits, rows)
        found = sample() if shard is None else shard.sampled(sample, len(rows), logits.device)
        tokens: np.ndarray = found.cpu().numpy().astype(np.intc)
        return tokens

    def _finish_chunks(self, chunks: list[Chunk], tokens: np.ndarray, result: StepResult) -> None:
        sampled = iter(tokens.tolist())
        for chunk in chunks:
            self.rows.lengths[chunk.request.row] = chunk.end
            if chunk.is_last:
                result.first_tokens.append(next(sampled))
                self.rows.last[chunk.request.row] = result.first_tokens[-1]


def _on_host(blocks: Tensor, count: int) -> Tensor:
    return torch.empty((count, *blocks.shape[1:]), dtype=blocks.dtype)


def _copy(source: Tensor, target: Tensor, copies: list[Copy]) -> None:
    """Copy whole blocks; a block is contiguous on both sides."""
    for copy in copies:
        target[copy.target].copy_(source[copy.source], non_blocking=True)
