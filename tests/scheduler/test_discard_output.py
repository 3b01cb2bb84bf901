"""The swap rule discard_output: outputs are generated again, and no token is reported twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from headway.plan import Preemption
from headway.record.lines import PlannedLine, PreemptionLine
from headway.record.sentences import preempted
from headway.record.writer import LineMaker
from headway.request import Request, RequestParams
from headway.scheduler.policies.swap import discard_output
from headway.scheduler.state import MAX_DISCARDS
from tests.support import scenarios
from tests.support.drive import Driver

NUM_SCENARIOS = 50


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_every_token_is_reported_once_and_none_depends_on_the_rule(async_scheduling: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCENARIOS):
        scenario = scenarios.random_scenario(seed, async_scheduling)
        config = replace(scenario.config, swap=discard_output)
        seen += scenarios.run(replace(scenario, config=config))
    assert seen["discarded outputs"] >= 50


def two_requests(swap: str) -> Driver:
    """Two requests in 4 blocks: the second one is preempted when both need a third block."""
    driver = Driver("deep_dive", headroom="watermark(0.0)", swap=swap, num_blocks=4, block_size=4)
    driver.add_all(a=(6, 5), b=(6, 5))
    driver.run()
    return driver


@pytest.mark.parametrize(
    ("swap", "kind", "num_kept"), [("discard_output", "discard", 0), ("recompute", "recompute", 3)]
)
def test_the_output_of_a_victim_is_computed_or_generated_again(
    swap: str, kind: str, num_kept: int
) -> None:
    driver = two_requests(swap)
    (preemption,) = driver.events.preempted
    assert (preemption.request.id, preemption.is_discard) == ("b", num_kept == 0)
    lines = map(LineMaker().line, driver.events)
    (line,) = [e for e in lines if isinstance(e, PlannedLine) and e.preempted]
    assert line.preempted == [PreemptionLine("b", kind, 8, False, 2, 0)]
    resumed = next(plan for plan in driver.events.plans if any(a.is_resume for a in plan.admitted))
    assert resumed.chunks[0].end == 6 + num_kept
    assert driver.requests["b"].num_generated == 5


def test_a_request_keeps_its_output_after_many_preemptions() -> None:
    """Otherwise two requests could preempt each other without end."""
    driver = Driver("deep_dive", headroom="watermark(0.0)", swap="discard_output", block_size=4)
    request = driver.add("a", 6, 9)
    for _ in range(MAX_DISCARDS + 1):
        for _ in range(3):
            driver.finish(driver.plan())
        assert request.num_generated >= 3
        driver.scheduler.state.preempt(request)
    assert request.num_generated == 3


def test_the_sentence_says_that_the_output_is_discarded() -> None:
    request = Request("7", [1], RequestParams())
    kept = Preemption(request, False, 20, False, 0, 0)
    assert "output" not in preempted(kept)
    assert "output discarded" in preempted(kept._replace(is_discard=True))
