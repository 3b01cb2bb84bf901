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

from headway import (
    LLM,
    PRESETS,
    Engine,
    RequestOutput,
    SamplingParams,
    Scheduler,
    VirtualClock,
    preset,
)
from headway.model.precision import why_not_native
from headway.record.lines import CompletedLine, PlannedLine
from headway.record.reader import read_journal
from headway.record.replay import check_replay
from headway.record.writer import JournalWriter, header, open_journal
from headway.request import RequestParams
from tests.parallel.test_equality import outcome
from tests.support import real
from tests.support.journals import of_kind
from tests.support.scenarios import random_slots

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
def pairs(folder: Path, patient_watch: None, forked_ranks: None) -> Iterator[Callable[[str], Pair]]:
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
    """The greedy tokens of all prompts, under one configuration; a list for each sample.

    Time stands still: a slow machine does not change the order of requests. The LLM forgets its
    cached prefixes, whose blocks this engine uses.
    """
    assert llm.reset_cache()
    config, seen = preset(preset_name, **{**SIZES, **changes}), real.Seen()
    engine = Engine(
        Scheduler(config), llm.executor, VirtualClock(), async_scheduling=ahead, observers=[seen]
    )
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
    assert pair.alone.reset_cache() and pair.group.reset_cache()
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


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("quantization", ["none"])
def test_random_policies_change_no_token(pair: Pair, seed: int) -> None:
    """Policies that decide at random, with any batching, few blocks, and plans in flight."""
    random = Random(seed)
    settings: dict[str, Any] = {
        **random_slots(random), "num_scheduler_steps": random.choice((1, 1, 3)),
        "num_blocks": random.choice((12, 20, 32)), "max_num_seqs": random.choice((2, 6)),
        "num_host_blocks": random.choice((0, 10, 60)), "max_model_len": 24,
        "chunk": random.choice(("split_any", "at_most(5)")),  # others may refuse a prompt
    }  # fmt: skip
    found, _ = run(pair.group, "headway", ahead=random.random() < 0.5, **settings)
    assert greedy(found) == pair.reference


@pytest.mark.parametrize("quantization", ["none"])
def test_a_recorded_run_replays_with_the_same_decisions(pair: Pair, tmp_path: Path) -> None:
    path, config = tmp_path / "trace.jsonl", preset("vllm_v1", **SIZES, swap="swap")
    with open_journal(path) as file:
        assert pair.group.reset_cache()
        engine = Engine(
            Scheduler(config), pair.group.executor, async_scheduling=True,
            observers=[JournalWriter(file, header(config, True))],
        )  # fmt: skip
        for name, prompt in prompts().items():
            engine.add(name, prompt, RequestParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        for _ in range(6):
            engine.step()
        engine.abort("12")
        engine.run()
    journal = list(read_journal(path))
    assert any(line.preempted for line in of_kind(PlannedLine, journal))
    assert check_replay(journal) == len(of_kind(CompletedLine, journal)) > 10


KINDS: list[dict[str, Any]] = [
    {"temperature": 0}, {"n": 3}, {"top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 9},
    {"top_k": 5, "presence_penalty": 0.5, "min_p": 0.01}, {"bad_words": ["e"]},
    {"structured_outputs": {"regex": "[a-c]{4,9}"}}, {"structured_outputs": {"choice": ["on", "off"]}},
]  # fmt: skip
TEXTS = [
    "Marta",
    "The harbour master",
    "1. Item number",
    "crème brûlée",
    "🎉",
    "two suitcases",
    "北",
]


@both
def test_texts_of_all_kinds_of_requests_equal_those_of_one_process(pair: Pair) -> None:
    """Alone and in a batch, as streams, with stop strings, and continued from the cache."""
    asked = [
        SamplingParams(**{"seed": seed, "max_tokens": 16, **kind}) for seed, kind in enumerate(KINDS)
    ]  # fmt: skip
    whole = outcomes(pair.alone.generate(TEXTS, asked))
    assert outcomes(pair.group.generate(TEXTS, asked)) == whole
    alone = [pair.group.generate([text], each)[0] for text, each in zip(TEXTS, asked, strict=True)]
    assert outcomes(alone) == whole
    turns = [text + said for text, (said, *_) in zip(TEXTS, whole, strict=False)]
    stops = [
        SamplingParams(seed=5, max_tokens=16, stop=[first.text[3:5]])
        for each in pair.alone.generate(turns, SamplingParams(seed=5, max_tokens=16))
        for first in each.outputs
    ]
    results = [outcomes(llm.generate(turns, stops)) for llm in (pair.alone, pair.group)]
    assert results[0] == results[1] and {reason for *_, reason in results[0]} == {"stop"}


def outcomes(results: list[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    return [
        (sample.text, sample.token_ids, sample.finish_reason)
        for result in results
        for sample in result.outputs
    ]


@pytest.mark.parametrize("quantization", ["none"])
def test_a_stream_adds_up_and_leaving_it_early_frees_everything(pair: Pair) -> None:
    llm = pair.group
    params = [SamplingParams(seed=seed, max_tokens=16) for seed in range(len(TEXTS))]
    whole, texts = outcomes(llm.generate(TEXTS, params)), dict[int, str]()
    for delta in llm.stream(TEXTS, params):
        texts[delta.choice] = texts.get(delta.choice, "") + delta.text
    assert [text for _, text in sorted(texts.items())] == [text for text, *_ in whole]
    stream = llm.stream(TEXTS, params)
    for _ in range(5):
        next(stream)
    assert llm.engine.scheduler.requests
    stream.close()  # type: ignore[attr-defined]
    scheduler = llm.engine.scheduler
    assert not scheduler.requests and scheduler.num_free == scheduler.config.num_blocks
    assert outcomes(llm.generate(TEXTS, params)) == whole
