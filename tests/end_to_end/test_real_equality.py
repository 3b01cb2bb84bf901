"""The bundled model generates transformers' greedy tokens under every policy.

The reference is in real_reference.json; the first tests compare it with transformers itself. They
use induction: if at every position of an output the most probable next token, given all before it,
is the token of the output, then the output is the result of greedy generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from headway import LLM, PRESETS, SamplingParams
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import why_not_native
from headway.model.registry import resolve
from headway.request import Pooling
from headway.scheduler.policies.presets import DEFAULT
from tests.support import real
from tests.support.real import NUM_TOKENS, Seen, Trial, unlike_reference


@cache
def groups_of_prompts() -> dict[str, tuple[str, ...]]:
    """For every prompt, those of similar length: few passes of transformers with little padding."""
    groups: list[list[str]] = [[]]
    lengths = {name: len(tokens) + NUM_TOKENS for name, tokens in real.prompts().items()}
    for name in sorted(lengths, key=lengths.__getitem__):
        group = [*groups[-1], name]
        size = len(group) * lengths[name]
        if size > min(512, 1.2 * sum(lengths[each] for each in group)):
            groups.append([name])
        else:
            groups[-1] = group
    return {name: tuple(group) for group in groups for name in group}


@dataclass(frozen=True)
class Expected:
    """What transformers calculates for a prompt, followed by its reference."""

    prompt_states: Tensor
    best: Any  # the two most probable tokens at each position of the reference, and their logits
    logprobs: Tensor  # of the tokens of the reference


def of_transformers(name: str) -> Expected:
    return pass_of_transformers(groups_of_prompts()[name])[name]


@cache
@torch.inference_mode()
def pass_of_transformers(group: tuple[str, ...]) -> dict[str, Expected]:
    model, found = real.transformers_model(), dict[str, Expected]()
    parts = [(real.prompts()[name], real.reference()[name]) for name in group]
    passed = zip(group, parts, real.batched_states(model, parts), strict=True)
    for name, (prompt, output), states in passed:
        logits = model.lm_head(states[len(prompt) - 1 :])
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        found[name] = Expected(states[: len(prompt)], logits.topk(2), logprobs)
    return found


def test_the_reference_is_most_probable_in_transformers() -> None:
    ties, wrong = [], []
    assert len(real.PROMPTS) >= 24 and list(real.reference()) == list(real.PROMPTS)
    for name, output in real.reference().items():
        values, tokens = of_transformers(name).best
        assert len(output) == len(tokens) == NUM_TOKENS
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
    for name in ("one token", "emoji"):
        ids = torch.tensor([real.prompts()[name]])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4,
            eos_token_id=-1,
        )  # fmt: skip
        assert output[0, ids.shape[1] :].tolist() == real.reference()[name][:4]


@cache
def chat_of_transformers() -> tuple[list[int], list[Tensor]]:
    """A chat's tokens, the states after every layer but the last, and the logits."""
    tokens = real.prompts()["chat with system"] + real.reference()["chat with system"][:4]
    with torch.inference_mode():
        found = real.transformers_model()(torch.tensor([tokens]), output_hidden_states=True)
    # The first are the embeddings; the last are after the final norm.
    return tokens, [layer[0] for layer in (*found.hidden_states[1:-1], found.logits)]


def plain_decoder() -> Decoder:
    return Decoder(open_checkpoint(resolve("smollm2-135m")), PlainBackend())


@pytest.mark.parametrize("decoder", [real.decoder, plain_decoder], ids=["native", "plain"])
@torch.inference_mode()
def test_hidden_states_of_every_layer_equal_transformers(decoder: Callable[[], Decoder]) -> None:
    own = decoder()
    if decoder is real.decoder and not isinstance(own.backend, NativeBackend):
        pytest.skip(str(why_not_native()))
    tokens, expected = chat_of_transformers()
    states: list[Tensor] = []
    logits = own.logits(
        own.forward(
            real.whole(tokens), real.blocks_for(own, len(tokens)),
            watch=lambda layer, state: states.append(state.clone()),
        )
    )  # fmt: skip
    assert len(states) == own.config.num_layers == len(expected)
    pairs = zip(expected, [*states[:-1], logits], strict=True)
    errors = [float((found - wanted).norm() / wanted.norm()) for wanted, found in pairs]
    assert max(errors) < 1e-4, errors


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The longest prompt needs two chunks."""
    with real.open_llm(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=48) as llm:
        yield llm


@torch.inference_mode()
def test_embeddings_equal_the_pooled_states_of_transformers(llm: LLM) -> None:
    names = ("one token", "german", "long chat")
    prompts = [real.prompts()[name] for name in names]
    found = {p: llm.embed(prompts, pooling=p) for p in get_args(Pooling)}
    for number, name in enumerate(names):
        states = of_transformers(name).prompt_states
        assert len(states) == len(prompts[number])
        for pooling, vector in {"mean": states.mean(0), "last": states[-1]}.items():
            wanted = (vector / vector.norm()).numpy()
            np.testing.assert_allclose(found[pooling][number].outputs.embedding, wanted, atol=1e-4)


def test_the_offline_api_generates_the_reference(llm: LLM) -> None:
    """From text, messages and tokens to text; logprobs equal those of transformers."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    names = ["name", "german", "chat"]
    talk: Any = real.PROMPTS["chat"]
    asked: list[Any] = [real.PROMPTS["name"], real.prompts()["german"]]
    results = [*llm.generate(asked, params), *llm.chat(talk, params)]
    for name, result in zip(names, results, strict=True):
        expected = real.reference()[name][:12]
        assert result.prompt_token_ids == real.prompts()[name]
        assert result.outputs[0].token_ids == expected
        assert result.outputs[0].text == real.tokenizer().decode(expected)
        wanted = of_transformers(name).logprobs[:12]
        scores = zip(expected, result.outputs[0].logprobs or [], strict=True)
        found = [score[token].logprob for token, score in scores]
        assert found == pytest.approx(wanted.tolist(), abs=1e-4)


