"""The deterministic GPU backend: the logits of a sequence are the same bits in any batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import ConfigError
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.precision import choose_backend
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.options import EngineOptions

pytest.importorskip("triton")
from headway.model.backends.deterministic import DeterministicBackend
from headway.model.backends.gpu import GpuBackend
from headway.model.kernels.attention import invariant_attention
from headway.model.kernels.products.tiles import MANY_ROWS, invariant_tile
from tests.support.ordered_dots import use_ordered_dots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
VOCABULARY, BLOCK_SIZE, NUM_BLOCKS, SPLIT = 40, 8, 64, 32


def tiny() -> ModelConfig:
    """With an MLP in the first layer, and experts in the second."""
    return from_hf(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "tie_word_embeddings": True, "mlp_only_layers": [0],
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        },
        "tiny",
    )  # fmt: skip


class Loud(DummyCheckpoint):
    """Random weights large enough that a different order of summation changes bits."""

    def whole(self, name: str) -> Tensor:
        return super().whole(name) * (1 if name.endswith("norm.weight") else 10)


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    """Short splits, so that short sequences have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant_attention, "SPLIT", SPLIT)
        use_ordered_dots(patch)
        yield Decoder(Loud(tiny()), DeterministicBackend(DTYPE, DEVICE))


Part = tuple[int, int, int]  # sequence, first position, end


