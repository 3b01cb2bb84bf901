"""Runs plans on a GPU, asynchronously.

The state of every row is on the device. A decode step therefore needs nothing from the host, and
the next one can be launched before it is done. Only sampled tokens come back. Rows that need the
host for their next token (penalties, logprobs, grammars) are sampled synchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway.config import Config
from headway.executor import kv_blocks
from headway.executor.draft_model import DraftModel, completed, no_draft_model
from headway.executor.gpu.draft_steps import DraftSteps
from headway.executor.gpu.faults import Faults, idle_probe
from headway.executor.gpu.graphs import Graphs, decode_sizes, padded_rows
from headway.executor.gpu.mixed_pass import MixedPass, add_windowed
from headway.executor.gpu.row_state import DeviceRowState, decode_batch, upload
from headway.executor.gpu.swap import Swapper, SwapTimer
from headway.executor.pooling import Pooler
from headway.executor.row_table import RowTable
from headway.executor.sampling.drafts import right_tokens, verify
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.executor.sampling.sampler import Sampler
from headway.model.decoder import Decoder
from headway.model.devices import is_out_of_memory
from headway.model.kernels.attention.splits import choose_num_splits
from headway.model.kernels.launch import compile_all, num_builds
from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.model.kernels.rows import finish
from headway.model.kernels.sampling import sample, workspace
from headway.plan import Chunk, Copy, Plan, Rows, StepResult


@dataclass(slots=True, eq=False)
class PendingStep:
    """A plan that was launched and whose tokens have not been read yet."""

    owner: GpuExecutor
    plan: Plan
    result: StepResult
    # Tokens on their way to the host, and the order that restores the plan's order of rows.
    columns: list[tuple[Tensor, Rows | None]] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    swap_in: SwapTimer | None = None
    drafted: Tensor | None = None  # tokens sampled after drafts, on their way to the host

    def wait(self) -> StepResult:
        result, num_decodes = self.result, len(self.plan.decodes)
        with self.owner.guard():
            if self.arrived is not None:
                self.arrived.synchronize()
            if self.swap_in is not None:
                result.swap_in = self.swap_in.seconds()
        for column, order in self.columns:
            tokens = column.numpy() if order is None else column.numpy()[order]
            if num_decodes:
                result.decode_tokens.append(tokens[:num_decodes])
            result.first_tokens += tokens[num_decodes:].tolist()
        if self.drafted is not None:
            result.draft_tokens = self.owner.accepted(self.plan, self.drafted.tolist())
        result.started = max(result.started, self.owner.free_at)
        result.ended = self.owner.free_at = self.owner.now()
        return result


class GpuExecutor:
    """A decoder on a device, its KV blocks on device and host, and the rows' state."""

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
        self.free_at = 0.0  # when the device was last seen idle
        size, num_rows = config.block_size, config.max_num_seqs
        self.device_blocks, self.window_blocks = kv_blocks.allocate(decoder, config)
        self.device = self.device_blocks.device
        self.swapper = Swapper(self.device_blocks, config.num_host_blocks)
        self.host_blocks = self.swapper.host_blocks
        self.rows = RowTable(num_rows, size, config.max_model_len, config.sliding_window or None)
        widths = [tables.shape[1] for tables in (self.rows.tables, self.rows.window_tables)]
        self.state = DeviceRowState(num_rows, widths[0], self.device, widths[1])
        vocab_size, max_rows = decoder.config.vocab_size, padded_rows(num_rows)
        self.sampler = Sampler(num_rows, vocab_size, self.device, choose=self._choose)
        self.pooler = Pooler()
        self._needs_host = np.zeros(num_rows, dtype=bool)  # rows that need the host to sample
        self._workspace = workspace(max_rows, vocab_size, self.device)
        num_columns = 3 if self.window_blocks is None else 4
        self._inputs = torch.zeros((num_columns, max_rows), dtype=torch.int64, device=self.device)
        self._decoding = torch.full(
            (max_rows,), self.state.spare, dtype=torch.int32, device=self.device
        )
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._sent: Rows | None = None  # the rows in `_decoding`, before they were reordered
        self._order: Rows | None = None  # index in `_decoding` of each row of `_sent`
        self._num_kv_heads = decoder.max_kv_heads
        self.graphs = Graphs(self._decode_step, self.device)
        self.draft_model = None if draft_decoder is None else DraftModel(draft_decoder, config)
        self.drafts: DraftSteps | None = None
        if self.draft_model is not None:
            self.drafts = DraftSteps(self.draft_model, self.state, config)
        self.mixed = MixedPass(
            decoder, (self.device_blocks, self.window_blocks), self.rows, self.state,
            config.max_num_batched_tokens, self.draft_model,
        )  # fmt: skip
        self.faults = Faults(idle_probe(self.device), self._discard_launch)

    @property
    def all_graphs(self) -> list[Graphs]:
        own = [self.graphs, self.mixed.graphs]
        return own if self.drafts is None else [*own, self.drafts.graphs]

    @property
    def num_builds(self) -> int:
        """Kernels compiled and graphs captured so far."""
        return num_builds() + sum([graphs.num_captures for graphs in self.all_graphs])

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        with self.guard():
            return self._launch(plan)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Guard work on the device and make it this thread's current device; see Faults."""
        # Kernels launch on a thread's current device, not on the tensors'.
        current: AbstractContextManager[object] = (
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        )
        with current, self.faults.guard():
            yield

    def _discard_launch(self) -> None:
        """Discard what an interrupted launch may have sent to the device.

        The engine admits surviving requests again, so no other state outlives a plan. Work that was
        launched earlier still runs to its end before anything later: all streams join one.
        """
        self._sent = None
        self.state.drop()

    def _launch(self, plan: Plan) -> PendingStep:
        pending, before = PendingStep(self, plan, StepResult(started=self.now())), self.num_builds
        pending.swap_in = self._swap(plan)
        self._update_rows(plan)
        if plan.drafts:
            make = self.drafts.make if self.drafts else no_draft_model
            plan = pending.plan = completed(plan, make)
        is_plain = not (plan.chunks or plan.drafts or self._needs_host[plan.rows].any())
        if plan.decodes and is_plain:
            self._decode(plan, pending)
        elif plan.requests:
            extras = ExtraOutputs()
            for step in range(plan.num_steps if plan.decodes else 1):
                self._mixed(plan, [] if step else plan.chunks, pending, extras)
                failed = self.sampler.grammars.take_failed(step)
                pending.result.failed = failed | pending.result.failed
            pending.result.extra = extras or None
        pending.result.num_builds = self.num_builds - before
        if self.device.type == "cuda":
            pending.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            pending.arrived.record()
        return pending

    def _swap(self, plan: Plan) -> SwapTimer | None:
        if self.drafts:
            self.drafts.swapper.run(plan)
        return self.swapper.run(plan)

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile all kernels and capture all decode sizes ahead of use."""
        if self.device.type != "cuda":
            return
        steps, progress = self._steps(), progress or (lambda *_: None)
        with torch.cuda.device(self.device):
            draft = self.draft_model
            with self.decoder.shortened(2), draft.decoder.shortened(2) if draft else nullcontext():
                compile_all(self._run_everything, partial(progress, "compiling kernels"))
                self.mixed.try_sizes()
            for done, step in enumerate(steps, start=1):
                self._capture(*step)
                progress("capturing steps", done, len(steps))
            self.mixed.capture(partial(progress, "capturing mixed steps"))
            if self.drafts:
                self.drafts.capture(partial(progress, "capturing steps of the draft model"))
            torch.cuda.synchronize()

    def _run_everything(self) -> None:
        """Launch every kernel that a plan may need."""
        self.mixed.try_sizes()  # first, because kernels for prompts take longest to compile
        for step in self._steps():
            self._decode_step(*step)
        if self.drafts:
            self.drafts.try_sizes()
        if len(self.host_blocks):
            self._swap(Plan(0, copies_out=[Copy(0, 0)], copies_in=[Copy(0, 0)]))
        for dtype in {self.decoder.norm.dtype, torch.float32}:  # edited logits are float32
            for num_rows in (1, len(self._sampled)):
                shape = num_rows, self.decoder.config.vocab_size
                logits = torch.zeros(shape, dtype=dtype, device=self.device)
                row_ids, out = self._decoding[:num_rows], self._sampled[:num_rows]
                sample(logits, row_ids, self.state.sampling, out, self._workspace)

    def _steps(self) -> list[tuple[int, int]]:
        """All (number of rows, number of splits) of decode steps, largest first."""
        return decode_sizes(len(self.rows.lengths), self._num_kv_heads)

    def _capture(self, num_rows: int, num_splits: int) -> None:
        """Run a step of padding rows, capture it, and run the graph; see MixedPass.capture.

        If no memory is left for graphs, nothing is captured from now on.
        """
        self._decoding.fill_(self.state.spare)
        self._sent = None
        self._decode_step(num_rows, num_splits)
        if not self.graphs.is_enabled:
            return
        try:
            self.graphs.capture((num_rows, num_splits))
            self.graphs.run((num_rows, num_splits))
        except RuntimeError as error:
            if self.decoder.shard is not None or not is_out_of_memory(error):
                raise
            self.graphs.disable()

    def _update_rows(self, plan: Plan) -> None:
        """Send the plan's changes to the rows' state on the device."""
        state = self.state
        for request, block in plan.new_blocks:
            state.set_blocks(request.row, int(self.rows.num_blocks[request.row]), [block])
            self.rows.grow_one(request.row, block)
        for request, first, blocks in plan.window_blocks:
            self.rows.set_window_blocks(request.row, first, blocks)
            state.set_window_blocks(request.row, first, blocks)
        for admission in plan.admitted:
            request = admission.request
            self.rows.add_request(request)
            state.set_blocks(request.row, 0, request.kv.blocks)
            state.set_limit(request.row, request.limit - 1)
        for chunk in plan.chunks:
            if chunk.is_last:
                request, row = chunk.request, chunk.request.row
                self.sampler.add_request(row, request, request.tokens)
                self._needs_host[row] = self.sampler.needs_host(row)
                state.set_sampling(row, self.sampler.settings[row])
                state.set_length(row, chunk.end)
        state.send()

    def _decode(self, plan: Plan, pending: PendingStep) -> None:
        """Run decode steps that need nothing from the host."""
        count = len(plan.decodes)
        size = padded_rows(count), self._num_splits(plan.rows)
        if size not in self.graphs and self.graphs.is_enabled:
            self._capture(*size)
        if self._sent is None or not np.array_equal(self._sent, plan.rows):
            self._send_rows(plan.rows)
        for _ in range(plan.num_steps):
            self.graphs.run(size)
            self._copy_to_host(self._sampled[:count], pending, self._order)
            self.rows.advance_lengths(plan.rows)
            self.sampler.settings["num_generated"][plan.rows] += 1

    def _send_rows(self, rows: Rows) -> None:
        """Send the decoding rows, longest first, so that a long row does not start last."""
        order = np.argsort(-self.rows.lengths[rows], kind="stable")
        self._decoding[len(rows) :].fill_(self.state.spare)
        sent = upload(rows[order].astype(np.int32), self.device)
        self._decoding[: len(rows)].copy_(sent)
        self._sent, self._order = rows.copy(), np.argsort(order)

    def _num_splits(self, rows: Rows) -> int:
        num_programs = padded_rows(len(rows)) * self._num_kv_heads
        return choose_num_splits(num_programs, self.rows.lengths[rows], self._num_kv_heads)

    def _decode_step(self, num_rows: int, num_splits: int) -> None:
        """Compute the next token of every row, all on the device."""
        row_ids, columns = self._decoding[:num_rows], self._inputs[:, :num_rows]
        tensors = self.state.tensors
        batch = decode_batch(row_ids, columns, tensors, self.rows.block_size, num_splits)
        add_windowed(batch, list(columns[3:]), tensors, self.rows.window)
        if self.draft_model is not None:
            self.draft_model.compute(batch)
        hidden = self.decoder.forward(batch, self.device_blocks, window_blocks=self.window_blocks)
        logits = self.decoder.logits(hidden)
        sample(logits, row_ids, self.state.sampling, self._sampled[:num_rows], self._workspace)
        finish(row_ids, self._sampled[:num_rows], self.state.tensors)

    def _mixed(
        self, plan: Plan, chunks: list[Chunk], pending: PendingStep, extras: ExtraOutputs
    ) -> None:
        """Run one pass over decodes and prompt chunks."""
        last = [chunk for chunk in chunks if chunk.is_last]
        hidden, sampled_n, first = self.mixed.run(plan.rows, chunks, plan.drafts)
        if plan.drafts:
            num_decodes, num_drafted = len(plan.decodes), plan.num_drafted
            end = num_decodes + num_drafted
            logits = self.decoder.logits(hidden[sampled_n[num_decodes:end]])
            self._verify(plan, logits, pending, extras)
            sampled_n = torch.cat([sampled_n[:num_decodes], sampled_n[end:]])
            first += num_drafted
        self.rows.advance_lengths(plan.rows)
        for chunk in chunks:
            self.rows.lengths[chunk.request.row] = chunk.end
        rows = np.concatenate([plan.rows, np.array([c.request.row for c in last], dtype=np.intp)])
        if len(rows):
            logits = self.decoder.logits(hidden[sampled_n])
            tokens = self._sample(logits, rows)
            finish(upload(rows.astype(np.int32), self.device), tokens, self.state.tensors)
            self._copy_to_host(tokens, pending)
        requests = (*plan.decodes, *(chunk.request for chunk in last))
        extras.add_logprobs(self.sampler.take_logprobs(), requests)
        counts = [chunk.end - chunk.start for chunk in chunks]
        starts = np.cumsum([first, *counts])[:-1].tolist()
        extras.score_prompts(self.decoder, chunks, hidden, starts)
        extras.embeddings |= self.pooler.pool(self.decoder, chunks, hidden, starts)

    def _verify(
        self, plan: Plan, logits: Tensor, pending: PendingStep, extras: ExtraOutputs
    ) -> None:
        """Sample after the last token of each request with drafts, and after each of its drafts."""
        counts = [1 + draft.count for draft in plan.drafts]
        rows = np.repeat([draft.request.row for draft in plan.drafts], counts)
        if self._needs_host[rows].any():
            sample = partial(self._sample_next, logits)
            pending.result.draft_tokens = verify(
                plan.drafts, sample, self.sampler, extras, pending.result
            )
            self._set_accepted(plan, pending.result.draft_tokens)
            return
        ahead = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        pending.drafted = self._to_host(self._sample_ahead(logits, rows, ahead))

    def _sample_next(self, logits: Tensor, places: Rows, rows: Rows) -> list[int]:
        """Sample some rows of the logits, and advance the state of these requests."""
        tokens = self._sample(logits[torch.from_numpy(places).to(logits.device)], rows)
        finish(upload(rows.astype(np.int32), self.device), tokens, self.state.tensors)
        return list(tokens.tolist())

    def _sample_ahead(self, logits: Tensor, rows: Rows, ahead: Rows) -> Tensor:
        """The tokens of these rows if their requests had `ahead` more tokens."""
        ids, own = upload(rows.astype(np.int64), self.device), self.state.sampling
        columns = {each.name: getattr(own, each.name)[ids] for each in fields(own)}
        columns["num_generated"] += upload(ahead, self.device)
        numbers = torch.arange(len(rows), dtype=torch.int32, device=self.device)
        out = torch.empty_like(numbers)
        sample(logits, numbers, SamplingTensors(**columns), out)
        return out

    def accepted(self, plan: Plan, sampled: list[int]) -> list[list[int]]:
        """The tokens that requests gain, of those sampled after all drafts."""
        gained, first = [], 0
        for draft in plan.drafts:
            own = sampled[first : first + draft.count + 1]
            first += len(own)
            gained.append(right_tokens(draft, own))
            row = draft.request.row
            if row >= 0:  # else the request has ended
                self.sampler.settings["num_generated"][row] += len(gained[-1])
        self._set_accepted(plan, gained)
        return gained

    def _set_accepted(self, plan: Plan, gained: list[list[int]]) -> None:
        for draft, tokens in zip(plan.drafts, gained, strict=True):
            row = draft.request.row
            if row >= 0:
                self.rows.accept(draft, tokens)
                num_generated = int(self.sampler.settings["num_generated"][row])
                self.state.set_next(row, draft.start + len(tokens), tokens[-1], num_generated)

    def _sample(self, logits: Tensor, rows: Rows) -> Tensor:
        """Sample where the host takes part; rank 0 does it for all ranks of a group."""
        sample, shard = partial(self.sampler.sample, logits, rows), self.decoder.shard
        return sample().int() if shard is None else shard.sampled(sample, len(rows), self.device)

    def _choose(self, logits: Tensor, rows: Rows) -> Tensor:
        out = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        space = self._workspace
        if len(rows) > len(self._sampled):
            space = workspace(len(rows), logits.shape[1], self.device)
        sample(logits, upload(rows.astype(np.int32), self.device), self.state.sampling, out, space)
        return out

    def _copy_to_host(
        self, tokens: Tensor, pending: PendingStep, order: Rows | None = None
    ) -> None:
        pending.columns.append((self._to_host(tokens), order))

    def _to_host(self, tokens: Tensor) -> Tensor:
        """A copy of the tokens, which arrives with the step's event."""
        if self.device.type == "cpu":
            return tokens.clone()
        column = torch.empty(len(tokens), dtype=torch.int32, pin_memory=True)
        column.copy_(tokens, non_blocking=True)
        return column
