"""A sweep: one simulation for every combination of knob values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from headway.errors import ConfigError
from headway.lab.planner.evaluate import Evaluator, Job, Outcome, Settings
from headway.lab.planner.space import WORKLOAD_KNOBS, Space, points, text_of
from headway.lab.planner.workload import rate_of
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.svg import Curve, Plot
from headway.scheduler.policies import text as policy_text
from headway.scheduler.policies.presets import SLOTS


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    knobs: Settings
    outcome: Outcome


def run_sweep(space: Space, base: Job, evaluator: Evaluator) -> list[SweepPoint]:
    """The result of every combination; a knob of the space replaces the base's value."""
    combinations = points(space)
    outcomes = evaluator.run([_job(base, knobs) for knobs in combinations])
    return [SweepPoint(knobs=k, outcome=o) for k, o in zip(combinations, outcomes, strict=True)]


def _job(base: Job, knobs: Settings) -> Job:
    seed, speed = int(knobs.get("seed", 0)), knobs.get("speed")
    own = {name: value for name, value in knobs.items() if name not in WORKLOAD_KNOBS}
    rate = None if speed is None else rate_of(base.workload.requests(seed)) * float(speed)
    return replace(base, settings={**base.settings, **own}, seed=seed, rate=rate)


def metric_of(summary: Summary, name: str) -> float:
    """A number of a summary by its path, such as ttft.p99; ConfigError lists the known names."""
    value: Any = summary
    for part in _parts(name):
        if not isinstance(value, Mapping):
            raise ConfigError(f"metric {name!r}: there is nothing below a number")
        value = policy_text.lookup("metric", part, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        known = ", ".join(value) if isinstance(value, Mapping) else "none"
        raise ConfigError(f"metric {name!r} is not a number; below it: {known}")
    return float(value)


def check_metric(name: str, base: Job) -> None:
    """ConfigError for an unknown metric, before anything is simulated.

    The names below a count by reason are known only after a run.
    """
    empty = summarize(simulate([], base.config, base.profile).metrics)
    if empty.get(_parts(name)[0]) != {}:
        metric_of(empty, name)


def _parts(name: str) -> list[str]:
    """The parts of a path; p99.9 is one part."""
    return name.replace("p99.9", "p99_9").replace(".", "\0").replace("p99_9", "p99.9").split("\0")


def over_seeds(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Points without the knob `seed`: every number of a summary is the mean over the seeds."""
    groups = defaultdict[str, list[SweepPoint]](list)
    for point in points:
        others = {name: value for name, value in point.knobs.items() if name != "seed"}
        groups[repr(others)].append(replace(point, knobs=others))
    means = (_mean([point.outcome.summary for point in same]) for same in groups.values())
    return [
        replace(same[0], outcome=replace(same[0].outcome, summary=mean))
        for same, mean in zip(groups.values(), means, strict=True)
    ]


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, rounded if they are whole, and of the numbers in mappings; else the first."""
    first = values[0]
    if isinstance(first, Mapping):
        common = [key for key in first if all(key in value for value in values)]
        return {key: _mean([value[key] for value in values]) for key in common}
    if not isinstance(first, int | float):
        return first
    return fmean(values) if isinstance(first, float) else round(fmean(values))


def plot_of(points: Sequence[SweepPoint], metric: str) -> Plot:
    """The metric over the first knob with several numbers, a curve for each of the other values.

    Policies that differ by one number, such as watermark(0.01), count as numbers. Without such a
    knob, a bar for each combination.
    """
    values = [metric_of(point.outcome.summary, metric) for point in points]
    axes = ((name, _axis(name, points)) for name in points[0].knobs)
    x, numbers = next(((name, at) for name, at in axes if at), ("", {}))
    if not numbers:
        bars = Curve(name=metric, points=tuple((float(i), y) for i, y in enumerate(values)))
        labels = tuple(text_of(point.knobs) for point in points)
        return Plot(title=metric, x="", y="", curves=(bars,), labels=labels)
    curves: dict[str, list[tuple[float, float]]] = {}
    for point, y in zip(points, values, strict=True):
        others = {name: value for name, value in point.knobs.items() if name != x}
        name = text_of(others) if others else metric
        curves.setdefault(name, []).append((numbers[point.knobs[x]], y))
    shown = tuple(Curve(name=name, points=tuple(sorted(at))) for name, at in curves.items())
    policy = str(points[0].knobs[x]).partition("(")[0]
    return Plot(title=metric, x=f"{x}={policy}" if x in SLOTS else x, y="", curves=shown)


def _axis(name: str, points: Sequence[SweepPoint]) -> dict[Any, float]:
    """The number of each value of a knob; empty if they have none, or there is one value only."""
    values = {point.knobs[name] for point in points}
    if all(isinstance(value, int | float) for value in values):
        numbers = {value: float(value) for value in values}
    else:
        found = [re.fullmatch(r"(\w+)\((\d+\.?\d*)\)", str(value)) for value in values]
        is_one = all(found) and len({match[1] for match in found if match}) == 1
        numbers = {match[0]: float(match[2]) for match in found if match} if is_one else {}
    return numbers if len(numbers) > 1 else {}
