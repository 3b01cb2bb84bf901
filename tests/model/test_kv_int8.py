"""The int8 KV cache of the native kernels: rounding, batch invariance, sizes and errors."""

from __future__ import annotations

import ctypes
import platform
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.loading import fit
from headway.model import precision
from headway.model.backends.base import PassArguments, kv_itemsize
from headway.model.backends.native import build
from headway.model.backends.native.backend import NativeBackend, NativePass, unsupported_reason
from headway.model.backends.native.kv_probe import probe_kv_cache
from headway.model.backends.plain import PlainBackend
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.precision import choose_backend, kv_dtype_for, why_not_native
from headway.options import EngineOptions
from tests.model.test_batch_invariance import (
    EPSILON,
    WINDOWED,
    ScaledCheckpoint,
    _generator,
    drop_some_slots,
    logits_in_batches,
    random_batch,
    sizes,
)
from tests.support import real

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MAX_ROUNDED, MAX_KEYS = 32639, 64  # kv_bytes.c


def unpacked(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The integers [..., D] and the scales [..., 1] of int8 blocks."""
    return blocks[..., :-4], blocks[..., -4:].contiguous().view(torch.float32)


def begin(
    config: ModelConfig, batch: ForwardBatch, blocks: Tensor, kv_dtype: torch.dtype | None
) -> Any:
    angles = torch.rand(config.max_model_len, config.head_dim // 2, generator=_generator(1)) * 6
    backend = NativeBackend(kv_dtype=kv_dtype)
    return NativePass(backend, PassArguments(config, batch, blocks, angles.cos(), angles.sin()))


def supported(config: ModelConfig) -> ModelConfig:
    if reason := unsupported_reason(config):
        pytest.skip(reason)
    return config


@pytest.mark.parametrize("head_dim", [20, 64, 256])
def test_rows_are_rounded_to_the_nearest_multiple_of_their_scale(head_dim: int) -> None:
    config, rng = supported(sizes(6, 2, head_dim)), random.Random(head_dim)
    for block_size in (1, 16):
        batch, num_blocks = random_batch(rng, block_size)
        drop_some_slots(batch, rng)
        kinds = (None, torch.int8)
        exact, found = (
            NativeBackend(kv_dtype=kind).kv_blocks(config, num_blocks, block_size).fill_(77)
            for kind in kinds
        )
        qkv = torch.randn(len(batch.tokens_t), 10 * head_dim, generator=_generator(head_dim))
        qkv[0], qkv[-1] = 0, qkv[-1] * 1e-35  # rows without a scale
        for kind, blocks in zip(kinds, (exact, found), strict=True):
            begin(config, batch, blocks, kind).rotate_and_store(1, qkv.clone(), None, None)
        stored = (exact != 77).any(-1)
        assert ((found != 77).any(-1) == stored).all()
        (q, scale), exact = unpacked(found[stored]), exact[stored]
        top = exact.abs().amax(-1, keepdim=True)
        assert torch.equal(scale, torch.where(top > 1e-30, top / 127, 0))
        steps = torch.where(top > 1e-30, exact * (torch.tensor(127.0) / top), 0).round()
        assert torch.equal(q.float(), steps)
        assert ((q * scale - exact).abs() <= scale * (0.5 + 128 * EPSILON) + 1e-30).all()


@pytest.mark.parametrize("head_dim", [20, 64, 80, 256])
def test_attention_differs_from_the_exact_one_by_the_rounding_to_16_bits(head_dim: int) -> None:
    """Against float64 with the numbers of the stored rows.

    A query's numbers are rounded by at most half a step, its largest number / MAX_ROUNDED. So a
    score changes by at most e, a weight by a factor of at most exp(2 e), and the output by that
    factor of the largest value. Weights are rounded too, by half a step of the largest in their
    tile; these add up to 1 at most. The last term is for the rounding of float32.
    """
    rng = random.Random(head_dim)
    for group, block_size in ((1, 16), (3, 1), (7, 16), (8, 64)):
        config = supported(sizes(2 * group, 2, head_dim))
        batch, num_blocks = random_batch(rng, block_size)
        blocks = torch.randint(-127, 128, (num_blocks, 2, 2, 2, block_size, head_dim + 4))
        blocks = blocks.to(torch.int8)
        scales = torch.rand(*blocks.shape[:-1], 1, generator=_generator(num_blocks)) / 60
        blocks[..., -4:] = scales.view(torch.int8)
        width = 2 * (group + 2) * head_dim
        qkv = torch.randn(len(batch.tokens_t), width, generator=_generator(width)) * 1.5
        sinks = torch.linspace(-9, 9, config.num_heads) if group == 3 else None
        found = begin(config, batch, blocks, torch.int8).attention(1, qkv, sinks)
        wide = blocks[..., :-4].double() * scales
        angles = torch.zeros(len(batch.tokens_t), head_dim // 2)
        given = PassArguments(config, batch, wide, angles, angles)
        plain: Any = PlainBackend(torch.float64).begin(given)
        exact = plain.attention(1, qkv.double(), sinks)
        keys, values = (127 * scales[:, 1, kind].max() for kind in (0, 1))
        top = qkv.view(len(qkv), -1, head_dim)[:, : 2 * group].abs().amax(-1, keepdim=True)
        e = top / MAX_ROUNDED / 2 * head_dim**0.5 * keys
        limit = values * ((e * 2).expm1() + MAX_KEYS / MAX_ROUNDED / 2 + 300 * EPSILON)
        assert ((found - exact).abs().view(len(qkv), -1, head_dim) <= limit).all()


CONFIGS = {
    "as the bundled model": sizes(9, 3, 64, tie_word_embeddings=True),
    "7 query heads per KV head, head size 20": sizes(7, 1, 20, "Qwen3", attention_bias=True),
    "8 query heads per KV head, wide heads": sizes(8, 1, 256),
    "sliding windows, output norms": WINDOWED,
}


@cache
def decoder(name: str) -> Decoder:
    return Decoder(ScaledCheckpoint(supported(CONFIGS[name])), NativeBackend(kv_dtype=torch.int8))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_bit_identical_alone_and_in_any_batch(name: str) -> None:
    model, rng = decoder(name), random.Random(name)
    sequences = [[rng.randrange(131) for _ in range(length)] for length in (1, 31, 65, 130)]
    alone = [real.logits_of(model, tokens) for tokens in sequences]
    assert all(logits.isfinite().all() for logits in alone)
    for block_size in (5, 16):
        found = logits_in_batches(model, sequences, block_size, rng)
        assert all(map(torch.equal, alone, found)), block_size


def test_logits_are_near_those_with_a_float_cache_but_not_equal() -> None:
    tokens = list(range(3, 90))
    exact = Decoder(ScaledCheckpoint(CONFIGS["as the bundled model"]), NativeBackend())
    wide, narrow = (real.logits_of(m, tokens) for m in (exact, decoder("as the bundled model")))
    distance = (wide - narrow).norm() / wide.norm()
    assert 1e-4 < distance < 0.1


CRAMPED = {"preset": "vllm_v1", "block_size": 2, "num_blocks": 44, "victim": "least_work"}


@pytest.mark.parametrize(
    ("settings", "happened"),
    [
        ({**CRAMPED, "swap": "swap", "num_host_blocks": 300}, "num_swapped"),
        ({**CRAMPED, "swap": "recompute"}, "num_recomputed"),
        ({"block_size": 4, "chunk": "at_most(7)"}, "num_cached"),
    ],
    ids=["swap", "recompute", "chunks and prefix hits"],
)
def test_no_setting_changes_a_token(settings: dict[str, Any], happened: str) -> None:
    model, rng = decoder("as the bundled model"), random.Random(9)
    shared = [rng.randrange(131) for _ in range(12)]
    prompts = {f"{n}": [*shared, *(rng.randrange(131) for _ in range(n))] for n in range(1, 9)}
    roomy = real.Trial(model, block_size=64, max_num_seqs=1).ask_one(prompts, 12)
    trial = real.Trial(model, **settings)
    for _ in range(2):
        assert trial.ask_one(prompts, 12) == roomy
    assert getattr(trial.seen, happened) >= 8, trial.seen
    assert happened != "num_swapped" or min(trial.seen.num_copied) >= 20


# The instructions of this CPU, and portable C.

HARNESS = """
#include "vectors.c"
#include "kv_floats.c"
#include "kv_bytes.c"
void run(const float *query, const float *rows, int64_t count, int64_t D, char *stored,
         float (*scores)[64], float (*out)[MAX_HEAD]) {
    const char *keys[KEYS];
    float weights[3][KEYS] = {{0}};
    Rounded rounded;
    for (int64_t j = 0; j < KEYS; j++) {
        keys[j] = j < count ? stored + j * (D + SCALE_BYTES) : (const char *)nothing;
        if (j < count) store_bytes(rows + j * D, D, stored + j * (D + SCALE_BYTES));
    }
    round_all(query, D, &rounded);
    for (int r = 0; r < 3; r++) {
        score_bytes(&rounded, keys, (int)count, D, r / 32.0f, scores[r]);
        memcpy(weights[r], scores[r], (size_t)count * 4);
    }
    add_values(weights, 3, keys, (int)count, D, out);
}
"""
CPU_INFO = Path("/proc/cpuinfo")
FEATURES = CPU_INFO.read_text(encoding="utf-8").split() if CPU_INFO.exists() else []
HAS_AVX2 = {"avx2", "fma", "f16c"} <= set(FEATURES)
PORTABLE = {"aarch64": ["armv8-a"], "x86_64": ["x86-64", "haswell"] if HAS_AVX2 else ["x86-64"]}


@pytest.mark.skipif(platform.machine() not in PORTABLE, reason="Arm or x86")
def test_portable_code_gives_the_same_bits(tmp_path: Path) -> None:
    source = tmp_path / "harness.c"
    source.write_text(HARNESS, encoding="utf-8")
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", build.NATIVE)]
    found = []
    others = [f"-march={name}" for name in PORTABLE[platform.machine()]]
    for number, cpu in enumerate((build.NATIVE, *others)):
        target = tmp_path / f"{number}.so"
        command = ["gcc", *flags, "-O1", cpu, f"-I{build.SOURCE.parent}", "-shared", str(source)]
        subprocess.run([*command, "-o", str(target), "-lm"], check=True)
        found.append(_harness_results(ctypes.CDLL(str(target))))
    for own, *portable in zip(*found, strict=True):
        assert all(torch.equal(own, each) for each in portable)


def _harness_results(library: ctypes.CDLL) -> list[Tensor]:
    """Rows, scores and outputs for some head sizes, compared with float64."""
    results, count = [], 21
    for head_dim in (16, 48, 64, 144, 256):
        rows = torch.randn(count, head_dim, generator=_generator(head_dim))
        query = torch.randn(head_dim, generator=_generator(head_dim + 1))
        rows[1], query[3] = -rows[0].abs().max(), 9.0
        stored = torch.zeros(count, head_dim + 4, dtype=torch.int8)
        scores, out = torch.zeros(3, 64), torch.zeros(3, 256)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (query, rows, stored, scores, out)]
        numbers = ctypes.c_int64(count), ctypes.c_int64(head_dim)
        library.run(*pointers[:2], *numbers, *pointers[2:])
        exact = torch.mul(*unpacked(stored)).double()
        expected = torch.arange(3)[:, None] / 32 * (exact @ query.double())
        near = {"rtol": 1e-3, "atol": 1e-2, "check_dtype": False}
        torch.testing.assert_close(scores[:, :count], expected, **near)
        torch.testing.assert_close(out[:, :head_dim], expected @ exact, **near)
        results += [stored, scores[:, :count], out]
    return results


def test_the_same_memory_holds_nearly_four_times_as_many_blocks() -> None:
    config, memory = CONFIGS["as the bundled model"], 10**7
    found = {}
    for kind in (torch.float32, torch.int8):
        backend = NativeBackend(kv_dtype=kind)
        fitted = fit(
            config, kv_itemsize(backend, config), EngineOptions(preset="vllm_v1", kv_memory=memory)
        )
        block = backend.kv_blocks(config, 1, fitted.block_size).nbytes
        assert fitted.num_blocks == memory // block
        found[kind] = fitted.num_blocks
    assert found[torch.int8] / found[torch.float32] == pytest.approx(4 * 64 / 68, rel=0.01)


def test_the_probe_measures_both_types() -> None:
    wide, narrow = probe_kv_cache(sizes(2, 1, 32))
    assert (wide.dtype, narrow.dtype) == ("float32", "int8")
    assert (wide.token_bytes, narrow.token_bytes) == (2 * 2 * 32 * 4, 2 * 2 * 36)
    assert min(wide.seconds, narrow.seconds) > 0
    assert probe_kv_cache(sizes(2, 1, 512)) == []


def test_an_int8_cache_needs_a_cpu_and_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["as the bundled model"]
    assert kv_dtype_for("int8", CPU) == torch.int8
    for name in ("float32", "int8"):
        backend = choose_backend(config, name, CPU, torch.int8)
        assert backend.kv_blocks(config, 1, 2).dtype == torch.int8
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 .*CPUs only.*fp8 or auto.*cpu"):
        kv_dtype_for("int8", CUDA)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 .*float32 .*not in bfloat16.*auto"):
        choose_backend(config, "bfloat16", CPU, torch.int8)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 .*head size 512 .*auto"):
        choose_backend(sizes(2, 1, 512), "float32", CPU, torch.int8)
    monkeypatch.setattr(precision, "why_not_native", lambda _: "no C compiler found")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 .*no C compiler found.*auto"):
        choose_backend(config, "float32", CPU, torch.int8)
