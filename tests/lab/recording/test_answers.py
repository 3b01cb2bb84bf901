"""Recording what policies answer changes no decision, and policies can change in a run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from headway.engine.engine import Engine
from headway.errors import ConfigError
from headway.events import Completed, Event, Planned
from headway.lab.recording.texts import RecordingTexts
from headway.scheduler import Scheduler, preset
from headway.scheduler.policies.presets import PRESETS, SLOTS, describe
from tests.scheduler import decisions
from tests.support.drive import Driver, Row, check_no_leaks


def recording(seed: int) -> Engine:
    """The engine of a recorded run, whose plans have the answers of the policies."""
    engine = decisions.engine_of(seed)
    scheduler = Scheduler(engine.scheduler.config, records_answers=True)
    return Engine(
        scheduler, engine.executor, engine.clock, async_scheduling=engine.async_scheduling
    )


@pytest.mark.parametrize("seed", range(1, decisions.NUM_RUNS, 29))
def test_recording_changes_no_decision_and_finds_what_led_to_it(seed: int) -> None:
    engine, steps = recording(seed), decisions.Steps()
    config = describe(engine.scheduler.config)
    recording_texts = RecordingTexts(config)

    def observe(event: Event) -> None:
        texts = {(d.kind, d.request): d.text for d in recording_texts.follow(event)}
        if isinstance(event, Planned):
            check(event, texts)

    def check(planned: Planned, texts: dict[Any, str]) -> None:
        plan, answers = planned.plan, planned.answers
        assert answers is not None
        for blocked in plan.blocked:
            if blocked.reason in ("headroom", "back_off"):
                headroom = answers.headroom[blocked.request]
                assert 0 < headroom <= blocked.need
                if text := texts.get(("waiting", blocked.request)):
                    assert f"{headroom} by {config['headroom']})" in text
        num_candidates = planned.num_running + len(plan.preempted)
        for preemption in plan.preempted:
            request, text = preemption.request, texts["preempted", preemption.request]
            assert (request in answers.num_candidates) == (preemption.num_due > 0)
            if preemption.num_due:
                number = answers.num_candidates[request]
                assert 1 <= number <= num_candidates
                assert f"chosen by {config['victim']} among {number}" in text
            seconds = answers.swap_seconds.get(request)
            assert (seconds is not None) == str(config["swap"]).startswith("swap_if_cheaper")
            assert seconds is None or not preemption.is_swap or seconds[0] < seconds[1]
            assert ("swapping takes" in text) == bool(seconds and preemption.num_due)

    engine.observers += [steps, observe]
    decisions.run(engine, seed, lambda: steps.settle(engine.scheduler))
    digest = hashlib.sha256("\n".join(steps.lines).encode()).hexdigest()[:20]
    assert digest == decisions.recorded_digests()[seed]


@pytest.mark.parametrize("seed", range(0, decisions.NUM_RUNS, 29))
def test_policies_can_change_in_the_middle(seed: int) -> None:
    """All slots change every few steps; every request still finishes and nothing leaks."""
    engine, rng = decisions.engine_of(seed), Random(seed)
    scheduler = engine.scheduler

    def change(event: Event) -> None:
        if isinstance(event, Completed) and rng.random() < 0.2:
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
