"""The bundled model generates transformers' greedy tokens under every policy.

The reference is in real_reference.json; the first tests compare it with transformers itself. They
use induction: if at every position of an output the most probable next token, given all before it,
is the token of the output, then the output is the result of greedy generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import LLM, PRESETS, SamplingParams
from headway.model.backends.base import Backend
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.precision import why_not_native
from headway.model.registry import resolve
from headway.model.weights.checkpoint import open_checkpoint
from headway.request import Pooling
from headway.scheduler.presets import DEFAULT
from tests.support import real
from tests.support.real import NUM_TOKENS, Seen, Trial, unlike_reference

PARTS = 4  # so that parallel test processes share the work


# The reference equals transformers.


def test_the_reference_is_most_probable_in_transformers() -> None:
    model, ties, wrong = real.transformers_model(), [], []
    assert len(real.PROMPTS) >= 24 and list(real.reference()) == list(real.PROMPTS)
    for name, prompt in real.prompts().items():
        output = real.reference()[name]
        assert len(output) == NUM_TOKENS
        values, tokens = real.transformers_logits(model, prompt, output).topk(2)
        for place in range(NUM_TOKENS):
            pair, gap = tokens[place].tolist(), float(values[place, 0] - values[place, 1])
            if gap < real.TIE and output[place] in pair:
                other = pair[pair[0] == output[place]]
                ties.append((name, place, output[place], other))
            elif output[place] != pair[0]:
                wrong.append((name, place, output[place], pair[0]))
    assert not wrong
    assert ties == real.TIES, "list every tie in real.TIES"


def test_transformers_generates_the_reference() -> None:
    model = real.transformers_model()
    for name in ("one token", "capital", "emoji"):
        ids = torch.tensor([real.prompts()[name]])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
            eos_token_id=-1,
        )  # fmt: skip
        assert output[0, ids.shape[1] :].tolist() == real.reference()[name][:20]


BACKENDS: dict[str, Callable[[], Backend]] = {"native": NativeBackend, "plain": PlainBackend}


@pytest.mark.parametrize("backend", BACKENDS)
@torch.inference_mode()
def test_hidden_states_of_every_layer_equal_transformers(backend: str) -> None:
    if backend == "native" and (reason := why_not_native()):
        pytest.skip(reason)
    own = Decoder(open_checkpoint(resolve("smollm2-135m")), BACKENDS[backend]())
    tokens = real.prompts()["long chat"] + real.reference()["long chat"][:20]
    states: list[Tensor] = []
    logits = own.logits(
        own.forward(
            real.whole(tokens), real.blocks_for(own, len(tokens)),
            watch=lambda layer, state: states.append(state.clone()),
        )
    )  # fmt: skip
    model = real.transformers_model()
    expected = model(torch.tensor([tokens]), output_hidden_states=True)
    # The first are the embeddings; the last are after the final norm.
    layers = [layer[0] for layer in expected.hidden_states[1:-1]]
    assert len(states) == own.config.num_layers == len(layers) + 1
    pairs = [*zip(layers, states, strict=False), (expected.logits[0], logits)]
    errors = [float((found - wanted).norm() / wanted.norm()) for wanted, found in pairs]
    assert max(errors) < 1e-4, errors


@torch.inference_mode()
def test_embeddings_equal_the_pooled_states_of_transformers() -> None:
    names = ("one token", "german", "long chat")
    with LLM(
        num_blocks=60, max_num_seqs=8, max_num_batched_tokens=48
    ) as llm:  # the longest: 2 chunks
        prompts = [real.prompts()[name] for name in names]
        found = {p: llm.embed(prompts, pooling=p) for p in get_args(Pooling)}
    for number, prompt in enumerate(prompts):
        states = real.transformers_model().model(torch.tensor([prompt])).last_hidden_state[0]
        for pooling, vector in {"mean": states.mean(0), "last": states[-1]}.items():
            wanted = (vector / vector.norm()).numpy()
            np.testing.assert_allclose(found[pooling][number].outputs.embedding, wanted, atol=1e-4)


def test_the_offline_api_generates_the_reference() -> None:
    """From text, messages and tokens to text; logprobs equal those of transformers."""
    with LLM(num_blocks=60) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        names = ["name", "german", "chat"]
        talk: Any = real.PROMPTS["chat"]
        asked: list[Any] = [real.PROMPTS["name"], real.prompts()["german"]]
        results = llm.generate(asked, params)
        results += llm.chat(talk, params)
    for name, result in zip(names, results, strict=True):
        expected = real.reference()[name][:12]
        assert result.prompt_token_ids == real.prompts()[name]
        assert result.outputs[0].token_ids == expected
        assert result.outputs[0].text == real.tokenizer().decode(expected)
        logits = real.transformers_logits(
            real.transformers_model(), result.prompt_token_ids, expected
        )
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None])[:, 0]
        scores = zip(expected, result.outputs[0].logprobs or [], strict=True)
        found = [score[token].logprob for token, score in scores]
        assert found == pytest.approx(wanted.tolist(), abs=1e-4)


# Every policy generates the reference.


@pytest.mark.parametrize("part", range(PARTS))
def test_each_prompt_alone_generates_the_reference(part: int) -> None:
    """All prompts by induction, in one pass over prompt and output; some of them step by step.

    One pass gives bitwise the logits of single steps: see test_batch_invariance.py.
    """
    asked = dict(list(real.prompts().items())[part::PARTS])
    found = {}
    for name, prompt in asked.items():
        logits = real.logits_of(real.decoder(), prompt + real.reference()[name][:-1])
        found[name] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert len(found[name]) == NUM_TOKENS
    assert not unlike_reference(found)
    trial = Trial(real.decoder(), max_num_seqs=1)
    assert not unlike_reference(trial.ask_one(dict(list(asked.items())[:1]), NUM_TOKENS // 4))
    assert trial.seen.most_decodes == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_reference_in_a_batch(preset: str) -> None:
    """The default preset generates the whole reference, the others the start of most outputs."""
    trial = Trial(real.decoder(), preset)
    if preset == DEFAULT:
        outputs = trial.ask_one(real.prompts())
    else:
        outputs = trial.ask_one(real.short_prompts(), NUM_TOKENS // 8)
    assert not unlike_reference(outputs)
    assert trial.seen.most_decodes > 12


@dataclass(frozen=True)
class Case:
    """Settings to try, and what must have happened for the test to be meaningful.

    All prompts but the longest are continued for `num_tokens`; the default preset above generates
    the whole reference.
    """

    settings: dict[str, Any]
    happened: Callable[[Seen], bool]
    num_tokens: int = 12
    num_times: int = 1
    params: dict[str, Any] = field(default_factory=dict)


CRAMPED = {"preset": "vllm_v1", "block_size": 2, "num_blocks": 150, "victim": "least_work"}
CASES = {
    "chunks of 7": Case({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "recompute": Case(
        {**CRAMPED, "swap": "recompute"}, lambda seen: seen.num_recomputed >= 20, 24
    ),
    "swap": Case(
        {**CRAMPED, "swap": "swap", "num_host_blocks": 400},
        lambda seen: seen.num_swapped >= 20 and min(seen.num_copied) >= 20, 24,
    ),
    "blocks of 1, all asked twice": Case(
        {"block_size": 1}, lambda seen: seen.num_full_hits >= len(real.short_prompts()), 6, 2
    ),
    "blocks of 64, one step ahead": Case(
        {"block_size": 64, "async_scheduling": 1}, lambda seen: seen.longest_chunk > 64
    ),
    "blocks of 16, all asked twice, one step ahead": Case(
        {"preset": "vllm_v1", "async_scheduling": 1}, lambda seen: seen.num_cached > 300, 6, 2
    ),
    "four steps a plan": Case({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 9, 13),
    "four steps a plan, one ahead": Case(
        {"num_scheduler_steps": 4, "async_scheduling": 1}, lambda seen: seen.num_steps < 9, 13
    ),
    "three samples": Case({}, lambda seen: seen.most_decodes > 48, 5, params={"n": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token(name: str) -> None:
    case = CASES[name]
    trial = Trial(real.decoder(), **case.settings)
    for _ in range(case.num_times):
        outputs = trial.ask(real.short_prompts(), case.num_tokens, **case.params)
        for number in range(case.params.get("n", 1)):
            assert not unlike_reference({key: found[number] for key, found in outputs.items()})
    assert case.happened(trial.seen), trial.seen


def test_a_shared_prefix_is_found_and_changes_no_token() -> None:
    """Prompts with a common prefix, one a prefix of another, one after the other."""
    tokens = real.prompts()["long story"] + real.reference()["long story"]
    trial = Trial(real.decoder())
    for length in (320, 336, 336, 350):  # whole blocks, so that the third is fully cached
        start = len(real.prompts()["long story"])
        assert start <= length
        output = trial.ask_one({"long story": tokens[:length]}, 8)["long story"]
        assert output == real.reference()["long story"][length - start :][:8]
    assert trial.seen.num_cached == 320 + 335 + 336 and trial.seen.num_full_hits == 1
