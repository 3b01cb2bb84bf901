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
from headway.model.registry import resolve
from tests.support import real

pytestmark = pytest.mark.skipif(
    not os.environ.get("HEADWAY_TEST_GEMMA"), reason="set HEADWAY_TEST_GEMMA=1"
)
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "北京是中国的",
    "🎉🎂 Happy  birthday\n\n\n to you",
    real.STORY,
    (real.STORY + real.LIST + real.CODE) * 3 + real.STORY,  # more than 512 tokens
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The model as transformers reads the same file, in float32."""
    from transformers import AutoModelForCausalLM

    path = resolve("gemma3-270m")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("gemma3-270m", max_num_seqs=8, kv_memory="600MiB") as loaded:
        yield loaded


def test_tokens_and_logprobs_equal_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    results = llm.generate(TEXTS, params)
    assert max(len(result.prompt_token_ids) for result in results) > 600
    for result in results:
        prompt, output = result.prompt_token_ids, result.outputs[0].token_ids
        logits = real.transformers_logits(reference, prompt, output)
        assert output == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        scores = zip(output, result.outputs[0].logprobs or [], strict=True)
        assert [s[t].logprob for t, s in scores] == pytest.approx(wanted.tolist(), abs=1e-3)


def test_the_tokenizer_equals_that_of_transformers(llm: LLM) -> None:
    from transformers import AutoTokenizer

    path = resolve("gemma3-270m")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = llm.get_tokenizer().encode(text)
        assert ids == theirs.encode(text)
        assert llm.get_tokenizer().decode(ids) == text


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_same_tokens(llm: LLM, preset: str) -> None:
    expected = [r.outputs[0].token_ids for r in llm.generate(TEXTS, GREEDY)]
    trial = real.Trial(llm.loaded.decoder, preset, max_model_len=2048)
    tokenizer = llm.get_tokenizer()
    prompts = {str(n): tokenizer.encode(text) for n, text in enumerate(TEXTS)}
    assert list(trial.ask_one(prompts, NUM_TOKENS).values()) == expected
