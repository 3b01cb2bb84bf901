"""A group of ranks computes what one rank does: bit for bit with exact sums on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import PRESETS, Engine, Request, Scheduler, preset
from headway.engine.input_processor import embedding_params
from headway.events import Completed, Event
from headway.executor.cpu import CpuExecutor
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.model.backends.base import Backend
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.precision import why_not_native
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.model.test_batch_invariance import ScaledCheckpoint
from tests.support import real
from tests.support.rank_threads import ThreadExecutor, ThreadRanks

native_only = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
VOCABULARY = 131


def tiny(kind: str = "Llama", **more: object) -> ModelConfig:
    numbers = {
        "architectures": [f"{kind}ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return from_hf(numbers | more, "tiny")


MODELS = {
    "llama": tiny(),
    "qwen2, separate head": tiny("Qwen2", tie_word_embeddings=False),
    "qwen3": tiny("Qwen3"),
    "all biases": tiny(attention_bias=True, mlp_bias=True),
    "one key-value head": tiny(num_key_value_heads=1),
    "uneven heads": tiny(num_attention_heads=9, num_key_value_heads=3, hidden_size=96),
}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "float32": NativeBackend,
    "int8": lambda: NativeBackend(is_quantized=True),
    "4 bits": lambda: NativeBackend(is_quantized=True),
    "int8 KV cache": lambda: NativeBackend(kv_dtype=torch.int8),
}


def weights(config: ModelConfig, kind: str) -> Callable[[], ScaledCheckpoint]:
    return lambda: ScaledCheckpoint(config, has_groups=kind == "4 bits")


def logits_of(decoder: Decoder) -> Tensor:
    """Logits of all positions of two sequences."""
    tokens = [list(range(3, 40)), list(range(90, 7, -5))]
    batch = real.batch_of([(tokens[0], 0, range(10)), (tokens[1], 0, range(10, 20))], 4)
    blocks = real.blocks_for(decoder, 80, 4)
    return decoder.logits(decoder.forward(batch, blocks))


@native_only
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_with_exact_sums_equal_one_rank_bit_for_bit(name: str, kind: str) -> None:
    config, size = MODELS[name], 3 if name == "uneven heads" and kind == "int8" else 2
    with torch.inference_mode():
        alone = logits_of(Decoder(weights(config, kind)(), BACKENDS[kind]()))
    ranks = ThreadRanks(size, weights(config, kind), lambda _: BACKENDS[kind]())
    for found in ranks.run(lambda rank: logits_of(ranks.decoders[rank])):
        assert torch.equal(found, alone)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_exact", [False, True])
def test_logits_are_close_to_one_rank_whatever_the_sums(name: str, is_exact: bool) -> None:
    config = MODELS[name]
    with torch.inference_mode():
        alone = logits_of(Decoder(weights(config, "")(), PlainBackend()))
    ranks = ThreadRanks(2, weights(config, ""), lambda _: PlainBackend(), is_exact=is_exact)
    for found in ranks.run(lambda rank: logits_of(ranks.decoders[rank])):
        torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)
    per_layer = {"gather": 4, "sum": 0} if is_exact else {"gather": 0, "sum": 2}
    for group in ranks.groups:  # and the embedding is one sum, the logits one gather
        calls = {"gather": 2 * per_layer["gather"] + 1, "sum": 2 * per_layer["sum"] + 1}
        assert group.calls == calls | {"broadcast": 0}


def test_each_rank_has_its_share_of_weights_and_cache() -> None:
    config = replace(MODELS["llama"], vocab_size=128, intermediate_size=128)
    alone = Decoder(weights(config, "")(), PlainBackend())
    for is_exact in (False, True):
        ranks = ThreadRanks(2, weights(config, ""), lambda _: PlainBackend(), is_exact=is_exact)
        for decoder in ranks.decoders:
            assert decoder.num_bytes == pytest.approx(alone.num_bytes / 2, rel=0.1)
            blocks = decoder.backend.kv_blocks(decoder.config, 4, 8)
            assert 2 * blocks.nbytes == alone.backend.kv_blocks(config, 4, 8).nbytes


@dataclass
class Outcome:
    """What a run generated, and what happened in it."""

    tokens: list[list[int]]
    extras: list[Any]
    seen: real.Seen


SAMPLINGS = [
    None,
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=1.2, top_k=7, top_p=0.9, seed=1, logprobs=2),
    Sampling(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, prompt_logprobs=1),
    Sampling(temperature=0.7, seed=3, bad_words=((5,), (6, 7)), logit_bias={9: 2.0}),
]


@dataclass
class Extras:
    """Keeps all extra outputs of a run, in a form that can be compared."""

    found: list[Any] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        extra = event.result.extra if isinstance(event, Completed) else None
        if isinstance(extra, ExtraOutputs):
            named = {request.id: scores for request, scores in extra.logprobs.items()}
            prompts = {request.id: scores for request, scores in extra.prompt.items()}
            vectors = {request.id: each.tolist() for request, each in extra.embeddings.items()}
            self.found.append((named, prompts, vectors))


def outcome(engine: Engine, num_requests: int = 9) -> Outcome:
    """Requests of several kinds, the later half of them with the first half's prompts."""
    seen, extras = real.Seen(), Extras()
    engine.observers += (seen, extras)
    requests: list[Request] = []
    for number in range(num_requests):
        own = number % 5
        prompt = [(7 * place + 11 * own) % VOCABULARY for place in range(12 + 5 * own)]
        params = RequestParams(
            max_tokens=10, min_tokens=4 if own == 1 else 0, sampling=SAMPLINGS[own],
            n=2 if own == 2 else 1, stop_ids=frozenset({50}),
        )  # fmt: skip
        # Given arrivals: queue rules read them, and one engine is slower than the other.
        requests += engine.add(f"r{number}", prompt, params, arrival=number / 100)
        if number % 4 == 3:
            for _ in range(3):
                engine.step()
    requests += engine.add("vector", range(20), embedding_params("mean"), arrival=1.0)
    engine.run()
    assert engine.fault is None, engine.fault
    return Outcome([list(request.output) for request in requests], extras.found, seen)


