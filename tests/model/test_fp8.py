"""fp8 weights: quantized when a model is loaded, or read from a compressed-tensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.errors import ConfigError, ModelError
from headway.model import precision
from headway.model.backends.base import Backend, LayerWeights, Weight
from headway.model.backends.plain import PlainBackend, PlainWeight
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.experts import Experts
from headway.model.loader import open_checkpoint
from headway.model.quantization import keeps_fp8
from headway.model.sharding import Part
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.fp8 import FP8, MAX_FP8, float_layers, quantize
from tests.model.kernels.reference.fp8 import quantize_rows
from tests.support.real import batch_of

pytest.importorskip("triton")
from headway.model.backends import fp8
from tests.executor.test_gpu import Loud

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
VALUES: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
SCHEME = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": TOKENS}
    },
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
BLOCK_SIZE = 8
# bfloat16 on a card; the interpreter multiplies bfloat16's raw bits.
DTYPE, DEVICE = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
LIMIT = 0.03  # of the relative error of float32 logits
# Rounding to bfloat16 before fp8 changes some of the fp8 numbers by a whole step, 6 percent or more.
# So bfloat16 logits are compared with exact ones, and with the error of plain torch in bfloat16.
MAX_RATIO = 1.5
STEPS = {"prompts": slice(0, 7), "two decodes": slice(7, 9), "one decode": slice(9, 10)}  # of rows


def config_of(**changes: Any) -> ModelConfig:
    return from_hf(VALUES | changes, "config.json")


def scheme(**changes: Any) -> dict[str, Any]:
    """SCHEME, with changes to the scheme itself or to its weights."""
    own = (*WEIGHTS, "block_structure")
    weights = WEIGHTS | {key: changes.pop(key) for key in list(changes) if key in own}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": TOKENS}
    return SCHEME | {"config_groups": {"group_0": group}} | changes


def write(
    folder: Path, change: Callable[[dict[str, Tensor]], None] = lambda _: None
) -> dict[str, Tensor]:
    """Write a model whose layers are in fp8, as llm-compressor does; return its float weights."""
    folder.mkdir(exist_ok=True)
    made = Loud(config_of())
    floats = {name: made.read(name) for name in made.config.shapes()}
    stored: dict[str, Tensor] = {}
    for name, tensor in floats.items():
        if ".layers." not in name or tensor.dim() == 1:
            stored[name] = tensor.to(torch.bfloat16)
            continue
        rounded = quantize(tensor)
        stored[name], stored[f"{name}_scale"] = rounded.q, rounded.scale[:, None]
    change(stored)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(VALUES | {"quantization_config": SCHEME}))
    return floats


def test_every_row_has_the_scale_of_its_largest_number() -> None:
    matrix = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    matrix *= 10.0 ** torch.arange(-2, 3)[:, None]
    matrix[2] = 0.0
    rounded = quantize(matrix)
    assert rounded.q.dtype == FP8 and rounded.scale.dtype == torch.float32
    torch.testing.assert_close(
        rounded.scale[[0, 1, 3, 4]], matrix.abs().amax(1)[[0, 1, 3, 4]] / MAX_FP8
    )
    assert not rounded.wide()[2].any()
    tops = matrix.abs().amax(1, keepdim=True)
    # Half of the distance between neighbours: 2^-4 of a number, or of the smallest normal one.
    assert ((rounded.wide() - matrix).abs() <= matrix.abs() / 16 + tops / MAX_FP8 / 1024).all()


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    floats = write(tmp_path)
    opened = open_checkpoint(tmp_path)
    rounded, found = quantize(floats[UP]), opened.read_fp8(UP)
    assert found is not None and torch.equal(found.q.float(), rounded.q.float())
    assert torch.equal(found.scale, rounded.scale)
    assert torch.equal(opened.read(UP), rounded.wide())
    part = Part(slice(16, 48), slice(0, 32))
    assert torch.equal(opened.read(UP, part), rounded.wide()[16:48, :32])
    for name in ("lm_head.weight", "model.norm.weight"):
        assert opened.read_fp8(name) is None and opened.read(name).dtype == torch.bfloat16


def test_one_scale_may_serve_a_whole_matrix(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[f"{UP}_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)

    write(tmp_path, change)
    found = open_checkpoint(tmp_path).read_fp8(UP, Part(slice(8, 24)))
    assert found is not None and found.scale.tolist() == [0.5] * 16


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (None, rf"{UP}_scale is missing, which compressed-tensors float-quantized"),
        (torch.ones(3, 1), rf"{UP}_scale has shape \[3, 1\].*\[96, 1\]"),
    ],
)
def test_a_missing_or_wrong_scale_is_named(
    scale: Tensor | None, problem: str, tmp_path: Path
) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        del stored[f"{UP}_scale"]
        if scale is not None:
            stored[f"{UP}_scale"] = scale

    write(tmp_path, change)
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(tmp_path).read(UP)


def test_another_8_bit_type_is_named(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        stored[UP] = stored[UP].to(torch.float8_e5m2)

    write(tmp_path, change)
    with pytest.raises(ModelError, match=rf"{UP} has type F8_E5M2; supported: .*F8_E4M3"):
        open_checkpoint(tmp_path).read(UP)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_supported_schemes_are_fp8(strategy: str) -> None:
    found = config_of(quantization_config=scheme(strategy=strategy))
    assert keeps_fp8(found.quantization) and not keeps_fp8(config_of().quantization)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (scheme(strategy="group"), "strategy 'group'"),
        (scheme(num_bits=4), "float4"),
        (scheme(type="int"), "int8"),
        (scheme(config_groups={}), "config_groups"),
        ("fp8", "'fp8'"),
    ],
)
def test_other_formats_are_named(found: Any, named: str) -> None:
    with pytest.raises(ModelError, match=rf"config.json: quantization_config.*{named}"):
        config_of(quantization_config=found)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A GPU of a compute capability, as far as its properties are read."""

    def use(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Test card")

    return use


def test_fp8_needs_a_gpu_that_has_it(card: Callable[[int, int], None]) -> None:
    card(8, 9)
    assert {precision.resolved(dtype, "fp8", CUDA) for dtype in ("auto", "bfloat16")} == {"fp8"}
    with pytest.raises(ConfigError, match="dtype auto or bfloat16, not float16"):
        precision.resolved("float16", "fp8", CUDA)
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU: .*--quantization none or int8"):
        precision.resolved("auto", "fp8", CPU)
    card(8, 6)
    with pytest.raises(ConfigError, match=r"8\.9 or later; Test card has 8\.6; .*--quantization"):
        precision.resolved("auto", "fp8", CUDA)
    with pytest.raises(ConfigError, match=r"Test card has 8\.6; .*--kv-cache-dtype auto"):
        precision.kv_dtype_for("fp8", CUDA)


def test_a_file_in_fp8_runs_in_fp8_unless_another_type_is_chosen(
    card: Callable[[int, int], None],
) -> None:
    stored, other = config_of(quantization_config=SCHEME), config_of()
    blocks = config_of(quantization_config=scheme(strategy="block", block_structure=[128, 128]))
    card(9, 0)
    assert precision.stored_precision(blocks, "bfloat16", "auto", CUDA) == "bfloat16"
    assert precision.stored_precision(stored, "bfloat16", "auto", CUDA) == "fp8"
    assert precision.stored_precision(stored, "bfloat16", "bfloat16", CUDA) == "bfloat16"
    assert precision.stored_precision(other, "bfloat16", "auto", CUDA) == "bfloat16"
    assert precision.stored_precision(stored, "float32", "auto", CPU) == "float32"
    experts = Experts(num_experts=2, num_chosen=1, width=16, layers=frozenset({0}))
    sparse = replace(stored, experts=experts)
    assert precision.stored_precision(sparse, "bfloat16", "auto", CUDA) == "bfloat16"
    card(8, 0)
    assert precision.stored_precision(stored, "bfloat16", "auto", CUDA) == "bfloat16"


@pytest.mark.parametrize("change", [{"has_output_norms": True}, {"activation": "gelu"}])
def test_other_arithmetic_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"norms of outputs or another activation .* bfloat16"):
        precision.choose_backend(replace(config_of(), **change), "fp8", "cuda")


