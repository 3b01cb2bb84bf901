"""A model with sliding-window layers generates transformers' tokens under every policy.

The model is a random Gemma 3 whose window is shorter than most prompts. Every output is compared
with transformers by induction: given all tokens before it, each token is the most probable one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, PRESETS, SamplingParams
from headway.errors import ConfigError
from headway.loading import fit
from headway.model.backends.base import Backend
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, why_not_native
from headway.model.sharding import check_size
from headway.options import EngineOptions
from tests.end_to_end.test_real_families import FAMILIES, VOCABULARY, save
from tests.model.test_checkpoint import write_gguf
from tests.support import real
from tests.support.real import Seen, Trial

WINDOW, NUM_TOKENS = 20, 15  # also the prompt of 7 tokens outgrows its window
Tokens = dict[str, list[int]]
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
BACKENDS: dict[str, Callable[[], Backend]] = {
    "native": NativeBackend,
    "native int8": lambda: NativeBackend(is_quantized=True),
    "native, int8 cache": lambda: NativeBackend(kv_dtype=torch.int8),
    "plain": PlainBackend,
}


@dataclass(frozen=True)
class Model:
    """The model in plain torch, prompts, and the greedy tokens of transformers after them."""

    folder: Path
    decoder: Decoder
    prompts: Tokens
    outputs: Tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Prompts below, at and above the window; two share a prefix that is longer than it."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gemma")
    save(FAMILIES["gemma3"], folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = Decoder(open_checkpoint(folder), PlainBackend())
    generator = torch.Generator().manual_seed(4)
    prompts: Tokens = {
        str(count): torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
        for count in (1, 7, WINDOW - 1, WINDOW, 33, 48, 75)
    }
    prompts["48 and more"] = [*prompts["48"], *prompts["7"]]
    outputs = real.Trial(decoder).ask_one(prompts, NUM_TOKENS)
    parts = [(prompt, outputs[name]) for name, prompt in prompts.items()]
    for (_, output), logits in zip(parts, real.batched_logits(reference, parts), strict=True):
        assert output == logits.argmax(-1).tolist(), "not the greedy tokens of transformers"
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > real.TIE, "a tie: use another seed"
    return Model(folder, decoder, prompts, outputs)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == "plain" else needs_native) for name in BACKENDS],
)
def run(model: Model, request: pytest.FixtureRequest) -> Run:
    """A backend, and the tokens after the prompts: of transformers, or of requests one by one."""
    decoder = Decoder(open_checkpoint(model.folder), BACKENDS[request.param]())
    if request.param in ("native", "plain"):
        return decoder, model.outputs
    trial, outputs = Trial(decoder), {}
    for name, prompt in model.prompts.items():
        outputs |= trial.ask_one({name: prompt}, NUM_TOKENS)
    return decoder, outputs


Run = tuple[Decoder, Tokens]


def test_the_window_matters(model: Model) -> None:
    tokens = model.prompts["75"]
    near = real.logits_of(model.decoder, tokens)
    wide = Decoder(open_checkpoint(model.folder), PlainBackend())
    wide.config = replace(wide.config, sliding_window=len(tokens))
    far = real.logits_of(wide, tokens)
    assert torch.allclose(near[:WINDOW], far[:WINDOW], atol=1e-4)
    assert not torch.allclose(near[WINDOW:], far[WINDOW:], atol=1e-2)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_tokens_of_transformers(
    model: Model, run: Run, preset: str
) -> None:
    trial = Trial(run[0], preset, block_size=4)
    assert trial.ask_one(model.prompts, NUM_TOKENS) == run[1]
    assert trial.seen.most_decodes == len(model.prompts)


@dataclass(frozen=True)
class Case:
    """Settings, and what must have happened for the test to be meaningful."""

    settings: dict[str, Any]
    happened: Callable[[Seen], bool]
    num_times: int = 1


CASES = {
    "chunks of 7": Case({"chunk": "at_most(7)"}, lambda seen: seen.longest_chunk == 7),
    "preemption": Case(
        {"preset": "vllm_v1", "num_blocks": 60, "victim": "least_work"},
        lambda seen: seen.num_recomputed >= 5,
    ),
    "all asked twice": Case({}, lambda seen: seen.num_cached > 150 and seen.num_full_hits > 0, 2),
    "blocks of 1, all asked twice": Case(
        {"block_size": 1}, lambda seen: seen.num_full_hits >= 5, 2
    ),
    "blocks of 32": Case({"block_size": 32}, lambda seen: seen.longest_chunk > 32),
    "one step ahead": Case({"async_scheduling": 1}, lambda seen: seen.most_decodes > 5),
    "eight steps a plan, one ahead": Case(
        {"num_scheduler_steps": 8, "async_scheduling": 1}, lambda seen: seen.num_steps < 20
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_setting_changes_a_token(model: Model, run: Run, name: str) -> None:
    case = CASES[name]
    trial = Trial(run[0], **{"block_size": 4, **case.settings})
    for _ in range(case.num_times):
        assert trial.ask_one(model.prompts, NUM_TOKENS) == run[1]
    assert case.happened(trial.seen), trial.seen


def test_a_gguf_file_of_the_model_has_the_same_weights(model: Model, tmp_path: Path) -> None:
    """llama.cpp's converter adds the 1 to norm weights that transformers leaves out."""
    checkpoint = open_checkpoint(model.folder)
    config = checkpoint.config
    weights = {name: checkpoint.read(name).float().numpy() for name in config.shapes()}
    written = write_gguf(
        tmp_path / "m.gguf", config, weights, gemma3__attention__sliding_window=WINDOW,
        gemma3__attention__sliding_window_pattern=3,
    )  # fmt: skip
    found = open_checkpoint(written)
    assert found.config.windowed_layers == config.windowed_layers
    for name in config.shapes():
        assert torch.equal(found.read(name), checkpoint.read(name)), name


