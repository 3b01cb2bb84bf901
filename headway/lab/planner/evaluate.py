"""One evaluation: settings on a workload, simulated, and what the planner needs of the result.

`evaluate` is a function of picklable values, so any executor can run it anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import Config
from headway.errors import ConfigError
from headway.lab.cost import Profile
from headway.lab.planner.targets import MissCounter, Targets
from headway.lab.planner.workload import Workload, at_rate, part
from headway.lab.settings import config_for
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.record.timeline import RequestTimeline
from headway.scheduler.policy_text import ANY
from headway.scheduler.presets import DEFAULT, describe

Settings = dict[str, Any]  # preset, slots as text, numbers
PACKAGE = Path(__file__).parents[2]
# What the result of a simulation depends on.
CODE = (
    "request.py", "plan.py", "config.py", "kv", "scheduler", "engine", "observe",
    "executor/simulated.py", "lab/cost.py", "lab/simulate.py", "lab/summary.py", "lab/settings.py",
    "lab/workload", "lab/planner/evaluate.py", "lab/planner/targets.py",
    "lab/planner/workload.py",
)  # fmt: skip
NUM_SAMPLES = 200  # of the queue length, for its slope


def make_config(settings: Settings, profile: Profile) -> Config:
    """The config of settings; ConfigError if a name is unknown or a value is out of range."""
    changes = {name: value for name, value in settings.items() if name != "preset"}
    return config_for(settings.get("preset", DEFAULT), profile, changes, ANY)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulation to run. `share` is the part of the workload, from its start."""

    profile: Profile
    workload: Workload
    settings: Settings
    seed: int = 0
    share: float = 1.0
    rate: float | None = None  # requests per second; None: as the workload says
    targets: Targets = ()  # a run that has certainly missed one is stopped
    async_scheduling: bool = False

    def key(self) -> str:
        """Content hash: equal jobs give equal outcomes, in every process and session."""
        config = describe(make_config(self.settings, self.profile))
        content = [
            asdict(self.profile), _fingerprint(self.workload), config, self.seed, self.share,
            self.rate, self.targets, self.async_scheduling, code_version(),
            [_module_hash(str(value)) for value in config.values()],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a job. A stopped run has no complete statistics."""

    summary: Summary
    stopped_by: str  # the target that it had certainly missed; "" for a complete run
    progress: float  # share of the requests that ended before the run did
    queue_growth: float  # requests per second that the queue gained, relative to arrivals
    config: dict[str, Any]

    @property
    def is_stopped(self) -> bool:
        return bool(self.stopped_by)

    @property
    def is_saturated(self) -> bool:
        """Whether work arrived faster than it was done."""
        return self.queue_growth > MAX_GROWTH


MAX_GROWTH = 0.05
MIN_GROWTH = 5  # requests; a smaller gain of the queue is chance


def evaluate(job: Job) -> Outcome:
    """Run the simulation of a job."""
    requests = part(job.workload.requests(job.seed), job.share)
    if job.rate is not None:
        requests = at_rate(requests, job.rate)
    config, total = make_config(job.settings, job.profile), sum(r.n for r in requests)
    max_gaps = sum(r.n * (r.num_output - 1) for r in requests)
    counter = MissCounter(job.targets, total, max_gaps) if job.targets else None
    result = simulate(
        requests, config, job.profile, async_scheduling=job.async_scheduling, stop=counter
    )
    summary = summarize(result.metrics, len(result.rejected))
    stopped_by = counter.missed.name if counter and counter.missed else ""
    num_ended = summary["completed"] + summary["rejected"]
    return Outcome(
        summary=summary, stopped_by=stopped_by, progress=num_ended / total if stopped_by else 1.0,
        queue_growth=queue_growth(result.metrics.requests, requests[-1].arrival),
        config=result.metrics.config,
    )  # fmt: skip


def check_completed(job: Job, outcome: Outcome) -> None:
    """ConfigError with the first reason if the settings reject all requests."""
    if not outcome.summary["completed"]:
        first = job.workload.requests(job.seed)[:1]
        config = make_config(job.settings, job.profile)
        _, reason = simulate(first, config, job.profile).rejected[0]
        raise ConfigError(f"all requests are rejected; the first: {reason}")


def queue_growth(requests: list[RequestTimeline], end: float) -> float:
    """The slope of the number of waiting requests while requests arrive, relative to their rate.

    The first third of the time is left out, because the batch fills up there. Infinite if all
    requests arrive at once.
    """
    arrivals = np.array([request.arrival for request in requests])
    if end <= 0 or not len(arrivals):
        return math.inf
    never = np.inf
    admitted = np.sort([r.admitted if r.admitted >= 0 else never for r in requests])
    times = np.linspace(end / 3, end, NUM_SAMPLES)
    waiting = np.searchsorted(arrivals, times, "right") - np.searchsorted(admitted, times, "right")
    shares = np.linspace(1 / 3, 1, NUM_SAMPLES)  # of the time: `times` may be too short to square
    offsets = shares - shares.mean()
    gain = float(offsets @ waiting / (offsets @ offsets))  # requests in a time of `end`
    return gain / len(arrivals) if gain * 2 / 3 >= MIN_GROWTH else 0.0


@cache
def code_version() -> str:
    """The hash of the source files that decide the result of a simulation."""
    paths = [PACKAGE / name for name in CODE]
    files = [f for path in paths for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _fingerprint(workload: Workload) -> str:
    return workload.fingerprint()


@cache
def _module_hash(value: str) -> str:
    """The hash of the file of a `module:function` policy; "" for other values."""
    module, colon, _ = value.partition(":")
    if not colon or "(" in module:
        return ""
    spec = find_spec(module)
    origin = spec.origin if spec else None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest() if origin else ""
