"""Mixtures of experts: equal to transformers, and the same whatever shares a batch or the weights.

Models are random and saved by transformers, in the names of published files.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from headway.errors import ConfigError, ModelError
from headway.model.backends.base import Backend
from headway.model.backends.native import forms
from headway.model.backends.native import weights as packing
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.native.forms import matrix_of
from headway.model.backends.native.weights import NativeWeight
from headway.model.backends.plain import PlainBackend
from headway.model.backends.routed import Routing
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.loader import open_checkpoint
from headway.model.precision import choose_backend, weight_bytes, why_not_native
from headway.model.sharding import check_size
from headway.model.weights.checkpoint import DummyCheckpoint
from tests.end_to_end.test_real_families import (
    BACKENDS,
    Family,
    check_against_transformers,
    prompts,
    save,
)
from tests.model.test_batch_invariance import ScaledCheckpoint, four_bits, logits_in_batches
from tests.support import gguf_models, real
from tests.support.rank_threads import ThreadRanks

native_only = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
QWEN: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES = {
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, shard="60KB"),
    "qwen2_moe": Family(
        "Qwen2Moe",
        {**QWEN, "num_experts": 5, "shared_expert_intermediate_size": 48, "num_hidden_layers": 3,
         "decoder_sparse_step": 2},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe", {**QWEN, "num_experts": 20, "num_experts_per_tok": 3, "norm_topk_prob": True}
    ),
    "qwen3_moe with dense layers": Family(
        "Qwen3Moe",
        {**QWEN, "num_experts": 6, "num_hidden_layers": 3, "mlp_only_layers": [1]}, torch.bfloat16,
    ),
}  # fmt: skip

ON_GGUF = {  # llama.cpp knows no Qwen with some dense layers
    "mixtral": FAMILIES["mixtral"],
    "qwen2_moe in all layers": Family(
        "Qwen2Moe", {**QWEN, "num_experts": 6, "shared_expert_intermediate_size": 48}
    ),
    "qwen3_moe": FAMILIES["qwen3_moe"],
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def find(name: str) -> Path:
        folder = tmp_path_factory.mktemp("experts")
        save((FAMILIES | ON_GGUF)[name], folder)
        return folder

    return find


Saved = Callable[[str], Path]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_tokens_equal_transformers(saved: Saved, name: str, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    if backend == "native" and (reason := why_not_native()):
        pytest.skip(reason)
    reference = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32).eval()
    check_against_transformers(
        Decoder(open_checkpoint(saved(name)), BACKENDS[backend]()), reference
    )


@pytest.mark.parametrize("name", ON_GGUF)
def test_gguf_files_equal_transformers(saved: Saved, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32).eval()
    file = gguf_models.write(saved(name), tmp_path / "m.gguf")
    assert open_checkpoint(file).config.experts is not None
    check_against_transformers(Decoder(open_checkpoint(file), PlainBackend()), reference)


@native_only
@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_0, 4), (Kind.Q5_1, 8), (Kind.Q8_0, 8)])
def test_experts_of_gguf_files_keep_their_groups(
    saved: Saved, kind: Kind, bits: int, tmp_path: Path
) -> None:
    file = gguf_models.write(saved("qwen3_moe"), tmp_path / "m.gguf", kind)
    checkpoint = open_checkpoint(file)
    form = forms.Form(bits, packing.GROUP)
    backend = NativeBackend(is_quantized=True, forms={"gate_up": form, "down": form})
    experts = Decoder(checkpoint, backend).layers[1].experts
    assert experts is not None
    for number in (0, 19):
        names = [f"model.layers.1.mlp.experts.{number}.{n}_proj" for n in ("gate", "up", "down")]
        matrices = [checkpoint.read(f"{name}.weight") for name in names]
        for found, expected in (
            (experts.gate_up[number], torch.cat(matrices[:2])), (experts.down[number], matrices[2]),
        ):  # fmt: skip
            assert isinstance(found, NativeWeight) and found.struct.bits == bits
            assert found.struct.group == packing.GROUP
            rows = found.rows(torch.arange(len(expected)))
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_preemptions_and_prefix_hits_change_no_token(saved: Saved, backend: str) -> None:
    if backend == "native" and (reason := why_not_native()):
        pytest.skip(reason)
    model = Decoder(open_checkpoint(saved("qwen2_moe")), BACKENDS[backend]())
    asked = prompts(2)
    expected = real.Trial(model, num_blocks=60, max_num_seqs=1).ask_one(asked, 24)
    trial = real.Trial(
        model, "vllm_v1", block_size=4, num_blocks=52, chunk="at_most(40)", victim="least_work"
    )
    assert trial.ask_one(asked, 24) == expected == trial.ask_one(asked, 24)
    seen = trial.seen
    assert seen.num_recomputed and seen.num_cached and seen.most_decodes > 1, seen
    assert seen.longest_chunk == 40, seen


def config_of(kind: str, **more: Any) -> ModelConfig:
    """Sizes that can be divided among ranks."""
    numbers = {
        "architectures": [f"{kind}ForCausalLM"], "vocab_size": 131, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "tie_word_embeddings": True, **more,
    }  # fmt: skip
    return from_hf(numbers, "config.json")


CONFIGS = {
    "mixtral": config_of("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen2_moe": config_of(
        "Qwen2Moe", moe_intermediate_size=64, num_experts=4, num_experts_per_tok=3,
        shared_expert_intermediate_size=128,
    ),
    "qwen3_moe": config_of(
        "Qwen3Moe", moe_intermediate_size=64, num_experts=24, num_experts_per_tok=4,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "gpt_oss": config_of("GptOss", num_local_experts=5, sliding_window=None, head_dim=16),
}  # fmt: skip
NATIVE: dict[str, Callable[[], Backend]] = {
    "float32": NativeBackend,
    "8 bits": lambda: NativeBackend(is_quantized=True),
    "4 bits": lambda: NativeBackend(is_quantized=True),
}


def weights(name: str, precision: str) -> ScaledCheckpoint:
    return ScaledCheckpoint(CONFIGS[name], has_groups=precision == "4 bits")


@native_only
@pytest.mark.parametrize("precision", NATIVE)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_bit_identical_alone_and_in_any_batch(name: str, precision: str) -> None:
    model = Decoder(weights(name, precision), NATIVE[precision]())
    rng = random.Random(f"{name} {precision}")
    sequences = [[rng.randrange(131) for _ in range(length)] for length in (1, 2, 33, 130)]
    alone = [real.logits_of(model, tokens) for tokens in sequences]
    assert all(logits.isfinite().all() for logits in alone)
    for one, other in zip(alone, logits_in_batches(model, sequences, 16, rng), strict=True):
        assert torch.equal(one, other)


class Dequantized(ScaledCheckpoint):
    """The numbers of the quantized matrices, as floats."""

    def __init__(self, config: ModelConfig, precision: str) -> None:
        super().__init__(config)
        self._quantize = four_bits if precision == "4 bits" else packing.quantize

    def whole(self, name: str) -> torch.Tensor:
        found = super().whole(name)
        if not matrix_of(name.removesuffix(".weight")):
            return found
        groups = self._quantize(found)
        wide = groups.q.float().view(len(found), -1, packing.GROUP)
        return (groups.scale[..., None] * wide + groups.minimum[..., None]).view(found.shape)


@native_only
@pytest.mark.parametrize("precision", ["8 bits", "4 bits"])
def test_quantized_experts_equal_their_dequantized_weights(precision: str) -> None:
    """All experts are chosen, because rounded inputs would choose others."""
    config = config_of("Mixtral", num_local_experts=3, num_experts_per_tok=3)
    about, outputs = config.experts, []
    assert about is not None
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    quantized = ScaledCheckpoint(config, has_groups=precision == "4 bits")
    for checkpoint, backend in (
        (quantized, NATIVE[precision]()), (Dequantized(config, precision), PlainBackend()),
    ):  # fmt: skip
        experts = Decoder(checkpoint, backend).layers[0].experts
        assert experts is not None
        routing = Routing(backend, x, experts, about)
        outputs.append(routing.outputs(experts, "silu", lambda x, multiply: multiply(x)))
    found, expected = outputs
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < errors.max() < 0.02, errors


@native_only
def test_weights_of_experts_that_are_not_chosen_are_not_read() -> None:
    model = Decoder(weights("qwen3_moe", "float32"), NativeBackend())
    expected = real.logits_of(model, [5])
    unread = 0
    experts = model.layers[0].experts
    assert experts is not None
    for each in (*experts.gate_up, *experts.down):
        assert isinstance(each, NativeWeight)
        kept = each.packed.clone()
        each.packed.fill_(torch.nan)
        if torch.equal(real.logits_of(model, [5]), expected):
            unread += 1
        else:
            each.packed.copy_(kept)
    assert unread == 2 * (24 - 4)


@native_only
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_compute_what_one_rank_computes(name: str) -> None:
    """Each has a part of every expert; bit for bit with exact sums."""
    tokens = list(range(3, 40))
    for precision, backend in (*NATIVE.items(), ("plain", PlainBackend)):
        with torch.inference_mode():
            alone = real.logits_of(Decoder(weights(name, precision), backend()), tokens)
        if precision != "plain":
            for found in of_ranks(name, precision, backend, tokens, is_exact=True):
                assert torch.equal(found, alone), precision
        if precision in ("float32", "plain"):
            for found in of_ranks(name, precision, backend, tokens, is_exact=False):
                torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)


def of_ranks(
    name: str, precision: str, backend: Callable[[], Backend], tokens: list[int], *, is_exact: bool
) -> list[torch.Tensor]:
    ranks = ThreadRanks(2, lambda: weights(name, precision), lambda _: backend(), is_exact=is_exact)
    return list(ranks.run(lambda rank: real.logits_of(ranks.decoders[rank], tokens)))


def test_what_needs_other_code_is_named(saved: Saved) -> None:
    config = CONFIGS["qwen3_moe"]
    with pytest.raises(ConfigError, match="fp8 is not supported for experts, .* --dtype bfloat16"):
        choose_backend(config, "fp8", "cuda")
    with pytest.raises(ConfigError, match=r"divided among 1, 2 ranks"):
        check_size(config, 4)
    with pytest.raises(ModelError, match="num_experts_per_tok is 9, but .* only 8 experts"):
        config_of("Mixtral", num_experts_per_tok=9)
    with pytest.raises(ModelError, match=r"mlp_only_layers is \[None\]; it must be a list"):
        config_of("Qwen3Moe", mlp_only_layers=[None])
    wide = config_of("Qwen3Moe", moe_intermediate_size=90)
    assert why_not_native() or "expert width 90" in str(why_not_native(wide))
    normed = replace(config, has_output_norms=True)
    assert why_not_native() or "experts without a norm" in str(why_not_native(normed))
    many = config_of("Mixtral", num_local_experts=2000)
    assert why_not_native() or "2000 experts, above 1024" in str(why_not_native(many))


def test_sizes_of_the_weights_are_known_before_they_are_loaded() -> None:
    config = CONFIGS["qwen2_moe"]
    model = Decoder(DummyCheckpoint(config), PlainBackend())
    shapes = [shape for shape in config.shapes().values() if len(shape) == 2]
    assert model.num_bytes == 4 * sum(rows * columns for rows, columns in shapes)
    assert model.num_bytes < weight_bytes(config, PlainBackend()) < 1.01 * model.num_bytes
    experts = [layer.experts for layer in model.layers if layer.experts]
    assert sum(each.expert_bytes for each in experts) == 2 * 4 * 4 * 3 * 64 * 64
    dense = config_of("Qwen3Moe", num_experts=4, mlp_only_layers=[0, 1])
    assert dense.experts is None and not dense.cpu_only


def test_the_forms_of_experts_are_measured_for_one_of_them() -> None:
    config = CONFIGS["qwen2_moe"]
    names = forms._names(config, "gate_up")
    assert names == [f"model.layers.0.mlp.experts.0.{each}_proj" for each in ("gate", "up")]
    assert {forms.matrix_of(name) for name in names} == {"gate_up"}
    assert forms._names(CONFIGS["mixtral"], "down")[0].endswith("block_sparse_moe.experts.0.w2")
    assert forms.matrix_of("block_sparse_moe.experts.0.w2") == "down"
    assert not forms.matrix_of("model.layers.0.mlp.gate"), "a router stays in floats"
