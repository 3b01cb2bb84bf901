"""Laws of the draft rule by_cost: it is near the best fixed number of drafts at every load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest

from bench.scheduler.drafts import tokens_per_second
from headway.lab.cost import Profile, load_profile
from headway.lab.simulate import as_simulated, with_profile
from headway.request import Request, RequestParams
from headway.scheduler import preset
from headway.scheduler.policies.draft import by_cost
from headway.scheduler.policies.presets import describe
from headway.step_cost import StepWork, UnitCosts

DENSE, FAST = load_profile("llama3.1-8b-a100-80gb"), load_profile("qwen3-0.6b-h200")
REQUEST = Request("a", [1] * 300, RequestParams())
REQUEST.computed_base = 300


@dataclass(frozen=True)
class Step:
    """A step of decodes with 300 tokens each, of which `num_left` may get drafts."""

    num_rows: int
    num_left: int
    share: float

    @property
    def work(self) -> StepWork:
        context = 300 * self.num_rows
        return StepWork(self.num_rows, self.num_rows, context, float(context))

    @property
    def tokens(self) -> float:
        return float(self.num_rows)

    def acceptance(self, request: Request) -> float:
        return self.share


def asked(rule: by_cost, num_rows: int, share: float) -> int:
    return rule(REQUEST, Step(num_rows, num_rows, share))


CELLS = [
    (DENSE, 8, 0.3, False), (DENSE, 32, 0.8, False), (DENSE, 64, 0.6, True), (FAST, 32, 0.8, True),
    (FAST, 64, 0.3, False),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "load", "accept", "is_async"), CELLS)
def test_by_cost_is_near_the_best_fixed_number_of_drafts(
    profile: Profile, load: int, accept: float, is_async: bool
) -> None:
    """bench/scheduler/drafts.py has all loads from 1 to 256, and all numbers of drafts up to 8."""
    rules = ("none", "fixed(1)", "fixed(2)", "fixed(4)", "fixed(8)", "by_cost")
    *fixed, own = [tokens_per_second(r, load, accept, profile, is_async=is_async) for r in rules]
    assert own > 0.98 * max(fixed)
    assert own > 0.99 * fixed[0]


@pytest.mark.parametrize(("load", "accept"), [(128, 0.3), (128, 0.6), (256, 0.3)])
def test_a_full_machine_is_not_slower_than_without_drafts(load: int, accept: float) -> None:
    plain, own = [tokens_per_second(rule, load, accept, DENSE) for rule in ("none", "by_cost")]
    assert own > 0.99 * plain


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_number_of_drafts_falls_with_the_batch_and_rises_with_the_acceptance(
    share: float,
) -> None:
    rule = as_simulated(preset(draft="by_cost"), DENSE).draft
    assert isinstance(rule, by_cost)
    counts = [asked(rule, num_rows, share) for num_rows in (1, 16, 32, 64, 128, 512, 4096)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 3
    more = [asked(rule, num_rows, min(1.0, share + 0.1)) for num_rows in (1, 32, 64, 128, 512)]
    less = [asked(rule, num_rows, share - 0.1) for num_rows in (1, 32, 64, 128, 512)]
    assert all(a >= b for a, b in zip(more, less, strict=True))
    assert asked(rule, 4096, 0.2) == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_number_is_the_best_for_the_step(seed: int) -> None:
    """Compared with the rate of every number, for random costs without jumps."""
    random = Random(seed)
    costs = UnitCosts(
        weights=random.uniform(0, 1e-2), token=random.uniform(0, 2e-4), sample=random.uniform(0, 1e-5),
        read=1e-7, pair=1e-9, fixed=random.uniform(0, 3e-3), min_attention=random.uniform(0, 4e-4),
        overlap=random.choice([0.0, 0.5, 1.0]),
    )  # fmt: skip
    wait, verify = random.choice([(0.0, 0.0), (1e-3, 0.0), (0.0, 2e-3)])
    rule = replace(by_cost().with_costs(costs), wait=wait, verify=verify)
    for _ in range(20):
        num_rows, share = random.randrange(1, 300), random.random()
        step = Step(num_rows, random.randrange(1, num_rows + 1), share)
        rates = {0: num_rows / max(wait, costs.seconds(*step.work))}
        for count in range(1, rule.most + 1):
            more = count * step.num_left
            kept = num_rows + step.num_left * sum(share**n for n in range(1, count + 1))
            pairs = step.work.pairs + more * (300 + (count + 3) / 2)
            work = (num_rows + more, num_rows + more, step.work.reads + more, pairs)
            rates[count] = kept / (costs.seconds(*work) + wait + verify)
        assert rates[rule(REQUEST, step)] == pytest.approx(max(rates.values()))


def test_a_simulation_gives_the_rule_the_times_of_its_profile() -> None:
    rule = with_profile(preset(draft="by_cost(3)"), FAST).draft
    assert isinstance(rule, by_cost)
    fixed = FAST.unit_costs.fixed + FAST.machine.host_seconds
    assert (rule.most, rule.wait, rule.costs) == (3, 0.0, FAST.unit_costs._replace(fixed=fixed))
    waiting = as_simulated(preset(draft="by_cost(3)"), FAST, True).draft
    assert isinstance(waiting, by_cost)
    assert (waiting.wait, waiting.costs) == (FAST.machine.host_seconds, FAST.unit_costs)
    own = preset(draft="by_cost(token=0.5)").draft
    assert as_simulated(preset(draft="by_cost(token=0.5)"), FAST, True).draft == own


def test_a_simulation_drafts_without_a_drafter_of_the_workload() -> None:
    config = as_simulated(preset(draft="fixed(2)", drafter="ngram"), FAST)
    assert describe(config)["drafter"] == "repeat_last"
    assert as_simulated(preset(drafter="ngram"), FAST) == with_profile(
        preset(drafter="ngram"), FAST
    )
    real = with_profile(preset(draft="fixed(2)", drafter="ngram"), FAST)
    assert "ngram" in str(describe(real)["drafter"])
