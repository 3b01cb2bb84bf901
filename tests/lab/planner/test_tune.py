"""The search: as good as the full grid, within its budget, repeatable, and with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from headway.errors import ConfigError
from headway.lab.cost import load_profile
from headway.lab.planner import advice
from headway.lab.planner.confidence import interval
from headway.lab.planner.evaluate import Evaluator, History, Job, Outcome, evaluate
from headway.lab.planner.objective import choose_objective
from headway.lab.planner.search import Search, TuneQuestion
from headway.lab.planner.space import points
from headway.lab.planner.targets import Target, missed
from headway.lab.planner.tune import Answer, compare, pareto, tune
from headway.lab.planner.workload import Workload

PROFILE = load_profile("llama3.1-8b-a100-80gb")
BATCH = Workload(text="requests=90,prompt=uniform(50,400),output=uniform(4,40)")
SPACE = {
    "preset": ["headway", "vllm_v1"], "max_num_seqs": [4, 16, 64], "chunk": ["at_most(64)", "split_any"],
    "max_num_batched_tokens": [256, 2048], "victim": ["newest", "least_work"],
}  # fmt: skip
QUESTION = TuneQuestion(
    profile=PROFILE, workload=BATCH, base={"preset": "headway", "max_num_seqs": 4, "num_blocks": 400},
    targets=(Target("tbt", "p99", 0.1),), space=SPACE,
)  # fmt: skip
HISTORY = History()  # all tests of this file share their runs


@pytest.fixture(scope="module")
def answer() -> Answer:
    return tune(QUESTION, Evaluator(history=HISTORY), budget=36)


def test_the_best_settings_are_nearly_the_best_of_the_grid(answer: Answer) -> None:
    evaluator = Evaluator(history=HISTORY)
    grid_space = {name: values for name, values in SPACE.items() if name != "victim"}
    jobs = [QUESTION.job(point) for point in points(grid_space)]
    objective = answer.objective
    assert objective.is_throughput
    grid = max(map(objective.score, evaluator.run(jobs)))
    (found,) = evaluator.run([QUESTION.job(answer.settings)])
    assert not missed(QUESTION.targets, found.summary)
    assert objective.score(found)[0] == grid[0] and objective.score(found)[1] >= 0.98 * grid[1]


def test_the_search_stays_within_its_budget(answer: Answer) -> None:
    assert 12 < answer.cost <= 36


def test_the_answer_names_only_changes_that_buy_something(answer: Answer) -> None:
    assert answer.settings and set(answer.settings) == {change.knob for change in answer.changes}
    assert all(change.loss > 0 or change.breaks_targets for change in answer.changes)
    assert "max_num_seqs" in answer.settings and "victim" not in answer.settings
    assert answer.gain.low > 0 and answer.seeds_met[1] == answer.num_seeds


def test_an_interrupted_search_gives_the_same_answer(answer: Answer) -> None:
    assert asdict(tune(QUESTION, Evaluator(history=HISTORY), budget=36)) == asdict(answer)


def test_no_point_of_the_front_is_beaten_by_another(answer: Answer) -> None:
    pairs = [(p.tokens_per_second, p.tokens_per_second_per_user) for p in answer.pareto]
    assert pairs and pareto(QUESTION, []) == []
    assert not [1 for a in pairs for b in pairs if a != b and a[0] >= b[0] and a[1] >= b[1]]


def test_settings_that_come_closest_are_found_if_none_meets_the_targets() -> None:
    hard = replace(QUESTION, targets=(Target("ttft", "p99", 0.1),))
    found = tune(hard, Evaluator(history=HISTORY), budget=24)
    closest, default = (
        evaluate(replace(hard.job(point), targets=())).summary["ttft"]["p99"]
        for point in (found.settings, {})
    )
    assert found.seeds_met == (0, 0) and closest < 0.5 * default
    assert all(change.loss > 0 for change in found.changes)


def test_an_unsaturated_workload_is_tuned_for_latency() -> None:
    calm = replace(BATCH, text=BATCH.text + ",arrivals=poisson(4)")
    outcome = evaluate(Job(profile=PROFILE, workload=calm, settings={}))
    objective = choose_objective((), outcome)
    assert not objective.is_throughput and "end-to-end" in objective.text
    assert objective.figure(outcome) == outcome.summary["end_to_end"]["mean"]
    close = choose_objective((Target("ttft", "p99", 1.0),), outcome)
    assert close.figure(outcome) == outcome.summary["ttft"]["p99"]


TOGETHER = {"chunk": "at_most(64)", "victim": "least_work", "max_num_batched_tokens": 2048}


class Made(Evaluator):
    """An evaluator of made outcomes: changes of TOGETHER cost throughput unless all are made."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.cost += sum(job.share for job in jobs)
        return [self._made(job) for job in jobs]

    def _made(self, job: Job) -> Outcome:
        num_made = sum(job.settings.get(name) == value for name, value in TOGETHER.items())
        speed = 110 if num_made == len(TOGETHER) else 100 - num_made
        summary = {**self.outcome.summary, "output_tokens_per_second": float(speed)}
        return replace(self.outcome, summary=summary)


