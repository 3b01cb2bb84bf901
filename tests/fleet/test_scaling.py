"""How many replicas a load needs, and what happens if Ray cannot place them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headway.on_ray.scaling import (
    PLACE_SECONDS,
    RETRY_SECONDS,
    ScalingLoad,
    placed,
    replicas_needed,
)


def load(waiting: float = 0.0, free: float = 100.0) -> ScalingLoad:
    return ScalingLoad(waiting, 1000.0, free, 100.0)


@pytest.mark.parametrize(
    ("loads", "needed"),
    [
        ([load(8_000)], 1),
        ([load(8_001)], 2),
        ([load(80_000)], 10),
        ([load(80_000), load()], 10),
        ([load(1, free=5)], 2),
        ([load(free=5), load(free=5)], 2),
        ([load(), load(), load()], 2),
        ([load(10), load(10)], 2),
    ],
)
def test_as_many_replicas_as_the_waiting_tokens_need(loads: list[ScalingLoad], needed: int) -> None:
    assert replicas_needed(loads) == needed


def test_a_replica_without_a_place_is_given_up_and_asked_for_again_later() -> None:
    """3 are needed, and only 2 find a place."""
    state: dict[str, float] = {}
    target, found = 3, []
    for now in range(int(2 * PLACE_SECONDS + RETRY_SECONDS) + 4):
        target, state = placed(3, target, 2, state, float(now))
        found.append(target)
    given_up = int(PLACE_SECONDS)
    retry = given_up + int(RETRY_SECONDS)
    assert found[:given_up] == [3] * given_up
    assert found[given_up:retry] == [2] * int(RETRY_SECONDS)
    assert found[retry : retry + given_up] == [3] * given_up
    assert found[retry + given_up + 1] == 2


def test_a_replica_that_starts_for_long_is_not_given_up() -> None:
    state: dict[str, float] = {}
    for now in range(1000):
        assert (placed(3, 3, 3, state, float(now)))[0] == 3


def test_scaling_goes_on_while_one_replica_has_no_place() -> None:
    """Serve's policy with 2 running replicas of 3, whose load needs 3, and then falls."""
    scale = pytest.importorskip("headway.on_ray.serve").scale
    metrics = {name: {"a": value, "b": value} for name, value in load(9_000)._asdict().items()}
    context = SimpleNamespace(
        aggregated_metrics=metrics, running_replicas=["a", "b"], target_num_replicas=3,
        policy_state={}, current_time=0.0,
    )  # fmt: skip
    target, context.policy_state = scale(context)
    assert target == 3
    metrics["waiting_tokens"] = {"a": 20_000.0, "b": 20_000.0}
    assert scale(context)[0] == 5, "it grows by what is needed, at once"
    context.current_time = PLACE_SECONDS
    assert scale(context)[0] == 2
    metrics["num_starting"] = {"a": 1.0, "b": 1.0}
    assert scale(context)[0] == 5, "it has a place"
    metrics["waiting_tokens"] = {"a": 0.0, "b": 0.0}
    assert scale(context)[0] == 1
    del metrics["waiting_tokens"]["b"]
    assert scale(context)[0] == 3, "an unknown load changes nothing"
