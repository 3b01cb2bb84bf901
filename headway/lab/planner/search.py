"""The search of `tune`: a race of settings, then small changes to the survivors.

1. Successive halving: many settings run on the start of the workload, the best of them on a part
   three times as long, and so on up to all of it.
2. Coordinate descent: every single change of the best settings.
3. Jumps: random changes of two or three knobs, if no single change is better.

All runs have the same requests (common random numbers), and a run that has certainly missed a
target is stopped. Costs are counted in full runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from random import Random
from typing import Any

from headway.config import Config
from headway.lab.cost import Profile
from headway.lab.planner.evaluate import Evaluator, Job, Outcome, Settings, make_config
from headway.lab.planner.objective import STOPPED, Objective, Score
from headway.lab.planner.space import Space, neighbours
from headway.lab.planner.targets import Targets
from headway.lab.planner.workload import Workload
from headway.scheduler.policies.presets import describe

# Shares of the workload, with the fewest requests that a share must have to be used: a smaller part
# says little, and the smallest share only pays where a full run takes seconds.
SHARES = ((1 / 27, 555), (1 / 9, 30), (1 / 3, 30), (1.0, 0))
RACE = 0.36  # of the budget; each round of the race gets the same part
MAX_COMBINED = 6
NUM_JUMPS = 4  # changes of several knobs, in a round
NUM_TRIED = 4  # changes that run on all of the workload, in a round of the descent


@dataclass(frozen=True, kw_only=True)
class TuneQuestion:
    """What to tune: a space of settings around a base."""

    profile: Profile
    workload: Workload
    base: Settings
    targets: Targets
    space: Space
    async_scheduling: bool = False

    def job(self, point: Settings, share: float = 1.0, seed: int = 0) -> Job:
        """The run of a point; it is stopped if it misses a target."""
        return Job(
            profile=self.profile, workload=self.workload, settings={**self.base, **point},
            seed=seed, share=share, targets=self.targets, async_scheduling=self.async_scheduling,
        )  # fmt: skip

    def config(self, point: Settings) -> Config:
        return make_config({**self.base, **point}, self.profile)

    def identity(self, point: Settings) -> str:
        """Equal for points with equal configs."""
        return repr(describe(self.config(point)))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A point that ran on all of the workload."""

    point: Settings
    outcome: Outcome
    score: Score


