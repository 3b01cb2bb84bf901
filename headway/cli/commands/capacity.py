"""`headway plan capacity`: the highest request rate that meets latency targets."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from headway.cli.options import planner as planner_options
from headway.cli.options.common import JSON, argument, option, progress_bar
from headway.cli.options.simulation import DEFAULT_WORKLOAD, WORKLOAD, SimulationFlags
from headway.cli.view import render
from headway.errors import ConfigError
from headway.lab.planner.capacity import Capacity, find_capacity
from headway.lab.planner.evaluate import Job, make_config
from headway.lab.planner.targets import redundant

LONG_WORKLOAD = DEFAULT_WORKLOAD.replace("requests=200", "requests=1000")
RUNS_PER_SEED = 8  # about; for the progress bar
WIDE = 0.03  # half an interval, relative to the mean, that is worth a note
SPLITTING = (
    "Replicas are rate / capacity. This holds for Poisson arrivals that are split at random; a "
    "router that looks at load needs fewer, bursts that reach all replicas at once need more."
)


def capacity_command(
    workload: str = argument(LONG_WORKLOAD, WORKLOAD),
    rate: float | None = option(None, "Requests per second to serve: prints the replicas."),
    seeds: int = option(8, "Seeds; more give a narrower interval.", min=3, max=1000),
    seed: int = option(0, "The first seed.", min=0),
    json_: bool = JSON,
    *,
    targets: planner_options.TargetOptions,
    runs: planner_options.RunOptions,
    simulation: SimulationFlags,
) -> None:
    """Find the highest request rate that meets the targets, with a confidence interval.

    The arrival times of the workload are stretched to each rate. Without targets, it is the highest
    rate at which the queue does not grow.
    """
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate must be a number above 0, not {rate:g}")
    question = Job(
        profile=simulation.machine, workload=simulation.workload(workload),
        settings=simulation.settings, targets=planner_options.read_targets(targets),
        async_scheduling=simulation.async_scheduling,
    )  # fmt: skip
    with runs.evaluator() as evaluator:
        make_config(question.settings, question.profile)
        used = range(seed, seed + seeds)
        with progress_bar("simulating", seeds * RUNS_PER_SEED) as evaluator.advance:
            found = find_capacity(question, used, evaluator)
    if json_:
        render.print_json(_described(question, found, rate))
    else:
        _print(question, found, rate)


def _described(question: Job, found: Capacity, rate: float | None) -> dict[str, object]:
    values = asdict(found)
    del values["rate"]
    return {
        **planner_options.described(question.profile),
        "targets": {target.name: target.seconds for target in question.targets},
        "requests_per_second": found.rate._asdict(), **values,
        **({} if rate is None else {"replicas": found.replicas(rate)}),
    }  # fmt: skip


def _print(question: Job, found: Capacity, rate: float | None) -> None:
    console, name = Console(highlight=False), question.profile.name
    mean, low, high = found.rate
    targets = ", ".join(map(str, question.targets)) or "no target, with a queue that does not grow,"
    console.print(f"[bold]{mean:.2f} requests/s[/] meet {targets} on {name}")
    console.print(f"95 % interval: {low:.2f} to {high:.2f}, from {len(found.by_seed)} seeds")
    limits = ", ".join(
        f"{name} ({render.counted(count, 'seed')})" for name, count in found.limited_by.items()
    )
    console.print(f"Above it fails: {limits}. {found.num_runs} simulations.")
    for note in redundant(question.targets):
        console.print(f"Note: {note}.")
    if found.is_short:
        console.print(
            "Note: the arrivals last less than 5 times the mean end-to-end time, so the batch may "
            "not reach a steady state; give the workload more requests."
        )
    if high - low > 2 * WIDE * mean:
        console.print(
            f"Note: the interval is ±{(high - low) / 2 / mean:.0%}; four times as many --seeds, or "
            "requests in the workload, halve it."
        )
    if rate is not None:
        console.print(f"\n{_replicas(found.replicas(rate), rate)}")
    planner_options.print_end(None, question.profile)


def _replicas(number: int | None, rate: float) -> str:
    if number is None:
        return "The interval is too wide to say how many replicas are needed; use more --seeds."
    needed = f"[bold]{render.counted(number, 'replica')}[/]"
    return f"{rate:g} requests/s need {needed}, by the lower end of the interval. {SPLITTING}"
