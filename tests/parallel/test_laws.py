"""The laws of the real-model suite, with two ranks as processes, gloo and exact sums.

No setting changes a token: in float32 the tokens are those of transformers, with quantized weights
those of one process. The model is tiny and random, with three key-value heads for two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from headway import LLM, PRESETS, Engine, SamplingParams, Scheduler
from headway.model.precision import why_not_native
from headway.request import RequestParams
from headway.scheduler import preset
from tests.parallel.test_equality import outcome
from tests.support import real

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
SIZES = {
    "block_size": 4, "num_blocks": 40, "num_host_blocks": 60, "max_num_seqs": 6,
    "max_num_batched_tokens": 64, "max_model_len": 120,
}  # fmt: skip
NUM_TOKENS = 12
LENGTHS = (1, 4, 11, 28, 32, 34, 37, 40, 41)  # too much for the KV cache at once


def prompts(seed: int = 1) -> dict[str, list[int]]:
    random = Random(seed)
    return {str(n): [random.randrange(3, 250) for _ in range(n)] for n in LENGTHS}


@dataclass
class Pair:
    """The same model on two ranks and in one process, and its greedy tokens."""

    group: LLM
    alone: LLM
    reference: dict[str, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    return real.write_tiny(tmp_path_factory.mktemp("tiny"), **numbers)


@pytest.fixture(scope="module", params=["none", "int8"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    settings: dict[str, Any] = {
        "device": "cpu", "threads": 1, "dtype": "float32", "quantization": request.param, **SIZES,
    }  # fmt: skip
    with LLM(str(folder), tensor_parallel_size=2, **settings) as group:
        alone = LLM(str(folder), **settings)
        found, _ = run(alone, "headway")
        reference = {name: samples[0] for name, samples in found.items()}
        if request.param == "none":
            check_against_transformers(folder, reference)
        yield Pair(group, alone, reference)


def check_against_transformers(folder: Path, reference: dict[str, list[int]]) -> None:
    """By induction: at every position, the token is the most probable one after those before."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = [(prompt, reference[name]) for name, prompt in prompts().items()]
    for (_, output), logits in zip(parts, real.batched_logits(model, parts), strict=True):
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > real.TIE, "a tie: use another seed"
        assert logits.argmax(-1).tolist() == output and len(output) == NUM_TOKENS


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


@dataclass(frozen=True)
class Case:
    """A configuration, and what must have happened for its test to be meaningful."""

    settings: dict[str, Any]
    happened: Callable[[real.Seen], bool] = lambda seen: seen.most_decodes > 3
    preset: str = "headway"
    num_samples: int = field(default=1)


CASES = {
    **{name: Case({}, preset=name) for name in PRESETS},
    "chunks of 7": Case({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "recompute": Case({"swap": "recompute"}, lambda seen: seen.num_recomputed > 3, "vllm_v1"),
    "swap": Case(
        {"swap": "swap"}, lambda seen: seen.num_swapped > 3 and min(seen.num_copied) > 9, "vllm_v1"
    ),
    "asked twice": Case({"times": 2}, lambda seen: seen.num_full_hits > 1 and seen.num_cached > 50),
    "one step ahead": Case({"ahead": True}),
    "four steps a plan": Case({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 25),
    "four steps a plan, one ahead": Case(
        {"num_scheduler_steps": 4, "ahead": True}, lambda seen: seen.num_steps < 25
    ),
    "three samples": Case({"n": 3}, num_samples=3),
}


@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token(name: str, pair: Pair) -> None:
    case = CASES[name]
    found, seen = run(pair.group, case.preset, **case.settings)
    assert found == {name: [each] * case.num_samples for name, each in pair.reference.items()}
    assert case.happened(seen), seen


def test_sampled_tokens_and_log_probabilities_are_those_of_one_process(pair: Pair) -> None:
    config = preset(**SIZES)
    found = [
        outcome(Engine(Scheduler(config), llm.executor), 5) for llm in (pair.alone, pair.group)
    ]
    assert found[0].tokens == found[1].tokens and found[0].extras == found[1].extras


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