CRAMPED = {"block_size": 2, "num_blocks": 44, "victim": "least_work", "preset": "vllm_v1"}
CASES: dict[str, tuple[dict[str, Any], Callable[[real.Seen], bool]]] = {
    **{name: ({"preset": name}, lambda seen: seen.num_cached > 20) for name in PRESETS},
    "chunks of 7": ({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "recompute": ({**CRAMPED, "swap": "recompute"}, lambda seen: seen.num_recomputed > 3),
    "swap": (
        {**CRAMPED, "swap": "swap", "num_host_blocks": 200},
        lambda seen: seen.num_swapped > 3 and min(seen.num_copied) > 3,
    ),
    "one step ahead": ({"async_scheduling": True}, lambda seen: seen.num_cached > 20),
    "four steps a plan": ({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 30),
}  # fmt: skip


@cache
def tiny_ranks(kind: str) -> ThreadRanks:
    return ThreadRanks(2, weights(MODELS["qwen3"], kind), lambda _: BACKENDS[kind]())


@cache
def tiny_alone(kind: str) -> Decoder:
    return Decoder(weights(MODELS["qwen3"], kind)(), BACKENDS[kind]())


@native_only
@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token_or_a_log_probability(name: str) -> None:
    settings, happened = CASES[name]
    settings = {"block_size": 4, "num_blocks": 300, "max_num_seqs": 6} | settings
    ahead = settings.pop("async_scheduling", False)
    limits = {"max_model_len": 120, "max_num_batched_tokens": 48}
    config = preset(settings.pop("preset", "headway"), **limits, **settings)
    kind = "int8" if name in ("swap", "chunks of 7") else "float32"
    alone = CpuExecutor(tiny_alone(kind), config)
    divided = ThreadExecutor(tiny_ranks(kind), config, CpuExecutor)
    found = [
        outcome(Engine(Scheduler(config), executor, async_scheduling=ahead))
        for executor in (alone, divided)
    ]
    assert found[0].tokens == found[1].tokens and found[0].extras == found[1].extras
    assert happened(found[1].seen), found[1].seen
    assert len(found[0].extras) > 3, "log probabilities were compared"


def test_sampling_on_rank_0_decides_for_all_ranks() -> None:
    """The other ranks get tokens, not logits: their rows advance with rank 0's tokens."""
    config = preset(num_blocks=40, block_size=4, max_num_seqs=2, max_model_len=64)
    ranks = ThreadRanks(2, weights(MODELS["llama"], ""), lambda _: PlainBackend())
    executor = ThreadExecutor(ranks, config, CpuExecutor)
    engine = Engine(Scheduler(config), executor)
    (request,) = engine.add("r", [1, 2, 3], RequestParams(
        max_tokens=5, sampling=Sampling(temperature=1.0, seed=2, allowed_tokens=frozenset({4, 9})),
    ))  # fmt: skip
    engine.run()
    assert set(request.output) <= {4, 9}
    first, second = (each.rows for each in executor.executors)  # type: ignore[attr-defined]
    assert (first.last == second.last).all() and (first.tables == second.tables).all()
    assert (first.lengths == second.lengths).all() and first.lengths[0] > 5


def test_a_plan_with_unusable_sampling_is_refused_before_other_ranks_see_it() -> None:
    config = preset(num_blocks=40, block_size=4, max_num_seqs=2, max_model_len=64)
    ranks = ThreadRanks(2, weights(MODELS["llama"], ""), lambda _: PlainBackend())
    engine = Engine(Scheduler(config), ThreadExecutor(ranks, config, CpuExecutor))
    engine.add("wrong", [1, 2, 3], RequestParams(sampling="hot"))
    engine.run()
    assert "must be a Sampling" in str(engine.fault)
    (right,) = engine.add("right", [1, 2, 3], RequestParams(max_tokens=3))
    engine.run()
    assert engine.fault is None and len(right.output) == 3