def test_changes_that_gain_only_together_are_found_by_jumps() -> None:
    question = replace(QUESTION, targets=())
    evaluator = Made(evaluate(question.job({})))
    (default,) = evaluator.run([question.job({})])
    search = Search(question, choose_objective((), default), evaluator, 0, default)
    while search.best.score[1] <= 100 and search._jump(60):
        pass
    assert search.best.score[1] == 110 and evaluator.cost <= 60 - len(SPACE)


def test_a_large_workload_is_raced_on_a_smaller_part() -> None:
    large = replace(BATCH, text=BATCH.text.replace("requests=90", "requests=15000"))
    searches = []
    for workload in (BATCH, large):
        question = replace(QUESTION, targets=(), workload=workload)
        evaluator = Made(evaluate(QUESTION.job({})))
        (default,) = evaluator.run([question.job({})])
        searches.append(Search(question, choose_objective((), default), evaluator, 0, default))
    small, wide = searches
    assert small.shares == [1 / 3, 1.0] and wide.shares == [1 / 27, 1 / 9, 1 / 3, 1.0]
    wide._race(3, 40)
    assert len(wide.considered) > 3 * 9  # a ninth of the workload would allow no more


def test_a_setting_that_rejects_requests_loses() -> None:
    default = evaluate(Job(profile=PROFILE, workload=BATCH, settings={}))
    refusing = evaluate(Job(profile=PROFILE, workload=BATCH, settings={"max_model_len": 150}))
    objective = choose_objective((), default)
    assert refusing.summary["rejected"] and objective.score(refusing) < objective.score(default)


def test_a_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget"):
        tune(QUESTION, Evaluator(), budget=3)


def test_advice_has_only_flags_that_exist() -> None:
    settings = {
        "queue": "shortest_first", "chunk": "at_most(512)", "headroom": "watermark(0.05)",
        "batching": "mixed", "max_num_seqs": 512, "max_num_batched_tokens": 256,
    }  # fmt: skip
    vllm = advice.vllm_command(settings)
    assert "--long-prefill-token-threshold 512" in vllm.command
    assert "--max-num-seqs 256" in vllm.command  # vLLM refuses more than the token budget
    assert vllm.without_counterpart == ["queue=shortest_first", "headroom=watermark(0.05)"]
    assert advice.serve_command(settings).count("--") == len(settings)
    assert advice.lab_command({"preset": "headway"}, {}, "trace.csv", "p") is None


def test_an_interval_is_student_t() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and high - mean == pytest.approx(3.182 * 1.29099 / 2, rel=1e-4)
    assert low + high == pytest.approx(5.0)


def test_predicted_and_measured_are_compared() -> None:
    summary = evaluate(Job(profile=PROFILE, workload=BATCH, settings={})).summary
    slower = {**summary, "output_tokens_per_second": summary["output_tokens_per_second"] / 2}
    assert [row.error for row in compare(summary, slower)][:2] == [1.0, 0.0]
