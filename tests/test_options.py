"""Laws of `EngineOptions` and `Settings`: one place for every setting, checked when it is made."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from math import inf, nan
from typing import Any

import pytest

from headway import preset
from headway.cli.options import model, serve, simulation
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


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = "suffix(factor={}, min_probability={}, shared={})"


@pytest.mark.parametrize(
    ("config", "most", "drafter"),
    [
        (NGRAM, 4, "ngram(5, 5)"),
        (json.dumps(NGRAM), 4, "ngram(5, 5)"),
        ({**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 4}, 4, "ngram(2, 4)"),
        ({**NGRAM, "prompt_lookup_min": 2}, 4, "ngram(2, 2)"),
        ({**NGRAM, "prompt_lookup_max": 3, "prompt_lookup_min": None}, 4, "ngram(3, 3)"),
        ({"method": "suffix"}, 24, SUFFIX.format(1.0, 0.1, True)),
        ({"method": "suffix", "num_speculative_tokens": 8}, 8, SUFFIX.format(1.0, 0.1, True)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 6}, 6,
         SUFFIX.format(1.0, 0.1, True)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1 << 20}, 128,
         SUFFIX.format(1.0, 0.1, True)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2,
          "suffix_decoding_min_token_prob": 0.25, "suffix_decoding_max_cached_requests": 0}, 24,
         SUFFIX.format(2.0, 0.25, False)),
    ],
)  # fmt: skip
def test_a_speculative_config_sets_the_slots_draft_and_drafter(
    config: Any, most: int, drafter: str
) -> None:
    changes = EngineOptions(speculative_config=config, max_num_seqs=3).preset_changes()
    slots = {"draft": f"by_cost(most={most})", "drafter": drafter}
    assert changes == {**slots, "max_num_seqs": 3}
    assert preset(**changes) == preset(**slots, max_num_seqs=3)
    assert simulation.SimulationOptions.from_flags(speculative_config=config).changes == slots


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"method": "eagle3", "model": "x"}, "method must be ngram or suffix, not 'eagle3'"),
        ({"model": "x", "num_speculative_tokens": 3}, "ngram or suffix, not None"),
        ({"method": []}, r"ngram or suffix, not \[\]"),
        ({**NGRAM, "model": "x"}, "model is not supported: .* not by a second model"),
        ({**NGRAM, "disable_by_batch_size": 8}, "disable_by_batch_size is not supported: .*costs"),
        ({**NGRAM, "prompt_lookup": 8}, "ngram has no prompt_lookup; known: .*prompt_lookup_max"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 8}, "ngram has no suffix_decoding"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 128|at least 1, not 0"),
        ({"method": "suffix", "num_speculative_tokens": 129}, "at most 128, not 129"),
        ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 4}, r"at most .*max \(4\), not 5"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob .*1.5"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "x"}, "max_spec_factor .*'x'"),
        ("[1]", "must be an object"), ("{", "not valid JSON"), (5, "must be an object"),
    ],
)  # fmt: skip
def test_a_wrong_speculative_config_is_refused_with_what_is_wrong(
    config: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config.*({problem})"):
        EngineOptions(speculative_config=config)
    with pytest.raises(ConfigError, match=f"^speculative_config.*({problem})"):
        simulation.SimulationOptions.from_flags(speculative_config=config)


@pytest.mark.parametrize(("name", "value"), [("draft", "none"), ("drafter", "ngram(2, 4)")])
def test_a_speculative_config_excludes_the_slots_that_it_sets(name: str, value: str) -> None:
    given: dict[str, Any] = {"speculative_config": NGRAM, name: value}
    with pytest.raises(ConfigError, match=f"{name} '.*' exclude each other"):
        EngineOptions(**given)
    with pytest.raises(ConfigError, match=f"{name} '.*' exclude each other"):
        simulation.SimulationOptions.from_flags(**given)


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
