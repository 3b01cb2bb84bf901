"""The native CPU kernels: each against the plain backend, and their batch invariance.

The logits of a sequence are bit-identical whatever else is in the batch, however its prompt is
split into chunks, and for every block size and order of blocks. All other equality tests rely on
this.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.model.backends.base import PassArguments, PassOutput
from headway.model.backends.native import weights as packing
from headway.model.backends.native.backend import NativeBackend
from headway.model.backends.plain import PlainBackend
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.precision import why_not_native
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import DummyCheckpoint, QuantizedMatrix
from headway.model.weights.mxfp4 import INTEGERS
from tests.support import real

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))

EPSILON = 2.0**-24  # half the distance from 1 to the next float32


class ScaledCheckpoint(DummyCheckpoint):
    """Random weights, scaled up to make attention sharp; optionally in groups of 4 bits."""

    def __init__(self, config: ModelConfig, *, has_groups: bool = False) -> None:
        super().__init__(config)
        self._has_groups = has_groups

    def whole(self, name: str) -> Tensor:
        quiet = super().whole(name)
        if name.endswith("norm.weight"):
            return quiet + 0.2 * torch.randn(quiet.shape, generator=_generator(len(name)))
        return quiet * 8

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        return four_bits(self.read(name, part)) if self._has_groups else None


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def four_bits(matrix: Tensor, bits: int = 4) -> QuantizedMatrix:
    """A matrix in groups as in GGUF's Q4_1; scales and minima are exact in float16."""
    grouped = matrix.view(len(matrix), -1, packing.GROUP)
    minimum = grouped.amin(2).half().float()
    scale = ((grouped.amax(2) - minimum) / (2**bits - 1)).half().float()
    steps = (grouped - minimum[..., None]) / scale[..., None]
    q = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
    return QuantizedMatrix(q=q, scale=scale, minimum=minimum, bits=bits)


