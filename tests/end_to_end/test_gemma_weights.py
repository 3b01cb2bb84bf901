"""gemma3-270m generates the tokens of transformers; `make test-gemma` runs this.

It needs a download of 238 MB and 4 GB of memory, so it is not a part of `make test`. The windows of
the model are shorter than one of the prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway import LLM, PRESETS, SamplingParams
from tests.support import real

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADWAY_TEST_GEMMA"), reason="set HEADWAY_TEST_GEMMA=1"
)
NUM_TOKENS = 8
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window")
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "北京是中国的",
    "🎉🎂 Happy  birthday\n\n\n to you",
    real.STORY,
    (real.STORY + real.LIST + real.CODE) * 2,  # longer than the window
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The model as transformers reads the same file, in float32."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, max_position_embeddings=32768,
        sliding_window=512, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    )  # fmt: skip
    model, read = real.transformers_from_gguf("gemma3-270m", Gemma3ForCausalLM, config)
    wrong = {key: read[key] for key in read if key in SIZES and read[key] != getattr(config, key)}
    assert not wrong, f"the file has {wrong}"
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("gemma3-270m", max_num_seqs=8, kv_memory="600MiB") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens that the first test compares with transformers."""
    return [result.outputs[0].token_ids for result in llm.generate(TEXTS, GREEDY)]


def test_tokens_and_logprobs_equal_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    results = llm.generate(TEXTS, params)
    assert max(len(result.prompt_token_ids) for result in results) > 512
    for result in results:
        prompt, output = result.prompt_token_ids, result.outputs[0].token_ids
        logits = real.transformers_logits(reference, prompt, output)
        assert output == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        scores = zip(output, result.outputs[0].logprobs or [], strict=True)
        assert [s[t].logprob for t, s in scores] == pytest.approx(wanted.tolist(), abs=1e-3)


# The ids that llama.cpp finds with the same file.
IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "def fibonacci(n):\n    ": [2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140],
    "北京是中国的": [2, 32707, 237026, 110323],
    "🎉🎂 Happy  birthday\n\n\n to you": [2, 242061, 242909, 20728, 138, 52373, 109, 531, 611],
    "a  b   c    d\t\te\n\n\n":
        [2, 236746, 138, 236763, 139, 236755, 140, 236753, 255969, 236744, 109],
    "<start_of_turn>user\nHi<end_of_turn>\n": [2, 105, 2364, 107, 10979, 106, 107],
    "Il était une fois, dans une forêt": [2, 12834, 19068, 3037, 16886, 236764, 2880, 3037, 130180],
    "𒀀𒁀 rare": [2, 247364, 250392, 8401],
    "  <table>  x</td>": [2, 138, 168, 138, 236781, 183],
}  # fmt: skip


def test_the_tokenizer_equals_that_of_llama_cpp(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for text, ids in IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids[1:], skip_special=False) == text


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_same_tokens(
    llm: LLM, expected: list[list[int]], preset: str
) -> None:
    trial = real.Trial(llm.loaded.decoder, preset, max_model_len=2048)
    tokenizer = llm.get_tokenizer()
    prompts = {str(n): tokenizer.encode(text) for n, text in enumerate(TEXTS)}
    assert list(trial.ask_one(prompts, NUM_TOKENS).values()) == expected
