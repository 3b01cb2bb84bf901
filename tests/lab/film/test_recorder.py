"""Recording policies changes no decision, and policies can change in the middle of a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.lab.film.recorder import PolicyRecorder
from headway.plan import Plan, StepReport
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies.presets import PRESETS, SLOTS
from tests.scheduler import decisions
from tests.support.drive import Driver, Row, check_no_leaks


@pytest.mark.parametrize("seed", range(1, decisions.NUM_RUNS, 29))
def test_recording_changes_no_decision_and_finds_what_led_to_it(seed: int) -> None:
    engine, lines = decisions.engine_of(seed), list[str]()
    recorder = PolicyRecorder(engine.scheduler)

    def observe(report: StepReport) -> None:
        lines.append(json.dumps(decisions.describe(report)))
        if report.plan.step >= 0:
            check(report.plan)

    def check(plan: Plan) -> None:
        answers = recorder.take(plan.step)
        assert answers is not None
        for blocked in plan.blocked:
            if blocked.reason in ("headroom", "back_off"):
                assert 0 < answers.headroom[blocked.request.id] <= blocked.need
        chosen = [p.request.id for p in plan.events.preempted if p.num_due]
        for id, candidates in zip(chosen, answers.victims[-len(chosen) :], strict=False):
            keys = dict(candidates)
            assert keys[id] == max(keys.values())

    engine.observers.append(observe)
    decisions.run(engine, seed)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
    assert digest == decisions.recorded_digests()[seed]


@pytest.mark.parametrize("seed", range(0, decisions.NUM_RUNS, 29))
def test_policies_can_change_in_the_middle(seed: int) -> None:
    """All slots change every few steps; every request still finishes and nothing leaks."""
    engine, rng = decisions.engine_of(seed), Random(seed)
    scheduler = engine.scheduler

    def change(report: StepReport) -> None:
        if rng.random() < 0.2:
            other = preset(rng.choice(list(PRESETS)))
            slots = {slot: getattr(other, slot) for slot in SLOTS if slot != "chunk"}
            scheduler.reconfigure(replace(scheduler.config, **slots))

    engine.observers.append(change)
    decisions.run(engine, seed)
    check_no_leaks(scheduler)


@pytest.mark.parametrize("seed", [3, 7, 9])
def test_a_changed_budget_decides_like_a_scheduler_that_started_with_it(seed: int) -> None:
    """Policies read it too: the headroom depends on the number of steps that a prompt takes."""

    def table(first_budget: int) -> list[Row]:
        driver, rng = Driver("vllm_v1", **sizes, max_num_batched_tokens=first_budget), Random(seed)
        config = replace(driver.scheduler.config, max_num_batched_tokens=16)
        driver.scheduler.reconfigure(config)
        for number in range(12):
            driver.add(str(number), rng.randrange(1, 90), rng.randrange(1, 60))
        return driver.run()

    sizes: dict[str, Any] = {"headroom": "future_peak", "block_size": 4, "num_blocks": 60}
    assert table(8192) == table(16)


@pytest.mark.parametrize("name", ["num_blocks", "max_num_seqs", "block_size"])
def test_sizes_cannot_change(name: str) -> None:
    scheduler = Scheduler(preset(num_blocks=100))
    number = getattr(scheduler.config, name)
    with pytest.raises(ConfigError, match=name):
        scheduler.reconfigure(replace(scheduler.config, **{name: number + 1}))
