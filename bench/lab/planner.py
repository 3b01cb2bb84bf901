"""The planner: `tune` against a grid of settings and optuna, and how often `capacity` is right.

    python -m bench.lab.planner [--only NAME] [--budget 60] [--jobs 2] [--quick] [--history FILE]

For three workloads, all settings of a grid run on the whole workload. The search gets the same grid
and a budget of full runs; its best settings are compared with the best of the grid, on the requests that both
have seen. Then the search and 300 trials of optuna get the space that `headway plan tune` searches; the
best settings of both run on other seeds. For the capacity, the mean over 20 seeds is the truth;
20 tries of 8 other seeds each give an estimate and an interval. Prints one JSON object. --only runs
one workload, or the capacity. --quick uses shorter workloads and a smaller grid.
"""

from __future__ import annotations

import atexit
from argparse import Namespace
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from time import perf_counter

import optuna

from bench.harness import Bench, Figures
from headway.lab.cost import load_profile
from headway.lab.planner.capacity import find_capacity
from headway.lab.planner.confidence import interval
from headway.lab.planner.evaluate import Evaluator, History, Job, Settings, make_config
from headway.lab.planner.executors import Processes
from headway.lab.planner.objective import MET, Objective
from headway.lab.planner.search import Search, TuneQuestion
from headway.lab.planner.space import Space, default_space, points
from headway.lab.planner.targets import Target
from headway.lab.planner.tune import Answer, explicit, tune
from headway.lab.planner.workload import Workload

PROFILE = load_profile("llama3.1-8b-a100-80gb")
NUM_TRIALS = 300
FRESH = range(100_001, 100_011)  # seeds that no search has used
NUM_TRUTH, NUM_TRIES, NUM_SEEDS = 20, 20, 8
GRID: Space = {
    "preset": ["headway", "vllm_v1"],
    "chunk": ["at_most(256)", "at_most(1024)", "split_any"],
    "headroom": ["watermark(0.0)", "watermark(0.05)", "future_peak(learned)"],
    "max_num_seqs": [32, 128, 512],
    "max_num_batched_tokens": [512, 2048, 8192],
}
WORKLOADS = {
    "offline batch": (
        "requests=300,prompt=lognormal(400,0.8),output=lognormal(200,0.7),max_tokens=1024", 4000, (),
    ),
    "saturated chat": (
        "requests=300,arrivals=poisson(20),prompt=lognormal(600,0.8),output=lognormal(150,0.7),"
        "max_tokens=1024", 3000, (Target("tbt", "p99", 0.1),),
    ),
    "calm with long prompts": (
        "requests=300,arrivals=poisson(4),prompt=0.9*lognormal(300,0.8)+0.1*uniform(4000,8000),"
        "output=lognormal(120,0.7)", 6000, (Target("ttft", "p99", 1.5), Target("stall", "p99", 0.3)),
    ),
}  # fmt: skip
CAPACITY = "requests=2000,arrivals=poisson(5),prompt=uniform(100,800),output=uniform(10,60)"
TARGETS = (Target("ttft", "p99", 1.0), Target("tbt", "p99", 0.1))


def question_of(name: str, is_quick: bool) -> TuneQuestion:
    text, num_blocks, targets = WORKLOADS[name]
    base = {"preset": "headway", "num_blocks": num_blocks}
    return TuneQuestion(
        profile=PROFILE, targets=targets, base=base,
        workload=Workload(text=text.replace("=300", "=120") if is_quick else text),
        space=default_space(make_config(base, PROFILE)),
    )  # fmt: skip


def search_against_grid(
    question: TuneQuestion, evaluator: Evaluator, budget: int, is_quick: bool
) -> Figures:
    space = {k: v[::2] if is_quick and len(v) > 2 else v for k, v in GRID.items()}
    question = replace(question, space=space)
    answer, seconds = searched(question, evaluator, budget)
    objective, grid = answer.objective, points(space)
    outcomes = evaluator.run([replace(question.job(point), targets=()) for point in grid])
    best = max(outcomes, key=objective.score)
    (found,) = evaluator.run([replace(question.job(answer.settings), targets=())])
    return {
        "objective": objective.unit, "grid_points": len(grid),
        "grid_best": objective.figure(best), "grid_class": objective.score(best)[0],
        "search_best": objective.figure(found), "search_class": objective.score(found)[0],
        "search_to_grid": 1 + objective.gain(found, best),
        "search_cost": round(answer.cost, 1), "search_seconds": round(seconds, 1),
        "gain_over_defaults": list(answer.gain), "settings": answer.settings,
    }  # fmt: skip


