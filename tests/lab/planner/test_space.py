"""Knobs: how values are split, what is refused, and the combinations."""

from __future__ import annotations

import pytest

from headway.errors import ConfigError
from headway.lab.cost import load_profile
from headway.lab.planner.evaluate import make_config
from headway.lab.planner.space import check, default_space, neighbours, parse_knobs, points
from headway.scheduler.policies.presets import PRESETS

PROFILE = load_profile("llama3.1-8b-a100-80gb")


def test_values_are_split_at_commas_outside_parentheses() -> None:
    found = parse_knobs(["headroom=back_off(watermark(0.1),0.2),future_peak", "max_num_seqs=8, 16"])
    assert found == {
        "headroom": ["back_off(watermark(0.1),0.2)", "future_peak"], "max_num_seqs": [8, 16],
    }  # fmt: skip
    assert len(points(found)) == 4


@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ("max_num_seq=1", "max_num_seqs"), ("max_num_seqs", "name=value"), ("chunk=", "name=value"),
        ("max_num_seqs=many", "many"), ("preset=vlm", "vllm"), ("max_num_seqs=8,8", "twice"),
    ],
)  # fmt: skip
def test_a_wrong_knob_is_named_with_what_is_known(knob: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_knobs([knob])


@pytest.mark.parametrize("knob", ["max_num_seqs=0", "chunk=at_mst(5)", "headroom=watermark(2)"])
def test_values_out_of_range_are_refused_before_any_run(knob: str) -> None:
    with pytest.raises(ConfigError, match=knob.partition("=")[0]):
        check(parse_knobs([knob]), {"preset": "headway"}, PROFILE)


def test_too_many_combinations_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="1000000"):
        points({"max_num_seqs": list(range(1000)), "max_num_batched_tokens": list(range(1000))})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_of_the_default_space_is_valid(preset: str) -> None:
    base = {"preset": preset}
    check(default_space(make_config(base, PROFILE)), base, PROFILE)


def test_numbers_change_to_their_neighbours_and_names_to_all_others() -> None:
    assert neighbours([8, 16, 32, 64], 16) == [8, 32]
    assert neighbours([8, 16, 32], 20) == [16, 32]
    assert neighbours([8, 16], 8) == [16]
    assert neighbours(["a", "b", "c"], "b") == ["a", "c"]
