"""The laws of the real-model suite, with two ranks as processes, gloo and exact sums.

No setting changes a token: in float32 the tokens are those of transformers, with quantized weights
those of one process. The model is tiny and random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway import LLM, PRESETS, Engine, SamplingParams, Scheduler
from headway.model.precision import why_not_native
from headway.request import RequestParams
from headway.scheduler import preset
from tests.parallel.test_equality import outcome
from tests.support import real

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
SIZES = {
    "block_size": 2, "num_blocks": 32, "num_host_blocks": 60, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "max_model_len": 120,
}  # fmt: skip
LENGTHS = (1, 2, 4, 6, 8, 9, 10, 12)  # too much for the KV cache at once
NUM_TOKENS = 10
# The greedy tokens of transformers, by the length of the prompt; test_real_families.py checks them.
REFERENCE = {
    "1": [210, 144, 61, 122, 145, 77, 2, 115, 131, 85],
    "2": [7, 141, 88, 155, 105, 171, 133, 188, 162, 12],
    "4": [4, 171, 161, 199, 158, 228, 158, 222, 34, 13],
    "6": [251, 132, 219, 105, 158, 1, 203, 79, 161, 206],
    "8": [47, 145, 164, 255, 210, 195, 128, 175, 195, 59],
    "9": [228, 48, 150, 194, 63, 81, 102, 201, 42, 129],
    "10": [79, 246, 144, 252, 228, 146, 206, 43, 119, 43],
    "12": [165, 168, 67, 34, 199, 168, 111, 76, 254, 73],
}


def prompts(seed: int = 1) -> dict[str, list[int]]:
    random = Random(seed)
    return {str(n): [random.randrange(3, 250) for _ in range(n)] for n in LENGTHS}


def write_model(folder: Path) -> Path:
    """A model with one layer, and three key-value heads for two ranks."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    return real.write_tiny(folder, hidden_size=96, num_hidden_layers=1, **heads)


@dataclass
class Pair:
    """The same model on two ranks and in one process, and its greedy tokens."""

    group: LLM
    alone: LLM
    reference: dict[str, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Iterator[Callable[[str], Pair]]:
    """Starts the pair of a quantization once."""
    with ExitStack() as stack:

        @cache
        def start(quantization: str) -> Pair:
            settings: dict[str, Any] = {
                "device": "cpu", "threads": 1, "dtype": "float32", "quantization": quantization,
                **SIZES,
            }  # fmt: skip
            group = stack.enter_context(LLM(str(folder), tensor_parallel_size=2, **settings))
            alone = LLM(str(folder), **settings)
            reference = REFERENCE if quantization == "none" else greedy(run(alone, "headway")[0])
            return Pair(group, alone, reference)

        yield start


@pytest.fixture
def pair(pairs: Callable[[str], Pair], quantization: str) -> Pair:
    return pairs(quantization)


def run(
    llm: LLM, preset_name: str, *, ahead: bool = False, n: int = 1, times: int = 1, **changes: Any
) -> tuple[dict[str, list[list[int]]], real.Seen]:
    """The greedy tokens of all prompts, under one configuration; a list for each sample."""
    config, seen = preset(preset_name, **SIZES, **changes), real.Seen()
    engine = Engine(Scheduler(config), llm.executor, async_scheduling=ahead, observers=[seen])
    params, found = RequestParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=n), {}
    for _ in range(times):
        asked = {name: engine.add(name, each, params) for name, each in prompts().items()}
        engine.run()
        assert engine.fault is None, engine.fault
        assert engine.scheduler.num_free == config.num_blocks
        found = {name: [list(each.output) for each in samples] for name, samples in asked.items()}
    return found, seen


def greedy(found: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    return {name: samples[0] for name, samples in found.items()}


@dataclass(frozen=True)
class Case:
    """A configuration, and what must have happened for its test to be meaningful."""

    settings: dict[str, Any]
    happened: Callable[[real.Seen], bool] = lambda seen: seen.most_decodes > 3
    preset: str = "headway"
    num_samples: int = 1


CASES = {
    **{name: Case({}, preset=name) for name in PRESETS},
    "chunks of 7": Case({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "recompute": Case({"swap": "recompute"}, lambda seen: seen.num_recomputed > 1, "vllm_v1"),
    "swap": Case(
        {"swap": "swap"}, lambda seen: seen.num_swapped > 1 and min(seen.num_copied) > 5, "vllm_v1"
    ),
    "asked twice": Case({"times": 2}, lambda seen: seen.num_full_hits > 1 and seen.num_cached > 20),
    "one step ahead": Case({"ahead": True}),
    "four steps a plan": Case({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 17),
    "four steps a plan, one ahead": Case(
        {"num_scheduler_steps": 4, "ahead": True}, lambda seen: seen.num_steps < 19
    ),
    "three samples": Case({"n": 3}, num_samples=3),
}
# Quantized weights change how a product is computed, and nothing of what a setting changes.
QUANTIZED = ("headway", "static", "chunks of 7", "swap", "one step ahead")


both = pytest.mark.parametrize("quantization", ["none", "int8"])


@pytest.mark.parametrize(
    ("quantization", "name"),
    [*(("none", name) for name in CASES), *(("int8", name) for name in QUANTIZED)],
)
def test_no_setting_changes_a_token(pair: Pair, name: str) -> None:
    case = CASES[name]
    found, seen = run(pair.group, case.preset, **case.settings)
    assert found == {name: [each] * case.num_samples for name, each in pair.reference.items()}
    assert case.happened(seen), seen


@both
def test_sampled_tokens_and_log_probabilities_are_those_of_one_process(pair: Pair) -> None:
    config = preset(**SIZES)
    found = [
        outcome(Engine(Scheduler(config), llm.executor), 5) for llm in (pair.alone, pair.group)
    ]
    assert found[0].tokens == found[1].tokens and found[0].extras == found[1].extras


@both
def test_results_of_the_offline_api_are_equal_bit_for_bit(pair: Pair) -> None:
    """Log probabilities of 20 tokens at every position, of prompts and outputs; embeddings."""
    asked = list(prompts(2).values())
    params = SamplingParams(seed=1, max_tokens=8, logprobs=20, prompt_logprobs=20)
    results = [llm.generate(asked, params) for llm in (pair.group, pair.alone)]
    for one, two in zip(*results, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert one.outputs[0].logprobs == two.outputs[0].logprobs
        assert one.prompt_logprobs == two.prompt_logprobs and one.prompt_logprobs
    vectors = [llm.embed(asked) for llm in (pair.group, pair.alone)]
    for first, second in zip(*vectors, strict=True):
        assert list(first.outputs.embedding) == list(second.outputs.embedding)
