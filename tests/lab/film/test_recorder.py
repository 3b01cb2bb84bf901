"""Recording policies changes no decision, and policies can change in the middle of a run."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace

import pytest

from headway.errors import ConfigError
from headway.lab.film.recorder import PolicyRecorder
from headway.plan import Plan, StepReport
from headway.scheduler import Scheduler, preset
from headway.scheduler.presets import PRESETS, SLOTS
from tests.scheduler import decisions
from tests.support.drive import check_no_leaks


@pytest.mark.parametrize("seed", range(1, decisions.NUM_RUNS, 19))
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
    engine, rng = decisions.engine_of(seed), random.Random(seed)
    scheduler = engine.scheduler

    def change(report: StepReport) -> None:
        if rng.random() < 0.2:
            other = preset(rng.choice(list(PRESETS)))
            slots = {slot: getattr(other, slot) for slot in SLOTS if slot != "chunk"}
            scheduler.reconfigure(replace(scheduler.config, **slots))

    engine.observers.append(change)
    decisions.run(engine, seed)
    check_no_leaks(scheduler)


@pytest.mark.parametrize("name", ["num_blocks", "max_num_seqs", "block_size"])
def test_sizes_cannot_change(name: str) -> None:
    scheduler = Scheduler(preset(num_blocks=100))
    number = getattr(scheduler.config, name)
    with pytest.raises(ConfigError, match=name):
        scheduler.reconfigure(replace(scheduler.config, **{name: number + 1}))
