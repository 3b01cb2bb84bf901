"""Evaluations: settings on a workload, simulated, and what the planner needs of the result.

`evaluate` is a function of picklable values, so any executor can run it anywhere. An `Evaluator`
runs each job once and takes outcomes from the history where it has them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import Config
from headway.errors import ConfigError, FormatError
from headway.lab.cost import Profile
from headway.lab.planner.executors import InProcess, JobExecutor
from headway.lab.planner.targets import MissCounter, Targets
from headway.lab.planner.workload import Workload, at_rate, part
from headway.lab.simulate import config_for, simulate
from headway.lab.summary import Summary, summarize
from headway.record.timeline import RequestTimeline
from headway.scheduler.policies.presets import DEFAULT, describe
from headway.scheduler.policies.text import ANY

Settings = dict[str, str | float]  # preset, slots as text, numbers
PACKAGE = Path(__file__).parents[2]
# What the result of a simulation depends on.
CODE = (
    "request.py", "plan.py", "events.py", "config.py", "step_cost.py", "drafters", "kv", "scheduler",
    "engine", "record", "executor/simulated.py", "lab/cost.py", "lab/corrections.py", "lab/simulate.py",
    "lab/summary.py", "lab/workload", "lab/planner/evaluate.py", "lab/planner/targets.py",
    "lab/planner/workload.py",
)  # fmt: skip
NUM_SAMPLES = 200  # of the queue length, for its slope


def make_config(settings: Settings, profile: Profile) -> Config:
    """The config of settings; ConfigError if a name is unknown or a value is out of range."""
    changes = {name: value for name, value in settings.items() if name != "preset"}
    return config_for(str(settings.get("preset", DEFAULT)), profile, changes, ANY)


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

    @property
    def config(self) -> Config:
        """ConfigError if a setting is unknown or out of range."""
        return make_config(self.settings, self.profile)

    def key(self) -> str:
        """Content hash: equal jobs give equal outcomes, in every process and session."""
        config = describe(self.config)
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
    config: dict[str, str | int]

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
    total = sum(r.n for r in requests)
    max_gaps = sum(r.n * (r.num_output - 1) for r in requests)
    counter = MissCounter(job.targets, total, max_gaps) if job.targets else None
    result = simulate(
        requests, job.config, job.profile, async_scheduling=job.async_scheduling, stop=counter
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
        _, reason = simulate(first, job.config, job.profile).rejected[0]
        raise ConfigError(f"all requests are rejected; the first: {reason}")


def queue_growth(requests: list[RequestTimeline], end: float) -> float:
    """The slope of the number of waiting requests while requests arrive, relative to their rate.

    The first third of the time is left out, because the batch fills up there. Infinite if all
    requests arrive at once.
    """
    arrivals = np.array([request.arrival for request in requests])
    if end <= 0 or not len(arrivals):
        return math.inf
    admitted = np.sort([r.admitted if r.admitted >= 0 else np.inf for r in requests])
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


_fingerprint = cache(Workload.fingerprint)


@cache
def _module_hash(value: str) -> str:
    """The hash of the file of a `module:function` policy; "" for other values."""
    module, colon, _ = value.partition(":")
    spec = find_spec(module) if colon and "(" not in module else None
    if spec is None or spec.origin is None:
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


class History:
    """Outcomes of earlier evaluations with the present code; without a path, of this process.

    A file has JSON lines, one outcome each, by the key of its job. Lines are only appended, each
    with one write, so a process that is killed loses at most the outcome that it was writing. A
    damaged line is skipped. Several processes may append to one file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.known: dict[str, Outcome] = {}  # by the key of the job
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                self._read(file)
        except OSError as error:
            raise FormatError(path, None, f"cannot be used: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self.known)

    def put(self, key: str, outcome: Outcome) -> None:
        """Remember an outcome, on disk before this returns."""
        self.known[key] = outcome
        if self._path is not None:
            line = json.dumps({"key": key, "code": code_version(), "outcome": asdict(outcome)})
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())

    def _read(self, file: Any) -> None:
        file.seek(0)
        last = b"\n"
        for last in file:
            try:
                line = json.loads(last)
                if line["code"] == code_version():
                    self.known[line["key"]] = Outcome(**line["outcome"])
            except (ValueError, TypeError, KeyError):
                continue  # cut off by the end of a process
        if not last.endswith(b"\n"):
            file.write(b"\n")


@dataclass(kw_only=True)
class Evaluator:
    """Counts `cost` in full runs. A job of the history costs the same, so that a search that is
    resumed makes the same decisions."""

    executor: JobExecutor = field(default_factory=InProcess)
    history: History = field(default_factory=History)
    advance: Callable[[float], object] = lambda cost: None  # called when jobs have ended
    cost: float = 0.0
    num_known: int = 0  # jobs whose outcome the history had
    _counted: set[str] = field(default_factory=set)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes in the order of the jobs."""
        keys, known = [job.key() for job in jobs], self.history.known
        new = {k: j for k, j in zip(keys, jobs, strict=True) if k not in self._counted}
        missing = [key for key in new if key not in known]
        self.num_known += len(new) - len(missing)
        for place, outcome in self.executor.run(evaluate, [new[key] for key in missing]):
            self.history.put(missing[place], outcome)
            self.advance(new[missing[place]].share * outcome.progress)
        for key, job in new.items():  # in order: a sum must not depend on which job ends first
            cost = job.share * known[key].progress
            self.cost += cost
            if key not in missing:
                self.advance(cost)
        self._counted.update(new)
        return [known[key] for key in keys]
