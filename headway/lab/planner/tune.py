"""`tune`: search, simplify the best settings, confirm them on fresh seeds, and say why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from headway.errors import ConfigError
from headway.lab.doctor.diagnose import Finding, diagnose
from headway.lab.planner.confidence import Interval, interval
from headway.lab.planner.evaluate import Evaluator, Outcome, Settings, check_completed
from headway.lab.planner.objective import MET, Objective, Score, choose_objective
from headway.lab.planner.search import Search, Tried, TuneQuestion
from headway.lab.planner.sweep import metric_of
from headway.lab.planner.targets import worst_ratio
from headway.lab.summary import Summary
from headway.scheduler.policies.presets import PRESETS, SLOTS, describe, slot

MIN_BUDGET = 14
NO_LOSS = 0.002  # a change that buys less is left out
COMPARED = {
    "output tokens/s": "output_tokens_per_second", "TTFT p50 (s)": "ttft.p50",
    "TTFT p99 (s)": "ttft.p99", "time between tokens p99 (s)": "time_between_tokens.p99",
    "longest stall p99 (s)": "longest_stall.p99", "end to end p50 (s)": "end_to_end.p50",
    "preemptions": "preemptions",
}  # fmt: skip
VERIFIED = {
    "output tokens/s": "output_tokens_per_second", "TTFT p50": "ttft.p50", "TTFT p99": "ttft.p99",
    "time between tokens p50": "time_between_tokens.p50",
    "time between tokens p99": "time_between_tokens.p99", "end to end p50": "end_to_end.p50",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """One knob that differs from the defaults, and what it buys."""

    knob: str
    default: Any
    value: Any
    loss: float  # of the objective if this knob alone is set back; 0.1 is 10 %
    breaks_targets: bool  # if it is set back
    is_tested: bool  # False if the budget did not allow a run without it


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure with defaults and best settings: means over fresh seeds, and the paired difference."""

    name: str
    default: float
    best: float
    difference: Interval


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """Settings that no other tried settings beat in both figures."""

    settings: Settings
    tokens_per_second: float  # output, of the device
    tokens_per_second_per_user: float  # 1 / mean time between tokens


@dataclass(frozen=True, kw_only=True)
class Answer:
    objective: Objective
    settings: Settings  # what differs from the base; empty: the defaults are best
    seeds_met: tuple[int, int]  # fresh seeds that meet all targets: defaults, best
    num_seeds: int
    gain: Interval  # of the objective over the defaults, as a share
    compared: list[Compared]
    changes: list[Change]
    before: list[Finding]
    after: list[Finding]
    pareto: list[ParetoPoint]
    num_settings: int  # that were simulated, on all of the workload or a part
    cost: float


