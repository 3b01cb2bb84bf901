"""Runs evaluations: each job once, outcomes from the history where it has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.lab.planner.evaluate import Job, Outcome, evaluate
from headway.lab.planner.executors import InProcess, JobExecutor
from headway.lab.planner.history import History

Advance = Callable[[float], None]  # called with the cost of jobs that have just ended


def _ignore(cost: float) -> None:
    pass


@dataclass(kw_only=True)
class Evaluator:
    """Counts `cost` in full runs. A job of the history costs the same, so that a search that is
    resumed makes the same decisions."""

    executor: JobExecutor = field(default_factory=InProcess)
    history: History = field(default_factory=History)
    advance: Advance = _ignore
    cost: float = 0.0
    num_known: int = 0  # jobs whose outcome the history had
    _counted: set[str] = field(default_factory=set)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes in the order of the jobs."""
        by_key = {job.key(): job for job in jobs}
        new = {key: job for key, job in by_key.items() if key not in self._counted}
        missing = {key: job for key, job in new.items() if self.history.get(key) is None}
        self.num_known += len(new) - len(missing)
        order = list(missing)
        for place, outcome in self.executor.run(evaluate, list(missing.values())):
            self.history.put(order[place], outcome)
            self.advance(_cost(missing[order[place]], outcome))
        for key, job in new.items():  # in order: a sum must not depend on which job ends first
            self.cost += _cost(job, self._outcome(key))
            if key not in missing:
                self.advance(_cost(job, self._outcome(key)))
        self._counted.update(new)
        return [self._outcome(job.key()) for job in jobs]

    def _outcome(self, key: str) -> Outcome:
        outcome = self.history.get(key)
        assert outcome is not None, f"job {key} was not run"
        return outcome


def _cost(job: Job, outcome: Outcome) -> float:
    return job.share * outcome.progress