class Sequences:
    """Random sequences, each with blocks of its own in a random order."""

    def __init__(self, decoder: Decoder, lengths: list[int], seed: int) -> None:
        rng = random.Random(seed)
        self.decoder, self.lengths = decoder, lengths
        self.tokens = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
        numbers = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        width = -(-max(lengths) // BLOCK_SIZE)
        self.tables = torch.tensor([[numbers.pop() for _ in range(width)] for _ in lengths])
        self.blocks = decoder.backend.kv_blocks(decoder.config, NUM_BLOCKS, BLOCK_SIZE)
        self.seen = Counter[str]()  # passes of each kind

    @torch.inference_mode()
    def logits(self, decodes: list[Part], chunks: list[Part], num_splits: int) -> Tensor:
        """Logits of every token of one pass."""
        parts = [*decodes, *chunks]
        places = [(s, at) for s, first, end in parts for at in range(first, end)]
        ids, positions = torch.tensor(places).T.contiguous()
        slots = self.tables[ids, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        counts = torch.tensor([len(decodes), *(end - first for _, first, end in chunks)])
        batch = ForwardBatch(
            tokens_t=torch.tensor([self.tokens[s][at] for s, at in places]).to(DEVICE),
            positions_t=positions.to(DEVICE), slots_t=slots.to(DEVICE),
            tables_sw=self.tables.int().to(DEVICE), starts_s=counts.cumsum(0).int().to(DEVICE),
            ends_s=torch.tensor([end for *_, end in chunks], dtype=torch.int32).to(DEVICE),
            sampled_n=positions, num_decodes=len(decodes), num_splits=num_splits,
            row_ids_s=torch.tensor([s for s, *_ in parts], dtype=torch.int32).to(DEVICE),
            longest=sum(end - first for _, first, end in chunks),
        )  # fmt: skip
        return self.decoder.logits(self.decoder.forward(batch, self.blocks)).cpu()

    def all_logits(self, order: random.Random) -> list[Tensor]:
        """Logits at every position, in random chunks, decodes and batches."""
        done, found = [0] * len(self.lengths), [list[Tensor]() for _ in self.lengths]
        while left := [s for s, length in enumerate(self.lengths) if done[s] < length]:
            decodes, chunks = list[Part](), list[Part]()
            for s in order.sample(left, order.randint(1, len(left))):
                end = min(done[s] + order.choice((1, 1, 4, 33)), self.lengths[s])
                (decodes if end - done[s] == 1 else chunks).append((s, done[s], end))
            num_splits = order.choice((1, 4))
            rows = self.logits(decodes, chunks, num_splits)
            self.seen["decodes only"] += len(decodes) > 1 and not chunks
            self.seen["chunks only"] += len(chunks) > 1 and not decodes
            self.seen["decodes and chunks"] += bool(decodes and chunks)
            self.seen["a long decode in splits"] += num_splits > 1 and any(
                first >= SPLIT for _, first, _ in decodes
            )
            self.seen["a chunk in the middle"] += any(first > 0 for _, first, _ in chunks)
            for s, first, end in decodes + chunks:
                found[s].append(rows[: end - first])
                rows, done[s] = rows[end - first :], end
        return [torch.cat(each) for each in found]


LENGTHS = [40, 2, 6]
SEED = 96  # of an order with few passes, but some of every kind


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[Tensor]:
    """Logits of each sequence in one chunk, without others."""
    sequences = Sequences(decoder, LENGTHS, seed=1)
    return [sequences.logits([], [(s, 0, n)], 1) for s, n in enumerate(LENGTHS)]


def in_an_order(decoder: Decoder, alone: list[Tensor], order: random.Random) -> Counter[str]:
    sequences = Sequences(decoder, LENGTHS, 1)
    assert all(logits.isfinite().all() for logits in alone)
    for one, other in zip(alone, sequences.all_logits(order), strict=True):
        assert torch.equal(one, other)
    return sequences.seen


def test_logits_are_the_same_bits_in_passes_of_every_kind(
    decoder: Decoder, alone: list[Tensor]
) -> None:
    seen = in_an_order(decoder, alone, random.Random(SEED))
    assert len(seen) == 5 and min(seen.values()) > 0, seen


@settings(max_examples=2, deadline=None)
@given(order=st.randoms(use_true_random=True))  # otherwise the first example only decodes
def test_logits_are_the_same_bits_in_any_batch_and_chunks(
    decoder: Decoder, alone: list[Tensor], order: random.Random
) -> None:
    in_an_order(decoder, alone, order)


def test_logits_are_close_to_those_of_the_faster_kernels(
    decoder: Decoder, alone: list[Tensor]
) -> None:
    faster = Decoder(Loud(tiny()), GpuBackend(DTYPE, DEVICE))
    found = Sequences(faster, LENGTHS, 1).logits([], [(0, 0, LENGTHS[0])], 1)
    difference = (found - alone[0]).float().abs().max()
    assert difference <= (1e-4 if torch.float32 == DTYPE else 0.2) * found.float().abs().max()
    assert difference > 0, "the comparison of bits above sees another order of summation"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_have_one_order_of_summation_and_are_known_before_large_passes(
    dtype: torch.dtype,
) -> None:
    """Tensor cores, one accumulator; a pass of many rows needs no kernel that is not compiled."""
    for num_outputs, num_inputs in ((4096, 1024), (1024, 3072), (151936, 1024), (40, 32)):
        tiles = {
            rows: invariant_tile(rows, num_outputs, num_inputs, dtype)
            for rows in (1, 2, 16, 17, 33, 64, 200, 256, 257, MANY_ROWS, 1000, 8192, 16384)
        }
        assert all(tile.rows >= 16 and tile.slices == 1 for tile in tiles.values()), tiles
        assert len({tile for rows, tile in tiles.items() if rows >= MANY_ROWS}) == 1, tiles


def test_a_backend_that_cannot_hold_it_is_refused_with_what_is_possible() -> None:
    cases = [
        ("cuda", "bfloat16", "flashinfer", "--attention triton"),
        ("cuda", "int8", "triton", "bfloat16"),
        ("cpu", "bfloat16", "triton", "--dtype float32"),
    ]
    for device, precision, attention, advice in cases:
        with pytest.raises(ConfigError, match=advice):
            choose_backend(tiny(), precision, device, None, attention, deterministic=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2"):
        EngineOptions(deterministic=True, tensor_parallel_size=2)


def test_a_cpu_without_native_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.model.precision.why_not_native", lambda *_: "no compiler")
    with pytest.raises(ConfigError, match="no compiler"):
        choose_backend(tiny(), "float32", deterministic=True)
