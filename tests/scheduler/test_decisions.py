"""A change of the code does not change a scheduling decision, unless decisions.json says so."""

from __future__ import annotations

import json

import pytest

from headway.scheduler import PRESETS
from tests.scheduler.decisions import NAMES, NUM_RUNS, changed_runs, decisions_of, recorded_digests

SAMPLE = range(0, NUM_RUNS, 12)  # 24 runs; 12 and the number of presets have no common factor


@pytest.mark.parametrize("start", range(4))
def test_decisions_are_the_recorded_ones(start: int) -> None:
    assert not list(changed_runs(SAMPLE[start::4]))


def test_the_sample_covers_every_preset() -> None:
    assert {NAMES[seed % len(NAMES)] for seed in SAMPLE} == set(PRESETS)
    assert list(recorded_digests()) == list(range(NUM_RUNS))


def test_a_run_contains_what_its_digest_is_for() -> None:
    """Otherwise a change could not show."""
    steps = [json.loads(line) for seed in (10, 52) for line in decisions_of(seed)]
    fields = ("chunks", "preempted", "blocked", "not_considered", "copies_in", "finished")
    assert [field for field in fields if not any(step[field] for step in steps)] == []
