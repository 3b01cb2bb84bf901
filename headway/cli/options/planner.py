"""Options of the planner's commands: targets, where simulations run, and plots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.cli.options.common import SchedulerOptions, WorkloadOptions, check_writable, panel
from headway.cli.options.common import import_from_working_directory as allow_own_policies
from headway.errors import ConfigError
from headway.lab import plots
from headway.lab.cost import Profile
from headway.lab.planner.evaluate import Evaluator, History, Settings
from headway.lab.planner.executors import JobExecutor, OnRay, Processes
from headway.lab.planner.targets import Target, Targets, parse_duration
from headway.lab.planner.workload import Workload
from headway.lab.svg import Plot
from headway.model.registry import cache_root

NAMES = {
    "ttft": "the time to first token", "tbt": "the time between tokens",
    "stall": "a request's longest time between tokens", "e2e": "the time from arrival to the end",
}  # fmt: skip
_targets, _runs = panel("Targets"), panel("Simulations")


def _target(latency: str, statistic: str) -> Any:
    what = "Maximum" if statistic == "max" else f"{statistic[1:]}th percentile"
    text = f"{what} of {NAMES[latency]}, e.g. 200ms or 1.5s."
    return _targets(text, f"--{latency}-{statistic}", metavar="TIME")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Upper limits of latencies; p999 is the 99.9th percentile."""

    ttft_p50: Annotated[str | None, _target("ttft", "p50")] = None
    ttft_p90: Annotated[str | None, _target("ttft", "p90")] = None
    ttft_p99: Annotated[str | None, _target("ttft", "p99")] = None
    ttft_p999: Annotated[str | None, _target("ttft", "p99.9")] = None
    ttft_max: Annotated[str | None, _target("ttft", "max")] = None
    tbt_p50: Annotated[str | None, _target("tbt", "p50")] = None
    tbt_p90: Annotated[str | None, _target("tbt", "p90")] = None
    tbt_p99: Annotated[str | None, _target("tbt", "p99")] = None
    tbt_p999: Annotated[str | None, _target("tbt", "p99.9")] = None
    tbt_max: Annotated[str | None, _target("tbt", "max")] = None
    stall_p50: Annotated[str | None, _target("stall", "p50")] = None
    stall_p90: Annotated[str | None, _target("stall", "p90")] = None
    stall_p99: Annotated[str | None, _target("stall", "p99")] = None
    stall_p999: Annotated[str | None, _target("stall", "p99.9")] = None
    stall_max: Annotated[str | None, _target("stall", "max")] = None
    e2e_p50: Annotated[str | None, _target("e2e", "p50")] = None
    e2e_p90: Annotated[str | None, _target("e2e", "p90")] = None
    e2e_p99: Annotated[str | None, _target("e2e", "p99")] = None
    e2e_p999: Annotated[str | None, _target("e2e", "p99.9")] = None
    e2e_max: Annotated[str | None, _target("e2e", "max")] = None

    def targets(self) -> Targets:
        """The targets that were given; ConfigError names one that is no duration."""
        found = []
        for entry in fields(self):
            latency, _, statistic = entry.name.replace("p999", "p99.9").partition("_")
            if (text := getattr(self, entry.name)) is not None:
                seconds = parse_duration(f"--{latency}-{statistic}", text)
                found.append(Target(latency, statistic, seconds))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where simulations run and where their results are kept."""

    jobs: Annotated[
        int | None,
        _runs("Number of processes.", min=1, max=1024, show_default="number of CPU cores"),
    ] = None
    history: Annotated[
        Path | None,
        _runs(
            "File of earlier results, which are used again.",
            show_default="planner.jsonl in the cache folder",
        ),
    ] = None
    no_history: Annotated[bool, _runs("Neither read nor write the file.", "--no-history")] = False
    ray: Annotated[bool, _runs("Run on a Ray cluster (RAY_ADDRESS).", "--ray")] = False

    @contextmanager
    def evaluator(self) -> Iterator[Evaluator]:
        """An evaluator whose processes end with the block."""
        allow_own_policies()
        if self.no_history and self.history:
            raise ConfigError("--history and --no-history exclude each other")
        history = History(
            None if self.no_history else self.history or cache_root() / "planner.jsonl"
        )
        executor: JobExecutor = OnRay() if self.ray else Processes(self.jobs or os.cpu_count() or 1)
        evaluator = Evaluator(executor=executor, history=history)
        try:
            yield evaluator
        finally:
            executor.close()
        if evaluator.num_known:
            note = f"{evaluator.num_known} results were in the history"
            Console(stderr=True).print(note, style="dim")


PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Write the plot: .svg, .html or .txt, or .png or .pdf with matplotlib."
    ),
]


def check_plot(path: Path | None) -> None:
    """ConfigError for a suffix that cannot be written here, FormatError for the place."""
    if path is None:
        return
    if path.suffix not in plots.SUFFIXES:
        raise ConfigError(f"--plot must end in {', '.join(plots.SUFFIXES)}, not {str(path)!r}")
    if not plots.can_save(path):
        raise ConfigError(
            f"--plot {path}: matplotlib is not installed; use .svg or .html, or pip install "
            "'.[lab]' in Headway's folder"
        )
    check_writable(path)


def save_plot(plot: Plot, path: Path | None) -> None:
    """Write the plot to its file, if there is one."""
    if path is not None:
        plots.save(plot, path)
        Console(stderr=True).print(f"plot: {path}", markup=False, highlight=False)


def base_settings(preset: str, scheduler: SchedulerOptions) -> Settings:
    return {"preset": preset, **scheduler.changes()}


def workload_of(text: str, selection: WorkloadOptions) -> Workload:
    return Workload(
        text=text, limit=selection.limit, speed=selection.speed,
        allowed_tokens=selection.allowed_tokens,
    )  # fmt: skip


def described(profile: Profile) -> dict[str, str]:
    """The profile in a JSON answer."""
    return {"profile": profile.name, "accuracy": profile.accuracy()}


def print_end(drawn: Plot | None, profile: Profile) -> None:
    """The plot as text, and the accuracy of the profile."""
    console = Console()
    if drawn is not None:
        console.print(f"\n{plots.text(drawn)}", end="", markup=False, highlight=False)
    sentence = f"\nProfile {profile.name}: {profile.accuracy()}"
    console.print(sentence, markup=False, highlight=False)