def test_sizes_must_be_multiples_of_16() -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16, but intermediate_size is 100;"):
        precision.choose_backend(config_of(intermediate_size=100), "fp8", "cuda")


def fp8_backend(config: ModelConfig, kv_dtype: torch.dtype | None = None) -> Backend:
    return fp8.Fp8Backend(DTYPE, DEVICE, kv_dtype, folds_norms=config.quantization is None)


class Rounded(PlainBackend):
    """Plain torch with the same rounding: fp8 matrices, and fp8 rows unless there is only one.

    Weights are those of DTYPE; `dtype` is that of all results.
    """

    def __init__(self, dtype: torch.dtype, *, folds_norms: bool) -> None:
        super().__init__(dtype, DEVICE)
        self.folds_norms = folds_norms

    def _stacked(self, checkpoint: Checkpoint, names: list[str]) -> Tensor:
        return super()._stacked(checkpoint, names).to(DTYPE).to(self.dtype)

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> PlainWeight:
        found = super().weight(checkpoint, names)
        parts = [checkpoint.read_fp8(f"{name}.weight") for name in names]
        matrices = [part.wide() for part in parts if part is not None]
        if len(matrices) < len(parts):
            return found
        return replace(found, matrix=torch.cat(matrices).to(DEVICE), scale=torch.ones(1))

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        if not self.folds_norms:
            return layer
        ones = torch.ones_like(layer.input_norm)
        made = {
            "qkv": rounded(layer.qkv, layer.input_norm), "output": rounded(layer.output, None),
            "gate_up": rounded(layer.gate_up, layer.post_norm), "down": rounded(layer.down, None),
        }  # fmt: skip
        return replace(layer, input_norm=ones, post_norm=ones, **made)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, PlainWeight)
        if weight.scale is None:
            return super().linear(x, weight)
        values, scale = quantize_rows(x) if len(x) > 1 else (x, torch.ones(1, device=DEVICE))
        total = (values.float() * scale) @ weight.matrix.T
        return (total if weight.bias is None else total + weight.bias).to(x.dtype)