class Search:
    """One search; `tried` has every point that ran on all of the workload, by its identity."""

    def __init__(
        self,
        question: TuneQuestion,
        objective: Objective,
        evaluator: Evaluator,
        seed: int,
        default: Outcome,
    ) -> None:
        self._question, self._evaluator = question, evaluator
        self.objective = objective
        self._random = Random(f"{seed} tune")
        total = len(question.workload.requests())
        self.shares = [share for share, fewest in SHARES if share * total >= fewest]
        first = Tried(point={}, outcome=default, score=objective.score(default))
        self.tried = {question.identity({}): first}
        self.considered = {*self.tried}  # identities of all points that ran, also on a part
        self._identities: dict[tuple[tuple[str, Any], ...], str] = {}  # slow to find
        self._stops = True  # whether runs that have missed a target are stopped

    @property
    def best(self) -> Tried:
        return max(self.tried.values(), key=lambda tried: tried.score)

    def run(self, budget: float, limit: float) -> None:
        """Race, descend and jump until the cost reaches `limit`, of a budget in full runs."""
        self._race(RACE * budget / len(self.shares), limit)
        num_rounds = int(budget / NUM_JUMPS)  # a limit, because runs that are stopped cost little
        while self._descend(limit) or (num_rounds > 0 and self._jump(limit)):
            num_rounds -= 1

    def evaluate(self, points: Sequence[Settings], share: float) -> list[tuple[Score, Settings]]:
        """Scores of points on a part of the workload, in their order."""
        names, score = [self._identity(point) for point in points], self.objective.score
        self.considered.update(names)
        if share < 1:
            return list(zip(map(score, self._run(points, share)), points, strict=True))
        new = {n: p for n, p in zip(names, points, strict=True) if n not in self.tried}
        for (name, point), outcome in zip(new.items(), self._run(new.values(), 1.0), strict=True):
            self.tried[name] = Tried(point=point, outcome=outcome, score=score(outcome))
        return [(self.tried[n].score, p) for n, p in zip(names, points, strict=True)]

    def _run(self, points: Iterable[Settings], share: float) -> list[Outcome]:
        jobs = [self._question.job(point, share) for point in points]
        return self._evaluator.run(jobs if self._stops else [replace(j, targets=()) for j in jobs])

    def _ranked(self, points: list[Settings], share: float) -> list[tuple[Score, Settings]]:
        """Points with their scores, best first. If all are stopped, they run again to their end:
        then no settings may meet the targets, and the search looks for those that come closest."""
        scored = self.evaluate(points, share)
        if self._stops and points and all(score[0] == STOPPED for score, point in scored if point):
            self._stops = False
            self.tried = {k: t for k, t in self.tried.items() if not t.outcome.is_stopped}
            scored = self.evaluate(points, share)
        return sorted(scored, key=itemgetter(0), reverse=True)

    def _race(self, cost: float, limit: float) -> None:
        points = self._start(int(cost / self.shares[0]))
        for place, share in enumerate(self.shares):
            points = self._unique(points)[: self.affordable(share, limit)]
            ranked = self._ranked(points, share)
            if share < 1:
                combined = self._combined(ranked) if place == 0 else []
                count = max(2, int(cost / self.shares[place + 1]))
                points = [*combined, *(point for _, point in ranked)][:count]

    def _start(self, count: int) -> list[Settings]:
        """The defaults, every single change, and random combinations."""
        space = self._question.space
        singles: list[Settings] = [{name: v} for name, values in space.items() for v in values]
        self._random.shuffle(singles)
        points: list[Settings] = [{}, *singles]
        for _ in range(20 * count):
            if len(points := self._unique(points)) >= count:
                break
            points.append({
                name: self._random.choice(values)
                for name, values in space.items() if self._random.random() < 0.5
            })  # fmt: skip
        return self._unique(points)[:count]

    def _combined(self, ranked: Sequence[tuple[Score, Settings]]) -> list[Settings]:
        """The best single change of every knob, combined: the best two knobs, three, and so on."""
        default = next((score for score, point in ranked if not point), None)
        combined: list[Settings] = [{}]
        for score, point in ranked:
            is_better = default is not None and score > default
            if is_better and len(point) == 1 and not point.keys() & combined[-1].keys():
                combined.append({**combined[-1], **point})
        return combined[2 : MAX_COMBINED + 1]

    def _descend(self, limit: float) -> bool:
        """One round of changes to the best point; False if none is better or the cost is reached."""
        best, share = self.best, self.shares[-2] if len(self.shares) > 1 else 1.0
        changes = self._changes(best.point)[: max(0, self.affordable(share, limit) - 1)]
        if not changes:
            return False
        (now, _), *scored = self.evaluate([best.point, *(p for _, p in changes)], share)
        named = ((score, name, p) for (score, p), (name, _) in zip(scored, changes, strict=True))
        better = sorted((x for x in named if x[0] > now), key=itemgetter(0), reverse=True)
        affordable = self.affordable(1.0, limit)
        if not better or not affordable:
            return False
        together = {**best.point, **{name: point[name] for _, name, point in reversed(better)}}
        tried = [together, *(point for _, _, point in better[:NUM_TRIED])]
        self.evaluate(self._unique(tried)[:affordable], 1.0)
        return self.best.score > best.score

    def _jump(self, limit: float) -> bool:
        """Changes of two or three knobs of the best point at once; False if none is affordable.

        A run for each knob is left, so that changes that buy nothing can be taken back.
        """
        space, points = self._question.space, list[Settings]()
        for _ in range(NUM_JUMPS):
            names = self._random.sample(list(space), min(len(space), self._random.choice((2, 3))))
            points.append({**self.best.point, **{n: self._random.choice(space[n]) for n in names}})
        points = self._unique(points)[: self.affordable(1.0, limit - len(space))]
        self.evaluate(points, 1.0)
        return bool(points)

    def _changes(self, point: Settings) -> list[tuple[str, Settings]]:
        """Every single change of a point, with the knob that it changes; new configs only."""
        question = self._question
        now: Settings = {**question.base, **point, **describe(question.config(point))}
        seen, changes = {question.identity(point)}, list[tuple[str, Settings]]()
        for name, values in question.space.items():
            for value in neighbours(values, now[name]):
                changed = {**point, name: value}
                if (identity := question.identity(changed)) not in seen | self.tried.keys():
                    seen.add(identity)
                    changes.append((name, changed))
        self._random.shuffle(changes)
        return changes

    def _unique(self, points: Iterable[Settings]) -> list[Settings]:
        return list({self._identity(p): p for p in reversed(list(points))}.values())[::-1]

    def _identity(self, point: Settings) -> str:
        key = tuple(sorted(point.items()))
        if key not in self._identities:
            self._identities[key] = self._question.identity(point)
        return self._identities[key]

    def affordable(self, share: float, limit: float) -> int:
        """Runs of a share of the workload until the cost reaches the limit."""
        return max(0, int((limit - self._evaluator.cost) / share))
