"""Laws of `EngineOptions` and `Settings`: one place for every setting, checked when it is made."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from math import inf, nan
from typing import Any

import pytest

from headway.cli.options import model, serve
from headway.errors import ConfigError
from headway.options import EngineOptions
from headway.scheduler.policies.presets import NUMBERS, SLOTS
from headway.server.settings import Settings

NO_FLAG = {"enforce_eager", "seed", "trust_remote_code"}  # vLLM's arguments of LLM


def test_every_option_has_a_flag_and_every_flag_an_option() -> None:
    names = {field.name for field in fields(EngineOptions)}
    assert set(model.FLAGS) == names - NO_FLAG - {"chat_template"}
    assert all("option" in field.metadata for field in fields(serve.ServeOptions))


def test_the_changes_of_a_preset_are_the_settings_of_the_scheduler_that_are_given() -> None:
    assert EngineOptions(preset="vllm", device="cpu", seed=3).preset_changes() == {}
    names = [*SLOTS, *NUMBERS]
    given = replace(EngineOptions(), **{name: place for place, name in enumerate(names)})  # type: ignore[arg-type]
    assert list(given.preset_changes()) == names


def test_options_are_sent_to_other_processes_as_they_are() -> None:
    options = EngineOptions(model="m", queue="fair(3)", kv_memory="1GiB", num_blocks=9)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("name", "wrong", "limit"),
    [
        ("tensor_parallel_size", 0, "at least 1"), ("threads", 0, "at least 1"),
        ("threads", 1025, "at most 1024"), ("threads", True, "whole number"),
        ("gpu_memory_utilization", 0, "above 0"), ("gpu_memory_utilization", "1", "above 0"),
        ("tensor_parallel_sums", "slow", "exact"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_with_its_name_value_and_limit(
    name: str, wrong: Any, limit: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} .*{limit}.*{wrong}"):
        EngineOptions(**{name: wrong})


@pytest.mark.parametrize(
    "name",
    ["request_timeout", "body_timeout", "stall_timeout", "head_timeout", "keep_alive_timeout"],
)
@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf, "1"])
def test_a_timeout_is_above_0_and_finite(name: str, seconds: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a number above 0, not"):
        Settings(**{name: seconds})


@pytest.mark.parametrize("name", ["max_connections", "max_body_bytes", "max_choices"])
def test_a_limit_is_at_least_1(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be .*at least 1, not 0"):
        Settings(**{name: 0})


def test_only_optional_settings_may_be_none() -> None:
    assert Settings(request_timeout=None, max_connections=None).watchdog == 30
    with pytest.raises(ConfigError, match="stall_timeout"):
        Settings(stall_timeout=None)  # type: ignore[arg-type]
