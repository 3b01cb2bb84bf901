"""Texts and logprobs are the same bits whatever is drafted, whatever the schedule.

Every world has random requests and a random config. First each request runs without drafts, then all
run in the world, with a drafter that knows their outputs and lies at random, or with one for users.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headway import Config, Scheduler, preset
from headway.config import Drafter
from headway.drafters.ngram import ngram
from headway.drafters.suffix import suffix
from headway.engine.engine import Engine
from headway.events import Completed, Event
from headway.executor.base import Executor
from headway.executor.cpu import CpuExecutor
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.model.backends.native.backend import NativeBackend
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.request import Request, RequestParams
from headway.sampling_params import Sampling, TokenLogprobs
from tests.support.ordered_dots import use_ordered_dots

NUM_WORLDS = 250  # of about 8 requests each
VOCABULARY = 29
PRESETS = ("headway", "nano_vllm", "vllm", "vllm_v1", "minivllm", "static")
Make = Callable[[Config], Executor]
Outputs = dict[str, tuple[list[int], list[TokenLogprobs]]]


class Loud(DummyCheckpoint):
    """Random weights large enough for clear choices."""

    def whole(self, name: str) -> Tensor:
        return super().whole(name) * (1 if name.endswith("norm.weight") else 10)


def tiny() -> ModelConfig:
    return from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "rope_theta": 1e4,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        },
        "tiny",
    )  # fmt: skip


class Liar:
    """Drafts the known outputs; each token may be wrong."""

    def __init__(self, outputs: Outputs, rng: random.Random) -> None:
        self._outputs, self._rng, self._share = outputs, rng, rng.choice((0.0, 0.5, 0.8, 1.0))

    def propose(self, request: Request, most: int) -> Sequence[int]:
        place = len(request.output)
        right = self._outputs[request.id][0][place : place + most]
        wrong = [self._rng.randrange(VOCABULARY) for _ in range(most)]
        is_right = self._rng.random
        return [t if is_right() < self._share else w for t, w in zip(right, wrong, strict=False)]

    def forget(self, request: Request) -> None:
        pass


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.5)),
        seed=rng.randrange(1 << 40),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 0.8)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        presence_penalty=rng.choice((0.0, 0.0, -0.5)),
        logit_bias=rng.choice(({}, {}, {3: 2.0})),
        bad_words=rng.choice(((), (), ((1,), (2, 3)))),
        logprobs=rng.choice((None, 0, 2)),
    )


def random_requests(rng: random.Random, most: int) -> list[tuple[str, list[int], RequestParams]]:
    shared = [rng.randrange(VOCABULARY) for _ in range(9)]
    found = []
    for number in range(rng.randrange((most + 1) // 2, most + 1)):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 8))]
        params = RequestParams(
            max_tokens=rng.randrange(1, 2 * most), min_tokens=rng.choice((0, 0, 4)),
            stop_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 1, 3)))),
            n=rng.choice((1, 1, 1, 2)), sampling=random_sampling(rng),
        )  # fmt: skip
        found.append((str(number), rng.choice(([], shared)) + own, params))
    return found


def random_config(rng: random.Random, draft: Any, drafter: Callable[[], Drafter]) -> Config:
    size = rng.choice((1, 2, 4, 16))
    return preset(
        rng.choice(PRESETS), draft=draft, drafter=drafter, block_size=size,
        num_blocks=rng.choice((34, 40, 64)) // size + 1, max_model_len=64, max_num_seqs=rng.choice((2, 4, 8)),
        max_num_batched_tokens=rng.choice((40, 64)), num_host_blocks=rng.choice((0, 32)),
    )  # fmt: skip


def outputs_of(
    make: Make, config: Config, requests: list[tuple[str, list[int], RequestParams]],
    aborts: dict[int, str], async_scheduling: int, seen: Counter[str],
) -> tuple[Outputs, dict[str, str | None]]:  # fmt: skip
    """Tokens and logprobs by request, and how each ended; `aborts` are by step."""
    engine = Engine(Scheduler(config), make(config), async_scheduling=async_scheduling)
    tokens: dict[str, tuple[list[int], list[TokenLogprobs]]] = {}

    def note(event: Event) -> None:
        if not isinstance(event, Completed):
            return
        extra = event.result.extra
        found = extra.logprobs if isinstance(extra, ExtraOutputs) else {}
        for request, gained in event.outputs():
            tokens[request.id][0].extend(gained)
            tokens[request.id][1].extend(found.get(request, ())[: len(gained)])
        for draft, gained in zip(event.plan.drafts, event.result.draft_tokens, strict=True):
            seen["right"] += max(0, len(gained) - 1)
            seen["wrong"] += draft.count + 1 - len(gained)
        seen["preempted"] += len(event.plan.preempted)
        seen["swapped"] += sum(each.num_swapped > 0 for each in event.plan.admitted)
        seen["hits"] += sum(each.num_hits > 0 for each in event.plan.admitted)

    engine.observers.append(note)
    added: list[Request] = []
    for id, prompt, params in requests:
        added += engine.add(id, prompt, params)
    tokens.update((request.id, ([], [])) for request in added)
    step = 0
    while engine.has_work:
        if step in aborts:
            engine.abort(aborts[step])
        engine.step()
        step += 1
    assert engine.fault is None, engine.fault
    return tokens, {request.id: request.finish_reason for request in added}


def check_world(
    seed: int, make: Make, seen: Counter[str], async_scheduling: int = 0, most: int = 8,
    only: Callable[[], Drafter] | None = None,
) -> None:  # fmt: skip
    """Run a world with one of many drafters, or with `only` this one."""
    rng = random.Random(seed)
    requests = random_requests(rng, most)
    roomy = preset("vllm_v1", num_blocks=200, block_size=4, max_model_len=64)
    expected, reasons = outputs_of(make, roomy, requests, {}, 0, Counter())
    rule = rng.choice(("fixed(1)", "fixed(3)", "fixed(7)", "by_cost"))
    drafters: list[Callable[[], Drafter]] = [
        lambda: Liar(expected, rng), lambda: Liar(expected, rng), ngram(1, 3), suffix(),
    ]  # fmt: skip
    config = random_config(rng, rule, only or rng.choice(drafters))
    ids = [id for id, *_ in requests]
    aborts = {rng.randrange(12): rng.choice(ids) for _ in range(rng.choice((0, 0, 2)))}
    found, ends = outputs_of(make, config, requests, aborts, async_scheduling, seen)
    for id, (tokens, logprobs) in found.items():
        is_whole = ends[id] != "abort"
        assert tokens == expected[id][0][: None if is_whole else len(tokens)], f"world {seed}: {id}"
        assert logprobs == expected[id][1][: None if is_whole else len(logprobs)], f"{seed}: {id}"
        assert not is_whole or ends[id] == reasons[id]
        seen["requests"] += 1


def test_cpu_texts_and_logprobs_do_not_depend_on_drafts() -> None:
    about, seen = tiny(), Counter[str]()
    decoder = Decoder(Loud(about), NativeBackend())
    for seed in range(NUM_WORLDS):
        check_world(seed, partial(CpuExecutor, decoder), seen)
    assert seen["requests"] >= 1500 and min(seen["right"], seen["wrong"], seen["preempted"]) > 30, (
        seen
    )


@pytest.mark.usefixtures("small_padding")
@pytest.mark.parametrize("async_scheduling", (0, 1) if torch.cuda.is_available() else (1,))
def test_gpu_texts_do_not_depend_on_drafts(
    async_scheduling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.backends.deterministic import DeterministicBackend
    from headway.model.kernels.attention import invariant_attention

    use_ordered_dots(monkeypatch)
    if not torch.cuda.is_available():
        monkeypatch.setattr(invariant_attention, "SPLIT", 32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about, seen = tiny(), Counter[str]()
    decoder = Decoder(Loud(about), DeterministicBackend(torch.float32, device))
    seeds, most = ((50,), 3) if device == "cpu" else (range(60), 8)
    for seed in seeds:
        make = partial(GpuExecutor, decoder)
        check_world(seed, make, seen, async_scheduling, most)
    assert seen["right"] and seen["wrong"], seen