def searched(question: TuneQuestion, evaluator: Evaluator, budget: int) -> tuple[Answer, float]:
    """The answer of `tune`, without the history, and its seconds."""
    start = perf_counter()
    answer = tune(question, Evaluator(executor=evaluator.executor), budget=budget)
    return answer, perf_counter() - start


def search_against_optuna(question: TuneQuestion, evaluator: Evaluator, budget: int) -> Figures:
    """The best settings of both, on seeds that neither has seen; a gain above 0 is the search's."""
    answer, seconds = searched(question, evaluator, budget)
    objective, start = answer.objective, perf_counter()
    trial = with_optuna(question, objective)
    optuna_seconds = perf_counter() - start
    pairs = [
        evaluator.run([
            replace(question.job(point, seed=seed), targets=()) for point in (answer.settings, trial)
        ]) for seed in FRESH
    ]  # fmt: skip
    figures = [[objective.figure(outcome) for outcome in pair] for pair in pairs]
    classes = [[objective.score(outcome)[0] == MET for outcome in pair] for pair in pairs]
    return {
        "objective": objective.unit, "seeds": len(FRESH), "trials": NUM_TRIALS,
        "search_mean": fmean(new for new, _ in figures),
        "optuna_mean": fmean(old for _, old in figures),
        "search_met": sum(new for new, _ in classes), "optuna_met": sum(old for _, old in classes),
        "gain_over_optuna": list(interval([objective.gain(*pair) for pair in pairs])),
        "search_cost": round(answer.cost, 1), "search_seconds": round(seconds, 1),
        "optuna_seconds": round(optuna_seconds, 1),
        "settings": answer.settings, "optuna_settings": explicit(question, trial),
    }  # fmt: skip


def with_optuna(question: TuneQuestion, objective: Objective) -> Settings:
    """The best point of NUM_TRIALS trials of the default sampler, on the whole workload."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    evaluator = Evaluator()
    (default,) = evaluator.run([replace(question.job({}), targets=())])
    search = Search(question, objective, evaluator, 0, default)

    def value(trial: optuna.Trial) -> float:
        point: Settings = {k: trial.suggest_categorical(k, v) for k, v in question.space.items()}
        ((score, _),) = search.evaluate([point], 1.0)
        return score[0] * 1e6 + score[1]

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(value, n_trials=NUM_TRIALS)
    return search.best.point


def capacity(asked: Namespace) -> Figures:
    """How often the interval of NUM_SEEDS seeds contains the mean of other seeds."""
    question = Job(
        profile=PROFILE, settings={"preset": "headway"}, targets=TARGETS,
        workload=Workload(text=CAPACITY.replace("=2000", "=200") if asked.quick else CAPACITY),
    )  # fmt: skip
    # A seed's rate does not depend on the other seeds, so one call serves all tries.
    seeds = range(NUM_TRUTH + NUM_TRIES * NUM_SEEDS)
    found = find_capacity(question, seeds, evaluator(asked.jobs, asked.history))
    truth = interval(found.by_seed[:NUM_TRUTH])
    rest = found.by_seed[NUM_TRUTH:]
    tries = [interval(rest[i : i + NUM_SEEDS]) for i in range(0, len(rest), NUM_SEEDS)]
    errors = [each.mean / truth.mean - 1 for each in tries]
    return {
        "truth": truth.mean, "truth_interval": list(truth), "tries": len(tries),
        "covered": sum(each.low <= truth.mean <= each.high for each in tries),
        "within_3_percent": sum(abs(error) <= 0.03 for error in errors),
        "largest_error": max(errors, key=abs),
        "mean_half_width": sum((e.high - e.low) / 2 / e.mean for e in tries) / len(tries),
        "runs_per_try": round(found.num_runs / len(found.by_seed) * NUM_SEEDS, 1),
        "limited_by": found.limited_by,
    }  # fmt: skip


@cache
def evaluator(jobs: int, history: Path | None) -> Evaluator:
    executor = Processes(jobs)
    atexit.register(executor.close)
    return Evaluator(executor=executor, history=History(history))


def search(asked: Namespace, name: str) -> Figures:
    question, runs = question_of(name, asked.quick), evaluator(asked.jobs, asked.history)
    return {
        "grid": search_against_grid(question, runs, asked.budget, asked.quick),
        "optuna": search_against_optuna(question, runs, asked.budget),
    }


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--budget", type=int, default=60)
    bench.option("--jobs", type=int, default=2)
    bench.option("--quick", action="store_true")
    bench.option("--history", type=Path)
    bench.parts = {name: partial(search, name=name) for name in WORKLOADS}
    bench.part(capacity)
    bench.main(start=lambda asked: {"quick": asked.quick, "budget": asked.budget})