def sizes(
    heads: int, kv_heads: int, head_dim: int, kind: str = "Llama", **more: Any
) -> ModelConfig:
    numbers = {
        "architectures": [f"{kind}ForCausalLM"], "vocab_size": 131, "hidden_size": 96,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip
    return from_hf(numbers, "test")


KINDS = ("sliding_attention", "full_attention", "sliding_attention")
WINDOWED = sizes(
    4, 1, 32, "Gemma3", layer_types=list(KINDS), num_hidden_layers=len(KINDS), sliding_window=40,
    query_pre_attn_scalar=24, hidden_size=128,
)  # fmt: skip
CONFIGS = {
    "as the bundled model": sizes(9, 3, 64, tie_word_embeddings=True),
    "7 query heads per KV head, with norms": sizes(7, 1, 32, "Qwen3", attention_bias=True),
    "1 query head per KV head, with biases": sizes(3, 3, 80, "Qwen2"),
    "8 query heads per KV head, wide heads": sizes(8, 1, 256),
    "sliding windows, output norms": WINDOWED,
}


@cache
def decoder(name: str, precision: str) -> Decoder:
    checkpoint = ScaledCheckpoint(CONFIGS[name], has_groups=precision == "4 bits")
    return Decoder(checkpoint, NativeBackend(is_quantized=precision != "float32"))


Sequences = list[list[int]]


def shuffled_tables(widths: list[int], rng: random.Random) -> list[list[int]]:
    """Tables of these widths over blocks in random order, of which three are left."""
    numbers = list(range(sum(widths) + 3))
    rng.shuffle(numbers)
    return [[numbers.pop() for _ in range(width)] for width in widths]


@torch.inference_mode()
def logits_in_batches(
    model: Decoder, sequences: Sequences, block_size: int, rng: random.Random
) -> list[Tensor]:
    """Logits at every position of every sequence, computed in random chunks and batches.

    Blocks of sliding-window layers are overwritten when no later token needs them: with NaN, or
    with bytes of -1, whose scales are NaN.
    """
    widths = [-(-len(tokens) // block_size) for tokens in sequences]
    tables, window_tables = shuffled_tables(widths, rng), shuffled_tables(widths, rng)
    num_tokens, window = (sum(widths) + 3) * block_size, model.config.sliding_window
    blocks, window_blocks = real.blocks_for(model, num_tokens, block_size), None
    if window is not None:
        window_blocks = real.blocks_for(model, num_tokens, block_size, windowed=True)
    found: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while left := [s for s, tokens in enumerate(sequences) if done[s] < len(tokens)]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        steps = [rng.choice((1, 1, 2, 5, 17, 63, 64, 200)) for _ in chosen]
        parts = [
            (sequences[s][done[s] : done[s] + step], done[s], tables[s])
            for s, step in zip(chosen, steps, strict=True)
        ]
        batch = real.batch_of(parts, block_size)
        batch.sampled_n = torch.arange(len(batch.tokens_t))
        own = [(*part[:2], window_tables[s]) for s, part in zip(chosen, parts, strict=True)]
        batch.windowed = replace(real.batch_of(own, block_size), window=window)
        output = model.run(batch, blocks, window_blocks=window_blocks)
        assert output.logits is not None and output.best is not None
        logits = output.logits.clone()
        assert output.best.tolist() == logits.argmax(-1).tolist()
        for s, rows in zip(
            chosen, torch.split(logits, [len(part[0]) for part in parts]), strict=True
        ):
            found[s].append(rows)
            done[s] += len(rows)
            if window is not None and window_blocks is not None:
                unseen = max(0, done[s] + 1 - window) // block_size
                is_float = window_blocks.is_floating_point()
                window_blocks[window_tables[s][:unseen]] = math.nan if is_float else -1
    return [torch.cat(rows) for rows in found]


@pytest.mark.parametrize("precision", ["float32", "8 bits", "4 bits"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_bit_identical_alone_and_in_any_batch(name: str, precision: str) -> None:
    model, rng = decoder(name, precision), random.Random(f"{name} {precision}")
    lengths = [1, 2, 31, 64, 65, 130]
    sequences = [[rng.randrange(131) for _ in range(length)] for length in lengths]
    sequences.append([*sequences[-1][:50], 7])  # shares a prefix with another
    alone = [real.logits_of(model, tokens) for tokens in sequences]
    assert all(logits.isfinite().all() for logits in alone)
    for block_size in (1, 5, 16, 64):
        for tokens, one, other in zip(
            sequences, alone, logits_in_batches(model, sequences, block_size, rng), strict=True
        ):
            assert torch.equal(one, other), (block_size, len(tokens), (one - other).abs().max())


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_bundled_model_gives_bit_identical_logits_in_prefill_and_decode(precision: str) -> None:
    model, rng = real.decoder(precision), random.Random(precision)
    names = ("name", "chat", "emoji")
    sequences = [real.prompts()[name] + real.reference()[name][:8] for name in names]
    alone = [real.logits_of(model, tokens) for tokens in sequences]
    for one, other in zip(alone, logits_in_batches(model, sequences, 16, rng), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["as the bundled model", "sliding windows, output norms"])
def test_logits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    rng, before = random.Random(3), torch.get_num_threads()
    tokens = [rng.randrange(131) for _ in range(70)]
    for precision in ("float32", "8 bits", "4 bits"):
        model = decoder(name, precision)
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                found.append(real.logits_of(model, tokens))
            finally:
                torch.set_num_threads(before)
        assert torch.equal(*found), precision


@pytest.mark.parametrize("vocab_size", [3, 131, 600])
def test_the_best_token_is_the_first_with_the_highest_logit(vocab_size: int) -> None:
    """Repeated rows of the head give equal logits."""

    class Repeating(DummyCheckpoint):
        def whole(self, name: str) -> Tensor:
            found = super().whole(name)
            if name == "lm_head.weight":
                found = found[torch.arange(vocab_size) % (vocab_size // 2 + 1)]
            return found

    model = Decoder(Repeating(sizes(2, 1, 32, vocab_size=vocab_size)), NativeBackend())
    batch = real.whole([1, 2, 0, 1, 1])
    batch.sampled_n = torch.tensor([4, 0, 2])
    output, hidden = run_whole(model, batch), model.forward(batch, real.blocks_for(model, 5))
    assert output.logits is not None and output.best is not None
    assert torch.equal(output.hidden, hidden)
    assert torch.equal(output.logits, model.logits(hidden[batch.sampled_n]))
    assert output.best.tolist() == output.logits.numpy().argmax(-1).tolist()
    batch.sampled_n = batch.sampled_n[:0]
    output = run_whole(model, batch)
    assert output.logits is output.best is None and torch.equal(output.hidden, hidden)


def run_whole(model: Decoder, batch: ForwardBatch) -> PassOutput:
    return model.run(batch, real.blocks_for(model, len(batch.tokens_t)))


def test_two_decoders_can_share_a_backend() -> None:
    """A backend keeps no data of one model that it uses for another."""
    tokens, backend, config = [3, 1, 4, 1, 5], NativeBackend(), CONFIGS["as the bundled model"]
    for checkpoint in (ScaledCheckpoint(config), DummyCheckpoint(config)):
        shared, own = Decoder(checkpoint, backend), Decoder(checkpoint, NativeBackend())
        assert torch.equal(real.logits_of(shared, tokens), real.logits_of(own, tokens))


def error_bound(x: Tensor, matrix: Tensor, steps: int) -> Tensor:
    """The largest error of a product in float32, with `steps` roundings per sum."""
    return (steps + 2) * EPSILON * (x.abs().double() @ matrix.abs().double().T) + 1e-30


def multiplied(weight: packing.NativeWeight, x: Tensor, onto: Tensor | None) -> Tensor:
    backend = NativeBackend()
    return (
        backend.linear(x, weight) if onto is None else backend.add_linear(onto.clone(), x, weight)
    )


@pytest.mark.parametrize("num_outputs", [1, 31, 33, 64, 100, 129])
def test_float_products_are_exact_up_to_rounding(num_outputs: int) -> None:
    random_numbers = _generator(num_outputs)
    for num_rows in (*range(1, 15), 24, 40, 97, 200):
        for num_inputs in (1, 7, 96):
            x = torch.randn(num_rows, num_inputs, generator=random_numbers)
            matrix = torch.randn(num_outputs, num_inputs, generator=random_numbers)
            bias = torch.randn(num_outputs, generator=random_numbers)
            onto = torch.randn(num_rows, num_outputs, generator=random_numbers)
            exact, most = x.double() @ matrix.double().T, error_bound(x, matrix, num_inputs)
            plain = multiplied(packing.pack_floats(matrix, None), x, None)
            assert ((plain - exact).abs() <= most).all()
            added = multiplied(packing.pack_floats(matrix, bias), x, onto) - onto.double()
            slack = 4 * EPSILON * (onto.abs() + bias.abs() + exact.abs())
            assert ((added - exact - bias).abs() <= most + slack).all()


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs rounded to 8 bits in groups of 32, as the quantized product does, and the scales."""
    grouped = x.view(len(x), -1, packing.GROUP)
    most = grouped.abs().amax(2, keepdim=True)
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, 0)  # 127 / most would round twice
    return (grouped * inverse).round(), most / 127


def quantized_product(x: Tensor, groups: QuantizedMatrix) -> tuple[Tensor, Tensor]:
    """The product of rounded inputs and integer weights, and the sum of absolute terms."""
    steps_of_x, step = (part.double() for part in rounded(x))
    q = groups.q.double().view(len(groups.q), -1, packing.GROUP)
    dots = torch.einsum("mgk,ngk->mgn", steps_of_x, q)
    main = dots * step * groups.scale.double().T
    rest = (steps_of_x.sum(2, keepdim=True) * step) * groups.minimum.double().T
    return (main + rest).sum(1), (main.abs() + rest.abs()).sum(1)


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("num_outputs", [1, 63, 65, 130])
def test_quantized_products_are_exact_up_to_rounding(num_outputs: int, bits: int) -> None:
    random_numbers = _generator(num_outputs + bits)
    for num_rows in (*range(1, 18), 24, 32, 33, 40):
        for num_inputs in (32, 64, 160):
            x = torch.randn(num_rows, num_inputs, generator=random_numbers)
            x[0, :32] = 0  # a group of zeros has no scale
            matrix = torch.randn(num_outputs, num_inputs, generator=random_numbers)
            groups = packing.quantize(matrix) if bits == 8 else four_bits(matrix, bits)
            bias = torch.randn(num_outputs, generator=random_numbers)
            exact, parts = quantized_product(x, groups)
            most = (2 * num_inputs // 32 + 6) * EPSILON * (parts + bias.abs()) + 1e-30
            found = multiplied(packing.pack_groups(groups, bias), x, None)
            assert ((found - exact - bias).abs() <= most).all()
            onto = torch.ones(num_rows, num_outputs)
            added = multiplied(packing.pack_groups(groups, None), x, onto)
            assert ((added - exact - 1).abs() <= most + 4 * EPSILON * (1 + exact.abs())).all()


def test_products_with_codes_of_mxfp4_are_bit_identical_to_those_with_its_integers() -> None:
    random_numbers = _generator(3)
    for num_outputs, num_inputs in ((65, 160), (16, 32)):
        shape = num_outputs, num_inputs
        codes = torch.randint(16, shape, dtype=torch.uint8, generator=random_numbers)
        scale = torch.randint(-9, 3, (num_outputs, num_inputs // 32), generator=random_numbers)
        scale, integers = 2.0**scale, torch.tensor(INTEGERS, dtype=torch.uint8)
        coded = QuantizedMatrix(q=codes, scale=scale, minimum=-12 * scale, bits=4, is_coded=True)
        stacked = packing.stack([coded, coded])
        wide = replace(stacked, q=integers[stacked.q.int()], bits=5, is_coded=False)
        found, expected = (packing.pack_groups(each, None) for each in (stacked, wide))
        assert found.num_bytes * 36 == expected.num_bytes * 20
        for num_rows in (1, 2, 7, 8, 17, 40):
            x = torch.randn(num_rows, num_inputs, generator=random_numbers)
            assert torch.equal(multiplied(found, x, None), multiplied(expected, x, None))
        ids = torch.arange(2 * num_outputs)
        assert torch.equal(found.rows(ids), expected.rows(ids))


@pytest.mark.parametrize("bits", [4, 5, 8, 32])
@pytest.mark.parametrize("num_outputs", [1, 65, 130])
def test_a_row_of_a_product_is_bit_identical_for_any_number_of_rows(
    num_outputs: int, bits: int
) -> None:
    """Different numbers of rows use different instructions."""
    random_numbers = _generator(num_outputs + bits)
    for num_inputs in (32, 64, 160, 576):
        matrix = torch.randn(num_outputs, num_inputs, generator=random_numbers)
        bias = torch.randn(num_outputs, generator=random_numbers)
        if bits == 32:
            weight = packing.pack_floats(matrix, bias)
        else:
            groups = packing.quantize(matrix) if bits == 8 else four_bits(matrix, bits)
            weight = packing.pack_groups(groups, bias)
        x = torch.randn(100, num_inputs, generator=random_numbers)
        x[1] *= 1e-30
        onto = torch.randn(100, num_outputs, generator=random_numbers)
        alone = [multiplied(weight, x[i : i + 1], onto[i : i + 1]) for i in range(100)]
        for num_rows in (2, 8, 16, 31, 32, 33, 47, 48, 64, 100):
            together = multiplied(weight, x[:num_rows], onto[:num_rows])
            assert torch.equal(together, torch.cat(alone[:num_rows])), (num_inputs, num_rows)


@pytest.mark.parametrize("bits", [4, 5, 8, 32])
def test_unpacked_rows_equal_the_packed_matrix(bits: int) -> None:
    matrix = torch.randn(75, 96, generator=_generator(bits))
    groups = packing.quantize(matrix) if bits == 8 else four_bits(matrix, min(bits, 5))
    weight = packing.pack_floats(matrix, None) if bits == 32 else packing.pack_groups(groups, None)
    wide = groups.q.view(75, -1, packing.GROUP).double() * groups.scale[..., None].double()
    unpacked = (wide + groups.minimum[..., None]).flatten(1)
    ids = torch.tensor([74, 0, 15, 16, 16, 63, 64])
    expected = matrix[ids] if bits == 32 else unpacked[ids]
    most = 4 * EPSILON * wide.abs().max() if bits < 32 else 0.0
    assert ((weight.rows(ids) - expected).abs() <= most).all()


@pytest.mark.parametrize("width", [1, 15, 16, 33, 576])
def test_norms_match_the_plain_backend(width: int) -> None:
    for num_rows in (1, 4, 5, 37):
        x = torch.randn(num_rows, width, generator=_generator(width)) * 3
        weight = torch.randn(width, generator=_generator(width + 1))
        found = NativeBackend().rms_norm(x, weight, 1e-5)
        expected = PlainBackend(torch.float64).rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-7)


# Relative: the exponent, up to 87, is a rounded cubic. Absolute: 1 + tanh(u) loses digits near -1.
GELU_ERRORS = 4 * 87 * EPSILON, 1e-12


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_swiglu"])
def test_gates_match_the_plain_backend_and_handle_overflow(activation: str) -> None:
    for num_rows, width in ((1, 16), (3, 48), (9, 1536)):
        x = torch.randn(num_rows, 2 * width, generator=_generator(width)) * 20
        x[0, :8] = torch.tensor([0.0, -0.0, 88.5, -88.5, 1e4, -1e4, 3e38, -3e38])
        x[0, width : width + 8] = 0.5
        exact = PlainBackend(torch.float64).gated(x.double(), activation)
        found = NativeBackend().gated(x, activation)
        rtol, atol = (1e-6, 1e-33) if activation == "silu" else GELU_ERRORS
        torch.testing.assert_close(found, exact.float(), rtol=rtol, atol=2e-36 * 3e38)
        torch.testing.assert_close(found[:, 8:], exact[:, 8:].float(), rtol=rtol, atol=atol)


def random_batch(rng: random.Random, block_size: int) -> tuple[ForwardBatch, int]:
    """A batch of chunks at random positions, and the number of blocks it needs."""
    parts, num_blocks = [], 0
    for _ in range(rng.randint(1, 6)):
        end = rng.choice((1, 3, 16, 63, 64, 65, 100))
        first = rng.choice((0, end // 2, end - 1))
        width = -(-end // block_size)
        parts.append(([0] * (end - first), first, range(num_blocks, num_blocks + width)))
        num_blocks += width
    order = list(range(num_blocks))
    rng.shuffle(order)
    mixed = [(tokens, first, [order[b] for b in blocks]) for tokens, first, blocks in parts]
    return real.batch_of(mixed, block_size), num_blocks


OnBackend = tuple[Any, Tensor]  # a pass that can run the steps of a layer, and its cache


def on_both_backends(config: ModelConfig, batch: ForwardBatch, blocks: Tensor) -> list[OnBackend]:
    """The same batch and cache on the native backend in float32 and the plain one in float64."""
    generator = _generator(int(batch.ends_s.sum()))
    angles = torch.rand(config.max_model_len, config.head_dim // 2, generator=generator) * 6
    pair: list[OnBackend] = []
    for backend, kind in (
        (NativeBackend(), torch.float32),
        (PlainBackend(torch.float64), torch.float64),
    ):
        copy = blocks.to(kind, copy=True)
        own = angles if backend.uses_rope_table else angles[batch.positions_t]
        given = PassArguments(config, batch, copy, own.cos(), own.sin())
        pair.append((backend.begin(given), copy))
    return pair


def sinks_of(config: ModelConfig) -> Tensor:
    """Below, among and above the scores of keys."""
    return torch.randn(config.num_heads, generator=_generator(config.num_heads)) * 20


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
def test_attention_matches_the_plain_backend(head_dim: int) -> None:
    rng = random.Random(head_dim)
    for group in (1, 2, 3, 4, 7, 8):
        for block_size in (1, 16, 64):
            kv_heads = rng.choice((1, 2))
            config = sizes(group * kv_heads, kv_heads, head_dim)
            batch, num_blocks = random_batch(rng, block_size)
            shape = (num_blocks, 2, 2, kv_heads, block_size, head_dim)
            blocks = torch.randn(shape, generator=_generator(num_blocks))
            (native, _), (plain, _) = on_both_backends(config, batch, blocks)
            width = (group + 2) * kv_heads * head_dim
            qkv = torch.randn(len(batch.tokens_t), width, generator=_generator(width)) * 1.5
            sinks = sinks_of(config) if block_size == 16 else None
            found = native.attention(1, qkv, sinks)
            exact = plain.attention(1, qkv.double(), sinks)
            torch.testing.assert_close(found, exact.float(), rtol=2e-5, atol=5e-6)


def test_a_sink_takes_its_part_of_the_attention() -> None:
    config, batch = sizes(4, 2, 32), real.whole(range(9))
    blocks = torch.randn((1, 2, 2, 2, 16, 32), generator=_generator(2))
    (_, _), (plain, cache) = on_both_backends(config, batch, blocks)
    qkv = torch.randn(9, 8 * 32, generator=_generator(3)).double()
    q, k, v = qkv[-1].view(8, 32)[:4], *(cache[0, 1, :, :, :9].repeat_interleave(2, dim=1))
    sinks = torch.tensor([-50.0, -1.0, 0.5, 50.0])
    logits = torch.einsum("hd,hpd->hp", q, k) / 32**0.5
    weights = torch.cat([logits, sinks[:, None]], dim=1).softmax(1)[:, :-1]
    expected = torch.einsum("hp,hpd->hd", weights, v).flatten()
    torch.testing.assert_close(plain.attention(1, qkv, sinks)[-1], expected)


@pytest.mark.parametrize("head_dim", [32, 256])
def test_windowed_attention_matches_the_plain_backend_and_reads_only_the_window(
    head_dim: int,
) -> None:
    """Positions before the window of a sequence's first row are NaN in the native cache."""
    rng, config = random.Random(head_dim), replace(sizes(4, 1, head_dim), attention_scale=0.3)
    for window in (1, 2, 31, 33, 64, 99):
        block_size = rng.choice((1, 16, 64))
        batch, num_blocks = random_batch(rng, block_size)
        batch.window = window
        shape = (num_blocks, 2, 2, 1, block_size, head_dim)
        blocks = torch.randn(shape, generator=_generator(window))
        (native, cache), (plain, _) = on_both_backends(config, batch, blocks)
        lengths = batch.starts_s.diff()
        for table, first in zip(batch.tables_sw, batch.ends_s - lengths, strict=True):
            for position in range(max(0, int(first) + 1 - window)):
                cache[table[position // block_size], :, :, :, position % block_size] = math.nan
        qkv = torch.randn(len(batch.tokens_t), 6 * head_dim, generator=_generator(window)) * 1.5
        sinks = sinks_of(config) if window % 2 else None
        found, exact = native.attention(1, qkv, sinks), plain.attention(1, qkv.double(), sinks)
        torch.testing.assert_close(found, exact.float(), rtol=2e-5, atol=5e-6)


def drop_some_slots(batch: ForwardBatch, rng: random.Random) -> ForwardBatch:
    """Let some tokens have no slot."""
    for place in range(len(batch.slots_t)):
        if rng.random() < 0.3:
            batch.slots_t[place] = -rng.randint(1, 3)
    return batch


Norms = Callable[[ModelConfig], tuple[Tensor | None, Tensor | None]]


def with_norms(config: ModelConfig) -> tuple[Tensor | None, Tensor | None]:
    return torch.rand(config.head_dim, generator=_generator(1)) + 0.5, torch.ones(
        config.head_dim
    ) * 2


@pytest.mark.parametrize(
    "norms", [lambda config: (None, None), with_norms], ids=["plain", "normed"]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_keys_and_values_are_stored_in_their_slots_only(head_dim: int, norms: Norms) -> None:
    rng = random.Random(head_dim)
    for block_size in (1, 16, 64):
        config = sizes(6, 2, head_dim)
        batch, num_blocks = random_batch(rng, block_size)
        drop_some_slots(batch, rng)
        blocks = torch.full((num_blocks, 2, 2, 2, block_size, head_dim), 123.0)
        (native, found), (plain, expected) = on_both_backends(config, batch, blocks)
        qkv = torch.randn(len(batch.tokens_t), 10 * head_dim, generator=_generator(head_dim))
        q_norm, k_norm = norms(config)
        narrow, wide = qkv.clone(), qkv.double()
        native.rotate_and_store(1, narrow, q_norm, k_norm)
        plain.rotate_and_store(1, wide, q_norm, k_norm)
        torch.testing.assert_close(narrow, wide.float(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=2e-6)
        slots = {int(slot) for slot in batch.slots_t if slot >= 0}
        assert _written(found[:, 1]) == slots and not _written(found[:, 0])


def _written(layer: Tensor) -> set[int]:
    """Slots of one layer [B, 2, G, P, D] that were written."""
    changed = (layer != 123.0).any(-1).any(2).any(1)
    return set(changed.flatten().nonzero().squeeze(1).tolist())
