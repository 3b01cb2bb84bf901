"""Makes the engine of a loaded model: executor, scheduler with measured costs, and trace file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headway.config import Config
from headway.engine.clock import Clock
from headway.engine.engine import Engine
from headway.executor.factory import make_executor
from headway.executor.gpu.costs import Timed, measured, measured_drafts, measured_step
from headway.loading import Loaded, Progress
from headway.options import EngineOptions
from headway.parallel.executor import ParallelExecutor
from headway.parallel.ranks import ended_on_error
from headway.record.writer import JournalWriter, header, open_journal
from headway.scheduler import Scheduler
from headway.scheduler.policies.chunk import hold_tbt
from headway.scheduler.policies.draft import by_cost
from headway.scheduler.policies.swap import swap_if_cheaper

if TYPE_CHECKING:
    from headway.executor.cpu import CpuExecutor
    from headway.executor.gpu.executor import GpuExecutor

    ModelExecutor = CpuExecutor | GpuExecutor | ParallelExecutor

DRAFT_SECONDS = 0.05  # steps up to about this time are measured for draft rules


def start_executor(
    loaded: Loaded, now: Callable[[], float], progress: Progress | None, enforce_eager: bool
) -> ModelExecutor:
    """The executor of a model, warmed up, on all its ranks."""
    config, ranks = loaded.config, loaded.ranks
    make = partial(
        make_executor, loaded.decoder, config, progress, now=now, enforce_eager=enforce_eager,
        draft_decoder=loaded.draft_decoder,
    )  # fmt: skip
    if ranks is None:
        return make()
    with ended_on_error(ranks):
        own = ranks.start(config, make, enforce_eager=enforce_eager)
        return ParallelExecutor(own, ranks, config.max_num_seqs)


def make_engine(
    loaded: Loaded, executor: ModelExecutor, clock: Clock, async_scheduling: bool | None
) -> Engine:
    """An engine on this executor, with its measured costs; None: async scheduling on a GPU."""
    is_async = loaded.is_on_gpu if async_scheduling is None else async_scheduling
    config = with_measured_costs(
        loaded.config, executor, has_swap=loaded.is_on_gpu, is_async=is_async
    )
    matchers = executor.sampler.grammars.matchers
    matchers.use(loaded.tokenizer, loaded.eos_ids)
    return Engine(
        Scheduler(config),
        executor,
        clock,
        async_scheduling=is_async,
        preparation=matchers,
        vocab_size=loaded.decoder.config.vocab_size,
    )


def with_measured_costs(
    config: Config, executor: Timed, *, has_swap: bool = True, is_async: bool = False
) -> Config:
    """The config; rules that estimate times, and were given none, get the times of this device.

    Without `has_swap`, the swap rule keeps its times: a CPU copies blocks within its own memory.
    """
    if has_swap and config.swap == swap_if_cheaper() and config.num_host_blocks:
        config = replace(config, swap=swap_if_cheaper(**measured(executor, config)._asdict()))
    chunk, draft = config.chunk, config.draft
    if isinstance(chunk, hold_tbt) and chunk.has_default_costs:
        costs = measured_step(executor, config, chunk.seconds)
        config = replace(config, chunk=chunk.with_costs(costs))
    if isinstance(draft, by_cost) and draft.has_default_costs:
        costs = measured_step(executor, config, DRAFT_SECONDS)
        costs, verify = measured_drafts(executor, config, costs, in_advance=is_async)
        config = replace(config, draft=replace(draft.with_costs(costs), verify=verify))
    return config


def open_trace(engine: Engine, options: EngineOptions) -> BinaryIO | None:
    """Record the engine's events in the file that the options name, if any."""
    if options.trace_out is None:
        return None
    file = open_journal(Path(options.trace_out))
    head = header(
        engine.scheduler.config, engine.async_scheduling, has_blocks=options.trace_blocks,
        is_redacted=options.trace_redact,
    )  # fmt: skip
    engine.observers.append(JournalWriter(file, head, name=str(options.trace_out)))
    return file
