"""Every supported architecture and file layout, compared with transformers, at a tiny size.

Models are random, with norm weights and biases that matter, and transformers itself saves them.
They have no tokenizer: token ids go in and come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import LLM, SamplingParams
from headway.errors import InvalidRequest
from headway.model.backends.base import Backend
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, why_not_native
from headway.model.weights import mxfp4
from headway.model.weights.scaled import ScaledMatrix
from tests.parallel import test_laws
from tests.support import gguf_models, real

VOCABULARY, LENGTH = 199, 256
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


@dataclass(frozen=True)
class Family:
    """An architecture, and how its model is saved."""

    kind: str
    numbers: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"


TIED = {"tie_word_embeddings": True}
FULL, WINDOWED = "full_attention", "sliding_attention"
GEMMA: dict[str, Any] = TIED | {
    "layer_types": [WINDOWED, WINDOWED, FULL, WINDOWED], "num_hidden_layers": 4, "sliding_window": 20,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 24,
}  # fmt: skip
GLOBAL = {  # as the larger models have it
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
    }
}
LONG: dict[str, Any] = {  # of 6 pairs: 3/4 of a head rotates
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 2 * LENGTH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    },
}
OLMO3_ROPES = {
    "rope_parameters": {
        FULL: {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.2,
        },
        WINDOWED: {"rope_type": "default", "rope_theta": 5e5},
    }
}
FAMILIES = {
    "qwen2": Family("Qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1} | TIED),
    "qwen3": Family("Qwen3", {"head_dim": 32}),
    "qwen3 with biases, in shards": Family("Qwen3", {"attention_bias": True}, shard="40KB"),
    "llama, as small ones are": Family("Llama", TIED),
    "llama in shards": Family("Llama", shard="40KB"),
    "llama with all biases": Family("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3's positions": Family(
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32),
    ),
    "yarn": Family("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "linear": Family("Llama", rope("linear", factor=4.0) | TIED),
    "mistral": Family("Mistral", {"sliding_window": None, "head_dim": 32}),
    "a window in every layer": Family("Mistral", {"sliding_window": 20}),
    "a window in some layers": Family(
        "Qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "bfloat16": Family("Llama", dtype=torch.bfloat16),
    "tied bfloat16 in shards": Family("Qwen2", TIED, torch.bfloat16, "20KB"),
    "gemma3": Family("Gemma3Text", GEMMA),
    "gemma3 in shards": Family("Gemma3Text", {**GEMMA, **GLOBAL}, torch.bfloat16, "60KB"),
    "smollm3": Family("SmolLM3", TIED | {"num_hidden_layers": 5, "attention_bias": True}),
    "phi3 below its original length": Family(
        "Phi3", LONG | {"original_max_position_embeddings": LENGTH}
    ),
    "phi3 above its original length, with a window, in shards": Family(
        "Phi3", LONG | TIED | {"original_max_position_embeddings": 8, "sliding_window": 20},
        torch.bfloat16, "60KB",
    ),
    "olmo2": Family("Olmo2", TIED | {"attention_bias": True}),
    "olmo3": Family("Olmo3", {**OLMO3_ROPES, "num_hidden_layers": 4, "sliding_window": 20}),
    "granite": Family(
        "Granite", TIED | {"attention_multiplier": 0.4, "embedding_multiplier": 12.0,
                           "residual_multiplier": 0.22, "logits_scaling": 8.0}
    ),
    "ministral3": Family(
        "Ministral3",
        rope("yarn", factor=16.0, original_max_position_embeddings=16, mscale=1.0,
             mscale_all_dim=1.0, llama_4_scaling_beta=0.3),
    ),
    "odd heads": Family("Llama", {"head_dim": 10, "intermediate_size": 150}),
}  # fmt: skip
FITTING = [name for name in FAMILIES if name != "odd heads"]
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 32}
ON_GGUF = {
    "gemma3 as in GGUF files": Family("Gemma3Text", GEMMA | SIX_LAYERS),
    **{
        name: FAMILIES[name]
        for name in (
            "llama, as small ones are", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "granite",
        )
    },
}  # fmt: skip
BACKENDS: dict[str, Callable[[], Backend]] = {"native": NativeBackend, "plain": PlainBackend}


def save(family: Family, folder: Path) -> None:
    """Save a random model of the family with transformers."""
    import transformers  # not above: every process collects the tests, and few need it

    numbers = {
        "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, **family.numbers,
    }  # fmt: skip
    config = getattr(transformers, f"{family.kind}Config")(**numbers)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.data.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.15 * noise)
    model.to(family.dtype).save_pretrained(folder, max_shard_size=family.shard)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Find the folder of a family, and transformers' model of it in float32; made on demand."""
    from transformers import AutoModelForCausalLM

    made: dict[str, tuple[Path, Any]] = {}

    def find(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("family")
            save((FAMILIES | ON_GGUF)[name], folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            made[name] = folder, model.eval()
        return made[name]

    return find


Saved = Callable[[str], tuple[Path, Any]]


def prompts(seed: int) -> dict[str, list[int]]:
    """Prompts of one token, of some, and of enough that scaled rope matters."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (1, 9, 30, 150)
    return {
        str(n): torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths
    }


def check_against_transformers(model: Decoder, reference: Any, num_tokens: int = 24) -> None:
    """Compare logits at every position, and tokens under chunks, preemptions and prefix hits."""
    tokens = prompts(1)["150"]
    model.use_length(LENGTH)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    found = real.logits_of(model, tokens)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-4
    trial = real.Trial(
        model, "vllm_v1", num_blocks=60, block_size=4, chunk="at_most(29)", max_model_len=LENGTH
    )
    outputs = trial.ask_one(prompts(2), num_tokens)
    for _ in range(2):  # the first may have to recompute what the other requests evicted
        again = trial.ask_one({"150": prompts(2)["150"]}, 4)["150"]
    seen = trial.seen
    assert seen.num_recomputed and seen.longest_chunk == 29 and seen.num_cached > 100, seen
    assert again == outputs["150"][:4]
    parts = [(prompt, outputs[name]) for name, prompt in prompts(2).items()]
    for (_, output), logits in zip(parts, real.batched_logits(reference, parts), strict=True):
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > real.TIE, "a tie: use another seed"
        assert output == logits.argmax(-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FITTING)
def test_logits_and_tokens_equal_transformers(saved: Saved, name: str, backend: str) -> None:
    if backend == "native" and (reason := why_not_native()):
        pytest.skip(reason)
    folder, reference = saved(name)
    is_sharded = (folder / "model.safetensors.index.json").exists()
    assert is_sharded == ("shards" in name), "the model's size no longer gives several shards"
    check_against_transformers(Decoder(open_checkpoint(folder), BACKENDS[backend]()), reference)


def test_the_text_model_of_a_model_with_images_is_loaded(saved: Saved, tmp_path: Path) -> None:
    from transformers import Ministral3Config, Mistral3Config, Mistral3ForConditionalGeneration

    folder, reference = saved("ministral3")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    vision = {"model_type": "pixtral", "num_attention_heads": 2, "image_size": 32, **sizes}
    text = Ministral3Config.from_pretrained(folder)
    whole = Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )
    whole.model.language_model.load_state_dict(reference.model.state_dict())
    whole.lm_head.load_state_dict(reference.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    checkpoints = open_checkpoint(tmp_path), open_checkpoint(folder)
    assert checkpoints[0].config == checkpoints[1].config
    found, expected = (
        real.logits_of(Decoder(each, PlainBackend()), prompts(1)["150"]) for each in checkpoints
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ON_GGUF)
def test_gguf_files_equal_transformers(saved: Saved, name: str, tmp_path: Path) -> None:
    folder, reference = saved(name)
    model = Decoder(open_checkpoint(gguf_models.write(folder, tmp_path / "m.gguf")), PlainBackend())
    prompt = prompts(1)["150"]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    found = real.logits_of(model, prompt)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_reference_of_the_tests_with_ranks_equals_transformers(tmp_path: Path) -> None:
    """By induction: at every position, the token is the most probable one after those before."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        test_laws.write_model(tmp_path), dtype=torch.float32
    )
    parts = [(prompt, test_laws.REFERENCE[name]) for name, prompt in test_laws.prompts().items()]
    for (_, output), logits in zip(parts, real.batched_logits(model.eval(), parts), strict=True):
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > real.TIE, "a tie: use another seed"
        assert logits.argmax(-1).tolist() == output and len(output) == test_laws.NUM_TOKENS


def test_sizes_that_the_kernels_do_not_support_run_on_torch(saved: Saved) -> None:
    folder, reference = saved("odd heads")
    checkpoint = open_checkpoint(folder)
    reason = why_not_native(checkpoint.config)
    assert reason is not None and (why_not_native() is not None or "head size 10" in reason)
    backend = choose_backend(checkpoint.config, "float32")
    assert isinstance(backend, PlainBackend)
    check_against_transformers(Decoder(checkpoint, backend), reference)


@pytest.mark.parametrize("name", ["qwen3", "tied bfloat16 in shards", "odd heads"])
def test_without_a_tokenizer_ids_go_in_and_come_out(saved: Saved, name: str) -> None:
    folder, reference = saved(name)
    asked = list(prompts(3).values())
    with LLM(str(folder), num_blocks=60) as llm:
        assert llm.tokenizer is None and llm.config.max_model_len == LENGTH
        results = llm.generate(asked, GREEDY)
    for prompt, result in zip(asked, results, strict=True):
        sample = result.outputs[0]
        assert (result.prompt, sample.text, sample.error) == (None, "", None)
        output = sample.token_ids
        assert output == real.transformers_logits(reference, prompt, output).argmax(-1).tolist()


def test_without_a_tokenizer_ids_are_streamed(saved: Saved) -> None:
    asked = list(prompts(3).values())
    with LLM(str(saved("qwen3")[0]), num_blocks=60) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(asked, GREEDY)]
        streamed: list[list[int]] = [[] for _ in asked]
        ends = []
        for delta in llm.stream(asked, GREEDY):
            streamed[delta.choice] += delta.token_ids
            ends += [delta.choice] if delta.finish_reason else []
    assert streamed == expected and sorted(ends) == [0, 1, 2, 3]


