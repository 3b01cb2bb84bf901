"""fp8 rows and products: the kernels equal their references, and every chosen tile is valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels import activation, norm
from headway.model.kernels.products.fp8 import PIECE, QuantizedRows, quantize_rows, scaled_linear
from headway.model.kernels.products.linear import linear
from headway.model.kernels.products.tiles import Tile, fp8_tile_within
from headway.model.weights.fp8 import Fp8Matrix, quantize
from tests.model.kernels.reference import activation as activation_reference
from tests.model.kernels.reference import fp8 as reference
from tests.model.kernels.reference import linear as linear_reference
from tests.model.kernels.reference import norm as norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 on a card; the interpreter multiplies bfloat16's raw bits.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
EPSILON = 1e-3
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[DTYPE]
SHAPES = {  # (outputs, inputs) of a layer's four products
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "Qwen2.5-7B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialized memory holds NaN. `use_deterministic_algorithms` imports torch's compiler."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def draw(seed: int, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, DTYPE)


def matrix(outputs: int, inputs: int) -> Fp8Matrix:
    """Rows of different sizes, so that a wrong scale shows."""
    sizes = 2.0 ** (torch.arange(outputs, device=DEVICE)[:, None] % 7 - 3)
    return quantize(draw(2, outputs, inputs) * sizes / inputs**0.5)


def distance(one: Tensor, other: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def wide(rows: QuantizedRows) -> Tensor:
    return rows.values_tk.float() * rows.scale_t


def check_rows(found: QuantizedRows, expected: Tensor) -> None:
    """The rows of `expected`, with the right scales and rounded at most as fp8 rounds."""
    values, scale = reference.quantize_rows(expected)
    assert found.values_tk.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found.scale_t, scale, rtol=1e-2, atol=0.0)
    assert (found.values_tk.float() == values.float()).float().mean() > 0.97
    assert distance(wide(found), expected) < 0.04


@pytest.mark.parametrize("width", [1, 80, 1024, PIECE + 96], ids=str)
def test_rows_are_rounded_with_a_scale_each(width: int) -> None:
    x = draw(1, 5, width + 8)[:, 4:-4] * 10.0 ** (torch.arange(5, device=DEVICE)[:, None] - 2)
    x[3] = 0.0
    x = torch.cat([x, x], dim=1)[:, :width]  # rows with a stride
    found = quantize_rows(x)
    values, scale = reference.quantize_rows(x)
    torch.testing.assert_close(found.scale_t, scale, rtol=1e-6, atol=0.0)
    assert (found.values_tk.float() == values.float()).float().mean() > 0.995
    assert not found.values_tk[3].float().any()
    assert (found.values_tk.float().abs().amax(1)[[0, 1, 2, 4]] == reference.MAX_FP8).all()


@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("width", [80, 1024])
def test_a_norm_quantizes_its_result_and_adds_first(width: int, has_added: bool) -> None:
    x, weight = draw(3, 6, width), draw(4, width)
    added = draw(5, 6, width) if has_added else None
    total = x.clone() if added is None else x + added
    found = norm.rms_norm_quantized(x, weight, EPSILON, added)
    assert torch.equal(x, total)
    check_rows(found, norm_reference.rms_norm(total, weight, EPSILON))


def test_a_norm_of_short_rows_writes_no_other_row() -> None:
    rows, added = draw(3, 8, 80), draw(5, 8, 80)
    before = rows.clone()
    norm.rms_norm_quantized(rows[:5], draw(4, 80), EPSILON, added[:5])
    assert torch.equal(rows[5:], before[5:])


@pytest.mark.parametrize("half", [72, 2500, PIECE])
def test_a_gate_quantizes_its_result(half: int) -> None:
    x = draw(6, 4, 2 * half) * 2
    check_rows(activation.silu_multiply_quantized(x), activation_reference.silu_multiply(x))


def test_no_rows_launch_nothing() -> None:
    none = draw(1, 0, 64)
    assert quantize_rows(none).values_tk.shape == (0, 64)
    assert norm.rms_norm_quantized(none, draw(1, 64), EPSILON).scale_t.shape == (0, 1)
    assert activation.silu_multiply_quantized(none).values_tk.shape == (0, 32)


def product_options(rows: int, outputs: int, is_gated: bool) -> dict[str, Any]:
    width = outputs // 2 if is_gated else outputs
    return {
        "bias_n": draw(8, outputs), "residual_mn": draw(9, rows, width), "is_gated": is_gated,
    }  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("inputs", [80, 576, 4400])
def test_a_float_row_multiplies_an_fp8_matrix(inputs: int, is_gated: bool) -> None:
    """With every option, in the order of a float matrix, in one piece of the inputs or several."""
    weight, x = matrix(102, inputs), draw(7, 1, inputs)
    options = product_options(1, 102, is_gated) | {"epsilon": EPSILON}
    found = linear(x, weight.q, scale_n=weight.scale, **options)
    exact = linear_reference.linear(x, weight.wide(), **options)
    assert found.dtype == DTYPE and distance(found, exact) < LIMIT


TILES = {
    "narrow": Tile(16, 16, 32, 1, 4, 2), "wide": Tile(64, 32, 64, 1, 4, 2), "chosen": None,
}  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("rows", "inputs"), [(2, 128), (21, 192), (65, 128)])
def test_fp8_rows_multiply_an_fp8_matrix(name: str, rows: int, inputs: int, is_gated: bool) -> None:
    """With every option and kind of tile; padding rows are not read."""
    weight, x = matrix(70, inputs), quantize_rows(draw(7, rows, inputs))
    options = product_options(rows, 70, is_gated)
    out = torch.full(options["residual_mn"].shape, torch.nan, device=DEVICE, dtype=DTYPE)
    linear(
        x.values_tk, weight.q, x_scale_m=x.scale_t, scale_n=weight.scale, out_mn=out,
        tile=TILES[name], **options,
    )  # fmt: skip
    assert distance(out, linear_reference.linear(wide(x), weight.wide(), **options)) < LIMIT


def test_several_float_rows_are_rejected() -> None:
    weight = matrix(32, 64)
    with pytest.raises(AssertionError, match="type of the matrix"):
        linear(draw(7, 2, 64), weight.q, scale_n=weight.scale)


@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_multiply_with_their_scales(has_bias: bool) -> None:
    weight, rounded = matrix(48, 80), quantize_rows(draw(7, 33, 80))
    bias = draw(8, 48) if has_bias else None
    found = scaled_linear(rounded, weight.q, weight.scale, bias)
    exact = linear_reference.linear(wide(rounded), weight.wide(), bias_n=bias)
    assert found.dtype == DTYPE and distance(found, exact) < LIMIT


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("memory", [80 * 1024, 207 * 1024])
def test_every_chosen_tile_is_valid(name: str, memory: int) -> None:
    for rows in range(1, 257):
        for outputs, inputs in SHAPES[name]:
            tile = fp8_tile_within((132, memory), rows, outputs, inputs)
            assert all(is_power_of_two(size) for size in tile[:5]) and tile.slices == 1, tile
            if rows > 1:
                assert tile.rows >= 64 and tile.inputs >= 32 and tile.outputs >= 8, tile
                assert tile.stages * (tile.rows + tile.outputs) * tile.inputs <= memory, tile


def test_tiles_cover_the_multiprocessors_at_most_once_if_they_can() -> None:
    """More tiles than multiprocessors take twice as long."""
    for rows in (2, 64, 96, 128, 192, 256):
        for outputs, inputs in SHAPES["Qwen2.5-7B"]:
            tile = fp8_tile_within((132, 207 * 1024), rows, outputs, inputs)
            count = -(-rows // tile.rows) * -(-outputs // tile.outputs)
            assert count <= 132 or outputs > 8192, (rows, tile)
            assert count > 132 // 3, (rows, tile)
