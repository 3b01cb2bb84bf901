"""Options of the planner's commands: targets, where simulations run, and plots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from headway.cli.options.common import check_writable, flag, option
from headway.cli.options.common import import_from_working_directory as allow_own_policies
from headway.errors import ConfigError
from headway.lab import plots
from headway.lab.cost import Profile
from headway.lab.planner.evaluate import Evaluator, History
from headway.lab.planner.executors import JobExecutor, OnRay, Processes
from headway.lab.planner.targets import Target, Targets, parse_duration
from headway.lab.svg import Plot
from headway.model.registry import cache_root

NAMES = {
    "ttft": "the time to first token", "tbt": "the time between tokens",
    "stall": "a request's longest time between tokens", "e2e": "the time from arrival to the end",
}  # fmt: skip
_runs = partial(option, panel="Simulations")


def _target(latency: str, statistic: str) -> Any:
    what = "Maximum" if statistic == "max" else f"{statistic[1:]}th percentile"
    text = f"{what} of {NAMES[latency]}, e.g. 200ms or 1.5s."
    made = flag(text, f"--{latency}-{statistic}", panel="Targets", metavar="TIME")
    return Annotated[str | None, made]


STATISTICS = ("p50", "p90", "p99", "p99.9", "max")
# Upper limits of latencies; those that were given, by name.
TargetOptions = Annotated[
    dict[str, str],
    {
        f"{latency}_{statistic.replace('.', '')}": _target(latency, statistic)
        for latency in NAMES for statistic in STATISTICS
    },
]  # fmt: skip


def read_targets(given: dict[str, str]) -> Targets:
    """The targets that were given; ConfigError names one that is no duration."""
    found = []
    for name, text in given.items():
        latency, _, statistic = name.replace("p999", "p99.9").partition("_")
        found.append(Target(latency, statistic, parse_duration(f"--{latency}-{statistic}", text)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where simulations run and where their results are kept."""

    jobs: int | None = _runs(
        None, "Number of processes.", min=1, max=1024, show_default="number of CPU cores"
    )
    history: Path | None = _runs(
        None,
        "File of earlier results, which are used again.",
        show_default="planner.jsonl in the cache folder",
    )
    no_history: bool = _runs(False, "Neither read nor write the file.", "--no-history")
    ray: bool = _runs(False, "Run on a Ray cluster (RAY_ADDRESS).", "--ray")

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


PLOT = option(
    None, "Write the plot: .svg, .html or .txt, or .png or .pdf with matplotlib.", "--plot"
)


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


def described(profile: Profile) -> dict[str, str]:
    """The profile in a JSON answer."""
    return {"profile": profile.name, "accuracy": profile.accuracy()}


def print_end(drawn: Plot | None, profile: Profile) -> None:
    """The plot as text, and the accuracy of the profile."""
    plot = "" if drawn is None else f"\n{plots.text(drawn)}"
    sentence = f"{plot}\nProfile {profile.name}: {profile.accuracy()}"
    Console(highlight=False).print(sentence, markup=False)
