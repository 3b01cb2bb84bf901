"""A sweep: one simulation for every combination of knob values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.planner.evaluate import Job, Outcome, Settings
from headway.lab.planner.evaluator import Evaluator
from headway.lab.planner.space import WORKLOAD_KNOBS, Space, points, text_of
from headway.lab.planner.workload import Workload, rate_of
from headway.lab.summary import Summary
from headway.lab.svg import Curve, Plot
from headway.scheduler import policy_text


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One combination of knob values and its result."""

    knobs: Settings
    outcome: Outcome


def run_sweep(
    space: Space,
    base: Settings,
    profile: Profile,
    workload: Workload,
    evaluator: Evaluator,
    async_scheduling: bool = False,
) -> list[SweepPoint]:
    """The result of every combination; a knob of the space replaces the base's value."""
    combinations = points(space)
    jobs = [_job(knobs, base, profile, workload, async_scheduling) for knobs in combinations]
    outcomes = evaluator.run(jobs)
    return [SweepPoint(knobs=k, outcome=o) for k, o in zip(combinations, outcomes, strict=True)]


def _job(
    knobs: Settings, base: Settings, profile: Profile, workload: Workload, is_async: bool
) -> Job:
    seed, speed = knobs.get("seed", 0), knobs.get("speed", 1.0)
    own = {name: value for name, value in knobs.items() if name not in WORKLOAD_KNOBS}
    rate = rate_of(workload.requests(seed)) * speed if "speed" in knobs else None
    return Job(
        profile=profile, workload=workload, settings={**base, **own}, seed=seed, rate=rate,
        async_scheduling=is_async,
    )  # fmt: skip


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


def _parts(name: str) -> list[str]:
    """The parts of a path; p99.9 is one part."""
    return name.replace("p99.9", "p99_9").replace(".", "\0").replace("p99_9", "p99.9").split("\0")


def plot_of(points: Sequence[SweepPoint], metric: str) -> Plot:
    """The metric over the first knob with several numbers, a curve for each of the other values.

    Without such a knob, a bar for each combination.
    """
    values = [metric_of(point.outcome.summary, metric) for point in points]
    x = next((name for name in points[0].knobs if _is_numeric(name, points)), None)
    if x is None:
        bars = Curve(name=metric, points=tuple((float(i), y) for i, y in enumerate(values)))
        labels = tuple(text_of(point.knobs) for point in points)
        return Plot(title=metric, x="", y="", curves=(bars,), labels=labels)
    curves: dict[str, list[tuple[float, float]]] = {}
    for point, y in zip(points, values, strict=True):
        others = {name: value for name, value in point.knobs.items() if name != x}
        curves.setdefault(text_of(others) if others else metric, []).append((point.knobs[x], y))
    shown = tuple(Curve(name=name, points=tuple(sorted(at))) for name, at in curves.items())
    return Plot(title=metric, x=x, y="", curves=shown)


def _is_numeric(name: str, points: Sequence[SweepPoint]) -> bool:
    values = {point.knobs[name] for point in points}
    return len(values) > 1 and all(isinstance(value, int | float) for value in values)
