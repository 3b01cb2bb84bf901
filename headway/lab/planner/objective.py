"""What `tune` maximises: throughput or latency, subject to the targets.

If work arrives faster than it is done, or all at once, it is output tokens per second. Otherwise it
is latency: the statistic that is closest to its target, relative to it; without targets, the mean
end-to-end time. Settings that meet all targets are better than settings that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.lab.planner.evaluate import Outcome
from headway.lab.planner.targets import Targets, worst_ratio

Score = tuple[int, float, float]  # larger is better
STOPPED, MISSED, MET = range(3)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Ranks outcomes. `num_rejected` requests are rejected with the default settings."""

    targets: Targets
    is_throughput: bool
    num_rejected: int

    @property
    def text(self) -> str:
        if self.is_throughput:
            what = "output tokens per second, because the workload saturates the defaults"
        elif self.targets:
            what = "the distance to the closest target, because the workload does not saturate"
        else:
            what = "a low mean end-to-end time, because the workload does not saturate"
        return f"The search maximises {what}."

    @property
    def unit(self) -> str:
        if self.is_throughput:
            return "output tokens/s"
        return "of the closest target" if self.targets else "s mean end to end"

    def figure(self, outcome: Outcome) -> float:
        """The number that is optimised, in its unit."""
        if self.is_throughput:
            return float(outcome.summary["output_tokens_per_second"])
        if self.targets:
            return worst_ratio(self.targets, outcome.summary)
        return float(outcome.summary["end_to_end"]["mean"])

    def gain(self, outcome: Outcome, other: Outcome) -> float:
        """How much better the figure of one run is, as a share: 0.1 is 10 % better."""
        new, old = self.figure(outcome), self.figure(other)
        better, worse = (new, old) if self.is_throughput else (old, new)
        return better / worse - 1 if worse else 0.0

    def advantage(self, outcome: Outcome, other: Outcome) -> float:
        """How much better one complete run is: by the figure, or by the missed targets."""
        if self.score(outcome)[0] == MET:
            return self.gain(outcome, other)
        ratios = [worst_ratio(self.targets, each.summary) for each in (outcome, other)]
        return ratios[1] / ratios[0] - 1 if ratios[0] else 0.0

    def score(self, outcome: Outcome) -> Score:
        """Sorts outcomes: stopped runs by their progress, then missed targets, then the figure."""
        if outcome.is_stopped:
            return STOPPED, outcome.progress, 0.0
        summary = outcome.summary
        value = self.figure(outcome) * (1 if self.is_throughput else -1)
        rejected = summary["rejected"] - self.num_rejected
        if rejected > 0:  # a setting must not win by refusing work
            return STOPPED, -float(rejected), value
        worst = worst_ratio(self.targets, summary)
        return (MISSED, -worst, value) if worst > 1 else (MET, value, 0.0)


def choose_objective(targets: Targets, default: Outcome) -> Objective:
    """The objective for a workload, by a complete run with the default settings."""
    return Objective(
        targets=targets, is_throughput=default.is_saturated,
        num_rejected=default.summary["rejected"],
    )  # fmt: skip