def rounded(weight: Weight, norm: Tensor | None) -> PlainWeight:
    assert isinstance(weight, PlainWeight)
    matrix = weight.matrix
    if norm is not None:
        matrix = matrix.float() * norm.float()
    return PlainWeight(quantize(matrix.to(DTYPE)).wide(), weight.bias, torch.ones(1))


@torch.inference_mode()
def logits(checkpoint: Checkpoint, backend: Backend) -> Tensor:
    """Of two prompts of 5 and 2 tokens, then of a decode of both, then of one of the first."""
    decoder = Decoder(checkpoint, backend)
    blocks = backend.kv_blocks(decoder.config, 4, BLOCK_SIZE)
    prompts = [([3, 1, 4, 1, 5], 0, [2, 0]), ([9, 2], 0, [1])]
    found = []
    for step in (prompts, [([7], 5, [2, 0]), ([8], 2, [1])], [([6], 6, [2, 0])]):
        batch = described(batch_of(step, BLOCK_SIZE), blocks.device)
        found.append(decoder.logits(decoder.forward(batch, blocks)).float().cpu())
    return torch.cat(found)


def described(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """With what GPU kernels need; either all sequences are decodes or none is."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: each.to(device) for name, each in tensors.items() if isinstance(each, Tensor)}
    longest, count = int(batch.starts_s.diff().max()), len(batch.tables_sw)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    decodes = {"num_decodes": count} if longest == 1 else {"longest": longest}
    return replace(batch, **moved, row_ids_s=rows, **decodes)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def check_rounding(found: Tensor, checkpoint: Checkpoint, *, folds_norms: bool) -> None:
    """The logits are those of plain torch with the same rounding."""
    exact = logits(checkpoint, Rounded(torch.float32, folds_norms=folds_norms))
    plain = logits(checkpoint, Rounded(DTYPE, folds_norms=folds_norms))
    limit = LIMIT if DTYPE is torch.float32 else MAX_RATIO * distance(plain, exact)
    errors = {
        name: f"{distance(found[rows], exact[rows]):.3f}, torch {distance(plain[rows], exact[rows]):.3f}"
        for name, rows in STEPS.items()
    }
    assert distance(found, exact) < limit, errors


@pytest.mark.parametrize("is_file", [False, True], ids=["quantized at load", "fp8 file"])
@pytest.mark.parametrize("has_kernel", [False, True], ids=["many rows", "few rows"])
def test_logits_are_those_of_plain_torch_with_the_same_rounding(
    is_file: bool, has_kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows: our kernel multiplies fp8 rows. Many: `scaled_linear` does."""
    for limit in ("MAX_KERNEL_ROWS", "MAX_NARROW_KERNEL_ROWS"):
        monkeypatch.setattr(fp8, limit, 256 if has_kernel else 1)
    write(tmp_path)
    floats = Loud(config_of(num_hidden_layers=1 if is_file else 2))
    opened = open_checkpoint(tmp_path) if is_file else floats
    found = logits(opened, fp8_backend(opened.config))
    check_rounding(found, opened, folds_norms=not is_file)
    assert distance(found, logits(floats, PlainBackend())) < 0.3


def test_fp8_weights_and_an_fp8_cache_work_together() -> None:
    config = config_of()
    found = logits(Loud(config), fp8_backend(config, FP8))
    weights_only = logits(Loud(config), fp8_backend(config))
    assert 0.0 < distance(found, weights_only) < 0.2


def test_a_matrix_that_the_file_keeps_in_floats_stays_float(tmp_path: Path) -> None:
    def change(stored: dict[str, Tensor]) -> None:
        del stored[f"{DOWN}_scale"]
        stored[DOWN] = Loud(config_of()).read(DOWN).to(torch.bfloat16)

    write(tmp_path, change)
    opened = open_checkpoint(tmp_path)
    backend = fp8_backend(opened.config)
    layer = Decoder(opened, backend).layers[0]
    assert layer.down.matrix.dtype == backend.dtype  # type: ignore[attr-defined]
    assert layer.qkv.matrix.dtype == layer.gate_up.matrix.dtype == FP8  # type: ignore[attr-defined]
    check_rounding(logits(opened, backend), opened, folds_norms=False)


def test_the_first_and_last_layers_of_a_narrow_model_stay_floats() -> None:
    config = config_of(num_hidden_layers=8)
    backend = precision.choose_backend(config, "fp8", "cuda")
    kept = backend.float_layers  # type: ignore[attr-defined]
    assert kept == float_layers(config) == {0, 1, 2, 5, 6, 7}
    assert float_layers(config_of(num_hidden_layers=2)) == {0, 1}
    assert not float_layers(config_of(hidden_size=4096))
    some = fp8.Fp8Backend(torch.float32, "cpu", float_layers=frozenset({1}))
    layers: list[Any] = Decoder(Loud(config_of(num_hidden_layers=2)), some).layers
    assert [layer.down.matrix.dtype for layer in layers] == [FP8, torch.float32]


def test_only_the_matrices_of_the_layers_are_in_8_bits() -> None:
    config = config_of()
    backend = fp8_backend(config)
    decoder = Decoder(Loud(config), backend)
    layer: Any = decoder.layers[0]
    matrices = [layer.qkv, layer.output, layer.gate_up, layer.down]
    assert {each.matrix.dtype for each in matrices} == {FP8}
    others: list[Any] = [decoder.embedding, decoder.head]
    kept = [*(each.matrix for each in others), decoder.norm, layer.qkv.bias]
    assert {each.dtype for each in kept} == {decoder.norm.dtype}
    scales = sum(4 * len(each.matrix) for each in matrices)
    vectors = sum(shape[0] for shape in config.shapes().values() if len(shape) == 1)
    expected = decoder.num_bytes - scales + vectors * decoder.norm.element_size()
    assert precision.weight_bytes(config, backend) == expected