def test_each_prompt_alone_generates_the_reference() -> None:
    """A step has one row here; test_batch_invariance.py compares the logits bit by bit."""
    trial = Trial(real.decoder(), max_num_seqs=1)
    assert not unlike_reference(trial.ask_one(real.prompts_of(range(9)), 3))
    assert trial.seen.most_decodes == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_reference_in_a_batch(preset: str) -> None:
    """The default preset generates the whole reference, the others the start of most outputs."""
    trial = Trial(real.decoder(), preset)
    if preset == DEFAULT:
        outputs = trial.ask_one(real.prompts())
    else:
        outputs = trial.ask_one(real.prompts_of(SHORT), 4)
    assert not unlike_reference(outputs)
    assert trial.seen.most_decodes > 12


SHORT = range(13)


@dataclass(frozen=True)
class Case:
    """Settings to try, and what must have happened for the test to be meaningful.

    The prompts with a number of tokens in `lengths` are continued for `num_tokens`; the default
    preset above generates the whole reference.
    """

    settings: dict[str, Any]
    happened: Callable[[Seen], bool]
    num_tokens: int = 6
    lengths: range = SHORT
    num_times: int = 1
    params: dict[str, Any] = field(default_factory=dict)


CRAMPED = {"preset": "vllm_v1", "block_size": 2, "num_blocks": 52, "victim": "least_work"}
CASES = {
    "chunks of 7": Case(
        {"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7, lengths=range(7, 24)
    ),
    "recompute": Case(
        {**CRAMPED, "swap": "recompute"}, lambda seen: seen.num_recomputed >= 10, 8
    ),
    "swap": Case(
        {**CRAMPED, "swap": "swap", "num_host_blocks": 400},
        lambda seen: seen.num_swapped >= 10 and min(seen.num_copied) >= 20, 8,
    ),
    "blocks of 1, all asked twice": Case(
        {"block_size": 1}, lambda seen: seen.num_full_hits >= len(real.prompts_of(SHORT)), 4,
        num_times=2,
    ),
    "blocks of 64, one step ahead": Case(
        {"block_size": 64, "async_scheduling": 1}, lambda seen: seen.longest_chunk > 64, 4,
        lengths=range(10, 70, 4),
    ),
    "blocks of 16, all asked twice, one step ahead": Case(
        {"preset": "vllm_v1", "async_scheduling": 1}, lambda seen: seen.num_cached > 120, 4,
        lengths=range(16, 38), num_times=2,
    ),
    "four steps a plan": Case({"num_scheduler_steps": 4}, lambda seen: seen.num_steps < 7, 9),
    "four steps a plan, one ahead": Case(
        {"num_scheduler_steps": 4, "async_scheduling": 1}, lambda seen: seen.num_steps < 7, 9
    ),
    "three samples": Case({}, lambda seen: seen.most_decodes >= 39, 3, params={"n": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token(name: str) -> None:
    case = CASES[name]
    trial = Trial(real.decoder(), **case.settings)
    for _ in range(case.num_times):
        outputs = trial.ask(real.prompts_of(case.lengths), case.num_tokens, **case.params)
        for number in range(case.params.get("n", 1)):
            assert not unlike_reference({key: found[number] for key, found in outputs.items()})
    assert case.happened(trial.seen), trial.seen


def test_a_shared_prefix_is_found_and_changes_no_token() -> None:
    """Prompts with a common prefix, one a prefix of another, one after the other."""
    prompt, output = real.prompts()["long list"], real.reference()["long list"]
    trial = Trial(real.decoder())
    for length in (128, 144, 144, 147):  # whole blocks, so that the third is fully cached
        num_known = length - len(prompt)
        assert num_known >= 0
        found = trial.ask_one({"long list": [*prompt, *output[:num_known]]}, 2)["long list"]
        assert found == output[num_known:][:2]
    assert trial.seen.num_cached == 128 + 143 + 144 and trial.seen.num_full_hits == 1
