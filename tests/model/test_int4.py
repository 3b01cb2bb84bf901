"""4-bit files on a GPU: their integers stay, and the logits are those of the dequantized model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.model import precision
from headway.model.backends.plain import PlainBackend
from headway.model.config import from_hf
from headway.model.decoder import Decoder
from headway.model.experts import Experts
from headway.model.footprint import footprint
from headway.model.loader import open_checkpoint
from headway.model.quantization import Quantization
from headway.model.weights.checkpoint import Checkpoint, DummyCheckpoint, ShardedCheckpoint
from tests.parallel.test_sharding import shards
from tests.support import quantized
from tests.support.quantized import SCHEMES

pytest.importorskip("triton")
from headway.model.backends import int4
from headway.model.backends.int4 import Int4Backend
from headway.model.kernels.products.int4 import Int4Matrix, dequantized
from tests.model.test_fp8 import DEVICE, DTYPE, distance, logits

CUDA = torch.device("cuda")
LIMIT = 0.03 if DTYPE is torch.bfloat16 else 1e-5  # of the relative error of float32 logits
FOUR_BITS = [
    "w4a16", "w4a16 with zero points", "w4a16 per channel", "w4a16 per channel with zero points",
    "awq", "awq, a group per output", "gptq", "gptq with a trivial order",
]  # fmt: skip


def written(
    folder: Path, name: str, kept: tuple[str, ...] = (), **values: object
) -> tuple[Checkpoint, Quantization]:
    quantized.write(folder, SCHEMES[name], kept=kept, num_hidden_layers=1, **values)
    opened = open_checkpoint(folder)
    assert opened.config.quantization is not None
    return opened, opened.config.quantization


def backend(given: Quantization, dtype: torch.dtype = DTYPE) -> Int4Backend:
    return Int4Backend(dtype, DEVICE, quantization=given)


@pytest.mark.parametrize(
    ("name", "kept", "most"),
    [("w4a16 with zero points", (), 256), ("awq", ("gate_proj", "o_proj"), 256), ("gptq", (), 1)],
    ids=["w4a16", "awq with floats", "gptq, dequantized for two rows"],
)
def test_logits_are_those_of_the_dequantized_model(
    name: str, kept: tuple[str, ...], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "MAX_ROWS", most)
    checkpoint, given = written(tmp_path, name, kept, attention_bias=True)
    expected = logits(checkpoint, PlainBackend(torch.float32, DEVICE))
    assert distance(logits(checkpoint, backend(given)), expected) < LIMIT


@pytest.mark.parametrize("name", ["w4a16 per channel", "gptq"])
def test_stacked_matrices_keep_the_integers_of_the_file(name: str, tmp_path: Path) -> None:
    checkpoint, given = written(tmp_path, name)
    names = [f"model.layers.0.mlp.{each}_proj" for each in ("gate", "up")]
    found = backend(given).weight(checkpoint, names)
    assert isinstance(found, Int4Matrix) and found.group == 64  # also the length of a row
    whole = torch.cat([checkpoint.read(f"{each}.weight") for each in names])
    assert torch.equal(dequantized(found, torch.float32).cpu(), whole)


def test_a_rank_may_cut_the_groups_of_the_file(tmp_path: Path) -> None:
    checkpoint, given = written(tmp_path, "awq")
    module = "model.layers.0.mlp.down_proj"
    for shard in shards(checkpoint.config, 2, is_exact=False):
        own = ShardedCheckpoint(checkpoint, shard)
        found = backend(given).weight(own, [module])
        part = own.read(f"{module}.weight")
        assert isinstance(found, Int4Matrix) and found.group == 32 and part.shape[1] == 96
        assert torch.equal(dequantized(found, torch.float32).cpu(), part)


@pytest.mark.parametrize("name", ["awq", "awq, a group per output"])
def test_sizes_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}  # whole blocks: nothing is padded
    checkpoint, given = written(tmp_path, name, **sizes)
    for opened in (checkpoint, DummyCheckpoint(checkpoint.config)):
        found = footprint(opened, CUDA)
        model = Decoder(opened, backend(given, torch.bfloat16))
        vectors = sum(shape[0] for shape in opened.config.shapes().values() if len(shape) == 1)
        assert found.precision == "int4" and found.weights == model.num_bytes + 2 * vectors


def test_a_file_in_4_bits_keeps_them_unless_another_type_is_chosen() -> None:
    configs = {
        name: from_hf(quantized.VALUES | {"quantization_config": SCHEMES[name].config}, "config")
        for name in SCHEMES
    }
    kept = [
        name for name, config in configs.items()
        if precision.stored_precision(config, "bfloat16", "auto", CUDA) == "int4"
    ]  # fmt: skip
    assert kept == FOUR_BITS
    awq = configs["awq"]
    for dtype, resolved in (("bfloat16", "bfloat16"), ("float16", "float16"), ("auto", "fp8")):
        assert precision.stored_precision(awq, resolved, dtype, CUDA) == resolved
    assert precision.stored_precision(awq, "float32", "auto", torch.device("cpu")) == "float32"
    experts = Experts(num_experts=2, num_chosen=1, width=16, layers=frozenset({0}))
    sparse = replace(awq, experts=experts)
    assert precision.stored_precision(sparse, "bfloat16", "auto", CUDA) == "bfloat16"
    fixed = precision.stored_precision(awq, "bfloat16", "auto", CUDA, deterministic=True)
    assert fixed == "bfloat16"
    assert isinstance(precision.choose_backend(awq, "int4", "cuda"), Int4Backend)
