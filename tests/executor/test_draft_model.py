"""A model that drafts for another one: texts stay the same bits, and its cache has all tokens.

The worlds are those of test_drafts.py. If the model drafts for itself, every draft of a greedy
request is right, as long as both caches have the same tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, Engine, SamplingParams, Scheduler, preset
from headway.drafters.model import model
from headway.errors import ConfigError
from headway.executor.cpu import CpuExecutor
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.request import RequestParams
from headway.sampling_params import Sampling
from headway.scheduler.policies.swap import swap
from tests.executor.test_drafts import (
    VOCABULARY,
    Loud,
    Make,
    check_world,
    outputs_of,
    random_config,
    tiny,
)
from tests.support.real import write_tiny

NUM_WORLDS = 70
DRAFTER = model("small")


def large() -> ModelConfig:
    """The tiny model with a head of its own: its choices depend more on the tokens before."""
    return replace(tiny(), tie_embeddings=False)


def small() -> ModelConfig:
    """Another shape in all that may differ."""
    return replace(tiny(), hidden_size=16, intermediate_size=32, num_layers=2, num_kv_heads=2)


def greedy_requests(rng: random.Random) -> list[tuple[str, list[int], RequestParams]]:
    """Some share a prefix, some are forked."""
    shared = [rng.randrange(VOCABULARY) for _ in range(9)]
    found = []
    for number in range(rng.randrange(3, 9)):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 8))]
        params = RequestParams(
            max_tokens=rng.randrange(1, 18),
            n=rng.choice((1, 1, 2)),
            sampling=Sampling(temperature=0.0),
        )
        found.append((str(number), rng.choice(([], shared)) + own, params))
    return found


def run_itself(seed: int, make: Make, seen: Counter[str]) -> None:
    """Greedy requests in a random world; in every second one with few blocks, and swapping."""
    rng = random.Random(seed)
    config = random_config(rng, rng.choice(("fixed(1)", "fixed(3)", "fixed(7)")), DRAFTER)
    if seed % 2:
        num_blocks = 36 // config.block_size + 1
        config = replace(config, swap=swap, num_blocks=num_blocks, num_host_blocks=32)
    outputs_of(make, config, greedy_requests(rng), {}, 0, seen)


def cpu_makers() -> tuple[Make, Make]:
    """Executors with a small draft model, and with the model itself as the draft model."""
    own, again, other = (
        Decoder(Loud(about), NativeBackend()) for about in (large(), large(), small())
    )
    return (
        partial(CpuExecutor, own, draft_decoder=other),
        partial(CpuExecutor, own, draft_decoder=again),
    )


def test_cpu_texts_and_logprobs_do_not_depend_on_the_draft_model() -> None:
    seen = Counter[str]()
    makers = cpu_makers()
    for seed in range(NUM_WORLDS):
        check_world(seed, makers[seed % 2], seen, only=DRAFTER)
    assert min(seen["right"], seen["wrong"], seen["preempted"]) > 30, seen


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    """So its cache is right after prefix hits, chunks, preemptions and swaps."""
    _, make = cpu_makers()
    seen = Counter[str]()
    for seed in range(NUM_WORLDS):
        run_itself(seed, make, seen)
    assert seen["wrong"] == 0 and min(seen["right"], seen["preempted"]) > 60, seen
    assert min(seen["swapped"], seen["hits"]) > 15, seen


@pytest.mark.usefixtures("small_padding")
def test_gpu_drafts_of_the_model_itself_are_right_and_its_texts_those_of_a_cpu() -> None:
    """One request is swapped out, and drafts again when it has returned."""
    pytest.importorskip("triton")
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.backends.gpu import GpuBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    own, again = (Decoder(Loud(large()), GpuBackend(torch.float32, device)) for _ in "ab")
    config = preset(
        "vllm_v1", draft="fixed(2)", drafter=DRAFTER, block_size=2, num_blocks=4,
        max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, num_host_blocks=4, swap=swap,
    )  # fmt: skip
    params = RequestParams(max_tokens=5, sampling=Sampling(temperature=0.0))
    requests = [("0", [12, 25], params), ("1", [20, 22, 23, 25], params)]
    seen = Counter[str]()
    found, _ = outputs_of(
        partial(GpuExecutor, own, draft_decoder=again), config, requests, {}, 0, seen
    )
    plain = partial(CpuExecutor, Decoder(Loud(large()), PlainBackend()))
    roomy = replace(config, draft=None, num_blocks=16)
    expected, _ = outputs_of(plain, roomy, requests, {}, 0, Counter())
    assert found == expected
    assert seen["right"] >= 4 and seen["swapped"] and not seen["wrong"], seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="slow without a GPU")
@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_gpu_texts_do_not_depend_on_the_draft_model(async_scheduling: int) -> None:
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.backends.deterministic import DeterministicBackend

    own, again, other = (
        Decoder(Loud(about), DeterministicBackend(torch.float32, "cuda"))
        for about in (large(), large(), small())
    )
    seen, greedy = Counter[str](), Counter[str]()
    makers = [partial(GpuExecutor, own, draft_decoder=each) for each in (other, again)]
    for seed in range(40):
        check_world(seed, makers[seed % 2], seen, async_scheduling, only=DRAFTER)
        run_itself(seed, makers[1], greedy)
    assert seen["right"] and seen["wrong"], seen
    assert greedy["right"] and not greedy["wrong"], greedy


def write(folder: Path, **numbers: Any) -> str:
    folder.mkdir()
    return str(write_tiny(folder, **numbers))


def test_an_llm_drafts_with_another_model_and_writes_the_same_texts(tmp_path: Path) -> None:
    one = write(tmp_path / "one")
    other = write(
        tmp_path / "other", hidden_size=32, num_hidden_layers=1, max_position_embeddings=48
    )
    prompts = ["The harbour master", "for item in", "Marta"]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_memory": "1MiB"}
    found = {}
    for path in (None, one, other):
        drafts: dict[str, Any] = (
            {} if path is None else {"draft": "fixed(3)", "drafter": f"model({path!r})"}
        )
        with LLM(one, **options, **drafts) as llm:
            outputs = llm.generate(prompts, params)
            found[path] = [output.outputs[0].token_ids for output in outputs]
            shares = [each.num_accepted / max(1, each.num_drafted) for each in outputs]
            assert min(shares) == (path == one), "drafts of the model itself are right"
            per_token = llm.loaded.kv_bytes // (llm.config.num_blocks * llm.config.block_size)
            assert per_token == {None: 1024, one: 2048, other: 1024 + 512}[path]
            assert llm.loaded.kv_bytes <= 1 << 20
    assert found[None] == found[one] == found[other]


def test_a_draft_model_needs_as_many_tokens_full_attention_and_one_rank(tmp_path: Path) -> None:
    one = write(tmp_path / "one")
    narrow = write(tmp_path / "narrow", vocab_size=200)
    kinds = ["sliding_attention", "full_attention"]
    windowed = write(
        tmp_path / "windowed", architectures=["Qwen2ForCausalLM"], model_type="qwen2",
        layer_types=kinds, sliding_window=16, use_sliding_window=True,
    )  # fmt: skip
    drafts: dict[str, Any] = {"draft": "by_cost", "device": "cpu"}
    size = open_checkpoint(Path(one)).config.vocab_size
    with pytest.raises(ConfigError, match=f"narrow has a vocabulary of 200 tokens.*{size}"):
        LLM(one, **drafts, drafter=model(narrow))
    with pytest.raises(ConfigError, match="windowed has layers with a sliding window"):
        LLM(one, **drafts, drafter=model(windowed))
    with pytest.raises(ConfigError, match="one rank, not tensor_parallel_size 2"):
        LLM(one, **drafts, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="path is missing"):
        LLM(one, **drafts, drafter="model")


def test_a_plan_with_unknown_drafts_fails_without_a_draft_model() -> None:
    config = preset("vllm_v1", draft="fixed(2)", drafter=DRAFTER, num_blocks=8, max_model_len=32)
    engine = Engine(Scheduler(config), CpuExecutor(Decoder(Loud(tiny()), NativeBackend()), config))
    (request,) = engine.add("0", [1, 2], RequestParams(max_tokens=8))
    engine.run()
    assert request.finish_reason == "error" and "drafter `model`" in str(request.error)


def test_gpu_memory_is_divided_among_the_blocks_of_both_models() -> None:
    pytest.importorskip("triton")
    from headway.executor.gpu.memory import DRIVER_BYTES, Budget, both, num_blocks_in

    reserve = DRIVER_BYTES + 50
    one = Budget(total=10**10, weights=1000, others=300, step=40, reserve=reserve, block=7)
    draft = Budget(total=10**10, weights=100, others=1200, step=90, reserve=reserve, block=3)
    used = 1000 + 100 + 200 + 90 + DRIVER_BYTES + 100
    assert num_blocks_in(both(one, draft), 0.5) == (5 * 10**9 - used) // 10
