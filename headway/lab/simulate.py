"""Run a workload on a virtual clock: the real engine over the simulated executor.

Submits requests to the engine in order of arrival. The profile says how long a step takes; the
metrics count what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from headway.config import Config
from headway.drafters.repeat import repeat_last
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine, Observer
from headway.errors import ConfigError, PolicyError, RequestError
from headway.events import Event, ended_by
from headway.executor.simulated import SimulatedExecutor
from headway.lab.cost import Profile
from headway.lab.workload.request import WorkloadRequest
from headway.record.stats import RunStats
from headway.record.writer import JournalWriter, Writable, header
from headway.scheduler import Scheduler
from headway.scheduler.policies.draft import by_cost
from headway.scheduler.policies.presets import read_preset
from headway.scheduler.policies.swap import recompute, swap_if_cheaper
from headway.scheduler.policies.text import READY_MADE

Progress = Callable[[int], None]  # called with the number of requests that have just ended
Stop = Callable[[RunStats], bool]


@dataclass(slots=True)
class SimulationResult:
    """The metrics of a simulation, and the requests that were rejected."""

    metrics: RunStats
    rejected: list[tuple[str, str]] = field(default_factory=list)  # id and reason


class SimulatedEngine:
    """An engine over a simulated executor, with a clock of its own, and the metrics of its run."""

    def __init__(
        self,
        config: Config,
        profile: Profile,
        async_scheduling: bool = False,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.config, self.clock, size = config, VirtualClock(), config.block_size
        self.metrics = RunStats(header(config, async_scheduling))
        self.engine = Engine(
            Scheduler(config),
            SimulatedExecutor(
                self.clock,
                lambda plan: profile.step_seconds(plan, size),
                profile.machine.host_seconds,
                lambda plan: profile.copy_seconds(len(plan.copies_in) * size),
            ),
            self.clock,
            async_scheduling=async_scheduling,
            observers=(*observers, self.metrics),
        )


def simulate(
    requests: Iterable[WorkloadRequest],
    config: Config,
    profile: Profile,
    *,
    async_scheduling: bool = False,
    observers: Iterable[Observer] = (),
    trace: Writable | None = None,
    trace_blocks: bool = False,
    trace_redact: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> SimulationResult:
    """Run all requests. A request that can never run is rejected; the others continue.

    `stop` is asked after every step; if it returns True, the run ends there.
    """
    config = as_simulated(config, profile, async_scheduling)
    simulated = SimulatedEngine(config, profile, async_scheduling, observers)
    engine, result = simulated.engine, SimulationResult(simulated.metrics)
    if trace is not None:
        head = header(
            config, async_scheduling, has_blocks=trace_blocks, is_redacted=trace_redact,
            profile=profile.name,
        )  # fmt: skip
        engine.observers.append(JournalWriter(trace, head))
    if progress:

        def report(event: Event) -> None:
            if ended := ended_by(event):
                progress(len(ended))

        engine.observers.append(report)
    _run(engine, simulated.clock, iter(requests), result, progress, stop)
    return result


def _run(
    engine: Engine,
    clock: VirtualClock,
    requests: Iterator[WorkloadRequest],
    result: SimulationResult,
    progress: Progress | None,
    stop: Stop | None,
) -> None:
    """Step the engine until every request has arrived and ended; skip idle time."""
    coming = next(requests, None)
    while True:
        while coming is not None and coming.arrival <= clock.now():
            try:
                engine.add(coming.id, coming.prompt(), coming.params(), coming.arrival)
            except RequestError as error:
                result.rejected.append((coming.id, str(error)))
                if progress:
                    progress(coming.n)
            except PolicyError as error:
                raise ConfigError(str(error)) from None
            coming = next(requests, None)
        if engine.has_work:
            engine.step()
            if engine.fault:  # only a user's policy can fail here
                raise ConfigError(f"the simulation failed: {engine.fault}")
            if stop and stop(result.metrics):
                return
        elif coming is not None:
            clock.advance_to(coming.arrival)
        else:
            return


def config_for(
    name: str, profile: Profile, changes: Mapping[str, object], own: Container[str] = READY_MADE
) -> Config:
    """A preset with changes; ConfigError if a value is unknown or out of range.

    Without `num_blocks` it has as many blocks as the profile's KV cache. If the swap rule uses host
    memory, it has as many host blocks as device blocks by default. `own` as for `read_preset`.
    """
    config = read_preset(changes, name, own=own)
    limit = profile.model.max_model_len
    if "max_model_len" in changes and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the limit of the model of profile "
            f"{profile.name}, not {config.max_model_len}"
        )
    if "num_blocks" not in changes:
        config = replace(config, num_blocks=profile.num_blocks(config.block_size))
    if config.swap is not recompute and "num_host_blocks" not in changes:
        config = replace(config, num_host_blocks=config.num_blocks)
    return config


def with_profile(config: Config, profile: Profile) -> Config:
    """The config with the model's length limit, and its times for the policies that need them."""
    length = min(config.max_model_len, profile.model.max_model_len)
    swap = config.swap
    if swap == swap_if_cheaper():
        swap = profile.swap_if_cheaper()
    chunk, draft = profile.with_costs(config.chunk), profile.with_costs(config.draft)
    return replace(config, max_model_len=length, swap=swap, chunk=chunk, draft=draft)


def as_simulated(config: Config, profile: Profile, async_scheduling: bool = False) -> Config:
    """As `with_profile`, for a run without a model: of drafts, only the number has a meaning.

    With async scheduling, a step with drafts alone takes the host's time as well.
    """
    rule = config.draft
    if rule is None:
        return with_profile(config, profile)
    if async_scheduling and isinstance(rule, by_cost) and rule.has_default_costs:
        wait = rule.wait or profile.machine.host_seconds
        rule = replace(rule.with_costs(profile.unit_costs), wait=wait)
    return with_profile(replace(config, draft=rule, drafter=repeat_last), profile)
