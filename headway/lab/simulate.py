"""Run a workload on a virtual clock: the real engine over the simulated executor.

Knows how to feed jobs to an engine in the order of their arrival; what a step costs comes from a
profile, what is counted from the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO

from headway.config import Config
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine, Observer
from headway.errors import ConfigError, PolicyError, RequestError
from headway.executor.simulated import SimulatedExecutor
from headway.lab.cost import Profile
from headway.lab.workload.jobs import Job
from headway.observe.run_stats import RunStats
from headway.observe.trace import TraceWriter, header
from headway.plan import StepReport
from headway.scheduler import Scheduler
from headway.scheduler.policies import cheaper

Progress = Callable[[int], None]  # told how many requests have ended since


@dataclass(slots=True)
class Run:
    """What a simulation leaves behind."""

    metrics: RunStats
    rejected: list[tuple[str, str]] = field(default_factory=list)  # id and reason


def simulate(
    jobs: Iterable[Job],
    config: Config,
    profile: Profile,
    *,
    async_scheduling: bool = False,
    observers: Iterable[Observer] = (),
    trace: IO[str] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Serve every job; requests that can never run are listed, the others go on."""
    config = with_profile(config, profile)
    clock, size = VirtualClock(), config.block_size
    executor = SimulatedExecutor(
        clock, lambda plan: profile.step_seconds(plan, size), profile.machine.host_seconds
    )
    run = Run(RunStats(header(config, async_scheduling)))
    writer = TraceWriter(trace, config, async_scheduling, profile=profile.name) if trace else None

    def observe(report: StepReport) -> None:
        run.metrics(report)
        if writer:
            writer(report)
        if progress and report.finished:
            progress(len(report.finished))

    engine = Engine(
        Scheduler(config),
        executor,
        clock,
        async_scheduling=async_scheduling,
        observers=(*observers, observe),
    )
    serve(engine, clock, iter(jobs), run, progress)
    return run


def serve(
    engine: Engine,
    clock: VirtualClock,
    jobs: Iterator[Job],
    run: Run,
    progress: Progress | None = None,
) -> None:
    """Step the engine until all jobs have come and gone; idle time is skipped."""
    coming = next(jobs, None)
    while coming is not None or engine.has_work:
        while coming is not None and coming.arrival <= clock.now():
            try:
                engine.add(coming.id, coming.prompt(), coming.params(), coming.arrival)
            except RequestError as error:
                run.rejected.append((coming.id, str(error)))
                if progress:
                    progress(coming.n)
            except PolicyError as error:
                raise ConfigError(str(error)) from None
            coming = next(jobs, None)
        if engine.has_work:
            engine.step()
            if engine.fault:  # a policy of the user's; nothing else can fail here
                raise ConfigError(f"the simulation failed: {engine.fault}")
        elif coming is not None:
            clock.advance_to(coming.arrival)


def with_profile(config: Config, profile: Profile) -> Config:
    """The model's length as limit, and the swap rule `cheaper` with the profile's times."""
    length = min(config.max_model_len, profile.model.max_model_len)
    swap = profile.cheaper() if config.swap == cheaper() else config.swap
    return replace(config, max_model_len=length, swap=swap)