def tune(question: TuneQuestion, evaluator: Evaluator, *, budget: int, seed: int = 0) -> Answer:
    """The best settings within a budget of full runs; ConfigError if the budget is too small."""
    if budget < MIN_BUDGET:
        raise ConfigError(f"--budget must be at least {MIN_BUDGET} full runs, not {budget}")
    num_seeds = max(3, min(5, budget // 10))
    reasons, confirmation = budget // 12, 3 * num_seeds  # runs that are kept for the end
    job = replace(question.job({}), targets=())
    (default,) = evaluator.run([job])
    check_completed(job, default)
    objective = choose_objective(question.targets, default)
    search = Search(question, objective, evaluator, seed, default)
    search.run(budget, budget - confirmation - 2 * reasons)
    simple = simplified(question, search, budget - confirmation - reasons)
    finalists = _finalists(question, search, simple)
    fresh = range(1 + 1000 * seed, 1 + 1000 * seed + num_seeds)
    runs = _confirm(question, evaluator, [{}, *finalists], fresh)
    defaults, best = runs[0], max(runs, key=lambda run: _confirmed(objective, run[1]))
    gains = [objective.gain(b, d) for b, d in zip(best[1], defaults[1], strict=True)]
    return Answer(
        objective=objective, settings=best[0], num_seeds=num_seeds,
        seeds_met=(_num_met(objective, defaults[1]), _num_met(objective, best[1])),
        gain=interval(gains) if best[0] else Interval(0.0, 0.0, 0.0),
        compared=_compare(defaults[1], best[1]),
        changes=_changes(question, search, best[0], budget),
        before=diagnose(defaults[1][0].summary, defaults[1][0].config),
        after=diagnose(best[1][0].summary, best[1][0].config),
        pareto=pareto(question, search.tried.values()), num_settings=len(search.considered),
        cost=evaluator.cost,
    )  # fmt: skip


def explicit(question: TuneQuestion, point: Settings) -> Settings:
    """A point as slots and numbers that differ from the base, without a preset."""
    config, old = question.config(point), describe(question.config({}))
    return {
        name: _short(name, getattr(config, name), question) if name in SLOTS else value
        for name, value in describe(config).items()
        if value != old[name]
    }


def complete(question: TuneQuestion, point: Settings) -> Settings:
    """All slots and sizes of a point, and the numbers that were set, as short texts."""
    config = question.config(point)
    shown = {"max_num_seqs", "max_num_batched_tokens", *question.base, *point} - SLOTS.keys()
    slots = {name: _short(name, getattr(config, name), question) for name in SLOTS}
    return {**slots, **{name: v for name, v in describe(config).items() if name in shown}}


def _short(name: str, value: Any, question: TuneQuestion) -> str:
    """The shortest known text of a slot's value."""
    known = [*(str(each[name]) for each in PRESETS.values()), *question.space.get(name, ())]
    texts = [str(text) for text in known if slot(name, text) == value]
    if texts:
        return min(texts, key=len)
    return str(describe(replace(question.config({}), **{name: value}))[name])


def simplified(question: TuneQuestion, search: Search, limit: float) -> Settings:
    """The best point without the changes that buy nothing, as far as the cost allows to tell."""
    best = search.best
    point, score = explicit(question, best.point), best.score
    tested = list(point)[: max(0, search.affordable(1.0, limit) - 1)]
    scored = search.evaluate([_without(point, name) for name in tested], 1.0)
    named = zip(tested, scored, strict=True)
    dropped = [name for name, (other, _) in named if _is_as_good(other, score)]
    if not dropped:
        return point
    kept = _without(point, *dropped)
    ((together, _),) = search.evaluate([kept], 1.0)
    return kept if _is_as_good(together, score) else point


def _without(point: Settings, *names: str) -> Settings:
    return {name: value for name, value in point.items() if name not in names}


def _is_as_good(score: Score, best: Score) -> bool:
    return score[0] >= best[0] and score[1] >= best[1] - NO_LOSS * abs(best[1])


def _finalists(question: TuneQuestion, search: Search, simple: Settings) -> list[Settings]:
    """The simplified best point and the best other point, if they are not the defaults."""
    taken = {question.identity({}), question.identity(simple), question.identity(search.best.point)}
    ranked = sorted(search.tried.items(), key=lambda item: item[1].score, reverse=True)
    others = [explicit(question, t.point) for identity, t in ranked if identity not in taken]
    return [point for point in (simple, *others[:1]) if point]


def _confirm(
    question: TuneQuestion, evaluator: Evaluator, points: Sequence[Settings], seeds: Sequence[int]
) -> list[tuple[Settings, list[Outcome]]]:
    """Complete runs of the points on fresh seeds."""
    jobs = [replace(question.job(p, seed=seed), targets=()) for p in points for seed in seeds]
    outcomes, size = evaluator.run(jobs), len(seeds)
    return [(p, outcomes[i * size : (i + 1) * size]) for i, p in enumerate(points)]


def _num_met(objective: Objective, outcomes: Sequence[Outcome]) -> int:
    return sum(objective.score(outcome)[0] == MET for outcome in outcomes)


def _confirmed(objective: Objective, outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Sorts points by the seeds that meet the targets, then by the figure or the missed targets."""
    num_met = _num_met(objective, outcomes)
    if not num_met:
        return 0, -fmean(worst_ratio(objective.targets, each.summary) for each in outcomes)
    mean = fmean(objective.figure(outcome) for outcome in outcomes)
    return num_met, mean if objective.is_throughput else -mean


def _compare(defaults: Sequence[Outcome], best: Sequence[Outcome]) -> list[Compared]:
    rows = []
    for name, metric in COMPARED.items():
        old, new = ([metric_of(o.summary, metric) for o in run] for run in (defaults, best))
        difference = interval([n - o for n, o in zip(new, old, strict=True)])
        rows.append(Compared(name=name, default=fmean(old), best=fmean(new), difference=difference))
    return rows


def _changes(question: TuneQuestion, search: Search, point: Settings, budget: int) -> list[Change]:
    """What each change buys, by a run without it, as far as the budget allows. Largest first."""
    objective, old = search.objective, describe(question.config({}))
    identities = {name: question.identity(_without(point, name)) for name in point}
    new = [name for name in point if identities[name] not in search.tried]
    untested = new[search.affordable(1.0, budget - 1) :]
    tested = [name for name in point if name not in untested]
    search.evaluate([point, *(_without(point, name) for name in tested)], 1.0)
    whole = search.tried[question.identity(point)]
    changes = []
    for name, value in point.items():
        less = search.tried.get(identities[name], whole)
        is_complete = not less.outcome.is_stopped and not whole.outcome.is_stopped
        changes.append(Change(
            knob=name, default=old[name], value=value, is_tested=name in tested,
            loss=objective.advantage(whole.outcome, less.outcome) if is_complete else 0.0,
            breaks_targets=whole.score[0] == MET and less.score[0] != MET,
        ))  # fmt: skip
    return sorted(changes, key=lambda change: (change.breaks_targets, change.loss), reverse=True)


def pareto(question: TuneQuestion, tried: Iterable[Tried]) -> list[ParetoPoint]:
    """The complete runs that no other beats in tokens per second and per user, slowest user first."""
    points = [_pareto_point(question, each) for each in tried if not each.outcome.is_stopped]
    points.sort(key=lambda p: (-p.tokens_per_second, -p.tokens_per_second_per_user))
    front: list[ParetoPoint] = []
    for point in points:
        speed = point.tokens_per_second_per_user
        if not front or speed > front[-1].tokens_per_second_per_user:
            front.append(point)
    return front


def _pareto_point(question: TuneQuestion, tried: Tried) -> ParetoPoint:
    mean = tried.outcome.summary["time_between_tokens"]["mean"]
    return ParetoPoint(
        settings=explicit(question, tried.point),
        tokens_per_second=float(tried.outcome.summary["output_tokens_per_second"]),
        tokens_per_second_per_user=1 / mean if mean else 0.0,
    )


class Verified(NamedTuple):
    """One figure, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to the measured value."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def compare(predicted: Summary, measured: Summary) -> list[Verified]:
    """The figures of two summaries side by side."""
    return [
        Verified(name, metric_of(predicted, metric), metric_of(measured, metric))
        for name, metric in VERIFIED.items()
    ]