NEEDING_TEXT: dict[str, Callable[[LLM], object]] = {
    "a prompt": lambda llm: llm.generate("Hello"),
    "a conversation": lambda llm: llm.chat([{"role": "user", "content": "Hello"}]),
    "bad_words": lambda llm: llm.generate([5], SamplingParams(bad_words=["no"])),
    "stop": lambda llm: llm.generate([5], SamplingParams(stop="no")),
}


@pytest.mark.parametrize("what", NEEDING_TEXT)
def test_without_a_tokenizer_text_is_rejected(saved: Saved, what: str) -> None:
    with (
        LLM(str(saved("qwen3")[0]), num_blocks=60) as llm,
        pytest.raises(InvalidRequest, match="no tokenizer"),
    ):
        NEEDING_TEXT[what](llm)


def test_end_tokens_of_both_config_files_end_an_output(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("qwen3")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with LLM(str(folder), num_blocks=60) as llm:
        free = llm.generate(prompts(3)["9"], GREEDY)[0].outputs[0].token_ids
    end = free[5]
    generation = {"eos_token_id": [2, end]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    with LLM(str(tmp_path), num_blocks=60) as llm:
        sample = llm.generate(prompts(3)["9"], SamplingParams(temperature=0))[0].outputs[0]
    assert sample.token_ids == free[: free.index(end) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", end)


def test_numbers_in_8_and_4_bits_equal_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    q = (60 * torch.randn(96, 64, generator=generator)).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator)
    matrix = ScaledMatrix(q=q, scale=scale, zero=None, rows=32, columns=32, bits=8)
    assert torch.equal(matrix.wide(), Fp8Dequantize(None)._dequantize_one(q, scale, torch.float32))
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(255, (3, 10, 4), dtype=torch.uint8, generator=generator)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(mxfp4.dequantize(blocks, scales), expected.transpose(1, 2))
