"""Runs plans on a device that works by itself: the host only says what comes next.

The state of every seat lives on the device, so a decode step needs nothing from the host, and the
next one can be launched before it is done. Only sampled tokens come back. Requests that need the
host for their next token (penalties, logprobs and the like) are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway.config import Config
from headway.executor.extra import Extra
from headway.executor.gpu.faults import Faults, idle
from headway.executor.gpu.graphs import Graphs, padded_rows
from headway.executor.gpu.mixed_pass import MixedPass
from headway.executor.gpu.row_state import DeviceRowState, upload
from headway.executor.gpu.swap import Swapper
from headway.executor.pooling import Pooler
from headway.executor.row_table import RowTable
from headway.executor.sampling.sampler import Sampler
from headway.model.batch import Batch
from headway.model.decoder import Decoder
from headway.model.kernels.launch import compile_all
from headway.model.kernels.rows import finish, start
from headway.model.kernels.sampling import sample, workspace
from headway.model.kernels.splits import MANY, SHARINGS, num_splits_of
from headway.plan import Chunk, Plan, Rows, StepResult


@dataclass(slots=True, eq=False)
class Flight:
    """A plan that the device works on."""

    owner: DeviceExecutor
    plan: Plan
    result: StepResult
    columns: list[tuple[Tensor, Rows | None]] = field(default_factory=list)  # on their way, order
    arrived: torch.cuda.Event | None = None

    def wait(self) -> StepResult:
        if self.arrived is not None:
            with self.owner.guard():
                self.arrived.synchronize()
        result, num_decodes = self.result, len(self.plan.decodes)
        for column, order in self.columns:
            tokens = column.numpy() if order is None else column.numpy()[order]
            if num_decodes:
                result.columns.append(tokens[:num_decodes])
            result.firsts += tokens[num_decodes:].tolist()
        result.started = max(result.started, self.owner.free_at)
        result.ended = self.owner.free_at = self.owner.now()
        return result


class DeviceExecutor:
    """A decoder on a device, its blocks there and on the host, and the seats there."""

    def __init__(
        self, decoder: Decoder, config: Config, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.decoder, self.now = decoder, now
        self.free_at = 0.0  # when the device was last known to have nothing to do
        size, seats = config.block_size, config.max_num_seqs
        self.device_blocks = decoder.backend.kv_blocks(decoder.config, config.num_blocks, size)
        self.device = self.device_blocks.device
        self.swapper = Swapper(self.device_blocks, config.num_host_blocks)
        self.rows = RowTable(seats, size, config.max_model_len)
        self.seats = DeviceRowState(seats, self.rows.tables.shape[1], self.device)
        vocab_size, most = decoder.config.vocab_size, padded_rows(seats)
        self.sampler = Sampler(seats, vocab_size, self.device, choose=self._choose)
        self.pooler = Pooler()
        self._is_slow = np.zeros(seats, dtype=bool)  # seats that need the host for a token
        self._workspace = workspace(most, vocab_size, self.device)
        self._inputs = torch.zeros((3, most), dtype=torch.int64, device=self.device)
        self._decoding = torch.full(
            (most,), self.seats.spare, dtype=torch.int32, device=self.device
        )
        self._sampled = torch.zeros(most, dtype=torch.int32, device=self.device)
        self._sent: Rows | None = None  # what `_decoding` holds, in another order
        self._order: Rows | None = None  # where each of `_sent` is
        self._num_kv_heads = decoder.config.num_kv_heads
        self.graphs = Graphs(self._decode_step, self.device)
        self.mixed = MixedPass(
            decoder, self.device_blocks, self.rows, self.seats, config.max_num_batched_tokens
        )
        self.faults = Faults(idle(self.device), self._forget)

    @property
    def host_blocks(self) -> Tensor:
        return self.swapper.host_blocks

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        with self.guard():
            return self._launch(plan)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around work on the device, which is this thread's then; for errors see Faults."""
        with _chosen(self.device), self.faults.guard():
            yield

    def _forget(self) -> None:
        """Believe nothing that a broken launch has told the device.

        Who lives on is seated anew, so this is all that is kept from plan to plan. What was launched
        before runs to its end before anything that comes later: there is one stream for all.
        """
        self._sent = None
        self.seats.drop()

    def _launch(self, plan: Plan) -> Flight:
        flight = Flight(self, plan, StepResult(started=self.now()))
        self.swapper.run(plan)
        self._update(plan)
        if plan.decodes and not plan.chunks and not self._is_slow[plan.rows].any():
            self._decode(plan, flight)
        elif plan.decodes or plan.chunks:
            extra = Extra()
            for step in range(plan.num_steps if plan.decodes else 1):
                self._mixed(plan, [] if step else plan.chunks, flight, extra)
                failed = self.sampler.grammars.take_failed(step)
                flight.result.failed = failed | flight.result.failed
            flight.result.extra = extra or None
        if self.device.type == "cuda":
            flight.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            flight.arrived.record()
        return flight

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Capture every size of decodes ahead of use, and compile the rest."""
        if self.device.type != "cuda":
            return
        with _chosen(self.device):
            self._warm_up(progress or (lambda *_: None))

    def _warm_up(self, progress: Callable[[str, int, int], None]) -> None:
        steps = self._steps()

        def everything() -> None:
            for step in steps:
                self._decode_step(*step)
            self.mixed.try_sizes()

        with self.decoder.shortened(2):
            compile_all(everything, partial(progress, "compiling kernels"))
        for done, step in enumerate(steps, start=1):
            self._capture(*step)
            progress("capturing steps", done, len(steps))
        self.mixed.warm_up()
        torch.cuda.synchronize()

    def _steps(self) -> list[tuple[int, int]]:
        """Numbers of rows and ways to share that decodes may come in; largest first."""
        sizes = {padded_rows(count) for count in range(1, len(self.rows.lengths) + 1)}
        steps = [(num_rows, 1) for num_rows in sorted(sizes, reverse=True)]
        many = [num_rows for num_rows, _ in steps if num_rows * self._num_kv_heads >= MANY]
        return steps + [(num_rows, sharing) for sharing in SHARINGS[1:] for num_rows in many]

    def _capture(self, num_rows: int, sharing: int) -> None:
        self._decoding.fill_(self.seats.spare)
        self._sent = None
        self._decode_step(num_rows, sharing)
        self.graphs.capture((num_rows, sharing))

    def _update(self, plan: Plan) -> None:
        """Tell the device's seats what changed."""
        seats = self.seats
        for request, block in plan.new_blocks:
            seats.set_blocks(request.row, int(self.rows.num_blocks[request.row]), [block])
            self.rows.grow_one(request.row, block)
        for admission in plan.admitted:
            request = admission.request
            self.rows.seat(request)
            seats.set_blocks(request.row, 0, request.kv.blocks)
            seats.set_limit(request.row, request.limit - 1)
        for chunk in plan.chunks:
            if chunk.is_last:
                request, row = chunk.request, chunk.request.row
                self.sampler.seat(row, request, request.tokens)
                self._is_slow[row] = self.sampler.needs_host(row)
                seats.set_sampling(row, self.sampler.seats[row])
                seats.set_length(row, chunk.end)
        seats.send()

    def _decode(self, plan: Plan, flight: Flight) -> None:
        """Steps that need nothing from the host."""
        count = len(plan.decodes)
        size = padded_rows(count), self._sharing(plan.rows)
        if size not in self.graphs and self.graphs.is_enabled:
            self._capture(*size)
        if self._sent is None or not np.array_equal(self._sent, plan.rows):
            self._send_rows(plan.rows)
        for _ in range(plan.num_steps):
            self.graphs.run(size)
            self._bring_back(self._sampled[:count], flight, self._order)
            self.rows.advance_lengths(plan.rows)
            self.sampler.seats["num_generated"][plan.rows] += 1

    def _send_rows(self, rows: Rows) -> None:
        """Longest first, as they will be until another comes or goes: so no long one ends last."""
        order = np.argsort(-self.rows.lengths[rows], kind="stable")
        self._decoding[len(rows) :].fill_(self.seats.spare)
        sent = upload(rows[order].astype(np.int32), self.device)
        self._decoding[: len(rows)].copy_(sent)
        self._sent, self._order = rows.copy(), np.argsort(order)

    def _sharing(self, rows: Rows) -> int:
        num_programs = padded_rows(len(rows)) * self._num_kv_heads
        return num_splits_of(num_programs, self.rows.lengths[rows], self._num_kv_heads)

    def _decode_step(self, num_rows: int, sharing: int) -> None:
        """From the seats' latest tokens to their next ones, all on the device."""
        seats, (tokens, positions, slots) = self._decoding[:num_rows], self._inputs[:, :num_rows]
        start(seats, self.seats.tensors, self.rows.block_size, tokens, positions, slots)
        batch = Batch(
            tokens_t=tokens, positions_t=positions, slots_t=slots, seats_s=seats,
            tables_sw=self.seats.tensors.tables, starts_s=tokens, ends_s=tokens, sampled_n=tokens,
            num_decodes=num_rows, sharing=sharing,
        )  # fmt: skip
        logits = self.decoder.logits(self.decoder.forward(batch, self.device_blocks))
        sample(logits, seats, self.seats.columns, self._sampled[:num_rows], self._workspace)
        finish(seats, self._sampled[:num_rows], self.seats.tensors)

    def _mixed(self, plan: Plan, chunks: list[Chunk], flight: Flight, extra: Extra) -> None:
        """One pass over decodes and pieces of prompts."""
        last = [chunk for chunk in chunks if chunk.is_last]
        hidden, sampled_n, first = self.mixed.run(plan.rows, chunks)
        self.rows.advance_lengths(plan.rows)
        for chunk in chunks:
            self.rows.lengths[chunk.request.row] = chunk.end
        rows = np.concatenate([plan.rows, np.array([c.request.row for c in last], dtype=np.intp)])
        if len(rows):
            logits = self.decoder.logits(hidden[sampled_n])
            tokens = self.sampler.sample(logits, rows).int()
            finish(upload(rows.astype(np.int32), self.device), tokens, self.seats.tensors)
            self._bring_back(tokens, flight)
        requests = (*plan.decodes, *(chunk.request for chunk in last))
        extra.keep(self.sampler.take_logprobs(), requests)
        counts = [chunk.end - chunk.start for chunk in chunks]
        starts = np.cumsum([first, *counts])[:-1].tolist()
        extra.score_prompts(self.decoder, chunks, hidden, starts)
        extra.embeddings |= self.pooler.pool(self.decoder, chunks, hidden, starts)

    def _choose(self, logits: Tensor, rows: Rows) -> Tensor:
        out = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        room = self._workspace
        if len(rows) > len(self._sampled):
            room = workspace(len(rows), logits.shape[1], self.device)
        sample(logits, upload(rows.astype(np.int32), self.device), self.seats.columns, out, room)
        return out

    def _bring_back(self, tokens: Tensor, flight: Flight, order: Rows | None = None) -> None:
        """Start the way of sampled tokens to the host."""
        if self.device.type == "cpu":
            flight.columns.append((tokens.clone(), order))
            return
        column = torch.empty(len(tokens), dtype=torch.int32, pin_memory=True)
        column.copy_(tokens, non_blocking=True)
        flight.columns.append((column, order))


def _chosen(device: torch.device) -> AbstractContextManager[object]:
    """What a thread does is done on its current device, whatever the tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