def test_what_other_backends_do_not_support_is_named(model: Model) -> None:
    config = model.decoder.config
    with pytest.raises(ConfigError, match="norms of outputs or another activation"):
        choose_backend(config, "fp8", "cuda")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but gemma3 has"):
        check_size(config, 2)
    with pytest.raises(ConfigError, match="num_host_blocks is 3; it must be 0"):
        fit(config, 4, EngineOptions(preset="vllm", kv_memory="1MiB", num_host_blocks=3))


def test_memory_is_divided_among_both_kinds_of_blocks(model: Model) -> None:
    """Windowed layers get as many blocks as the others, but no more than they can use."""
    config, block = model.decoder.config, 16 * 2 * 32 * 4
    few = fit(config, 4, EngineOptions(preset="vllm_v1", kv_memory=10 * 4 * block, max_num_seqs=4))
    assert (few.num_blocks, few.num_window_blocks) == (10, 10)
    many = fit(
        config, 4, EngineOptions(preset="vllm_v1", kv_memory=100 * 4 * block, max_num_seqs=4)
    )
    assert many.num_window_blocks < 30 and many.num_blocks > 64
    used = many.num_blocks + 3 * many.num_window_blocks
    assert used * block <= 100 * 4 * block
    assert many.sliding_window == WINDOW and many.num_host_blocks == 0
    given = fit(config, 4, EngineOptions(preset="headway", num_blocks=12))
    assert (given.num_blocks, given.num_window_blocks, given.num_host_blocks) == (12, 12, 0)


def test_the_offline_api_runs_it(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model.folder), num_blocks=60) as llm:
        results = llm.generate(list(model.prompts.values()), params)
        assert llm.loaded.kv_bytes == 60 * 4 * 16 * 2 * 32 * 4
    assert [r.outputs[0].token_ids for r in results] == list(model.outputs.values())
