"""Products of few rows: the kernels equal their reference, and every chosen tile is valid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.products.linear import linear, num_squares, row_squares
from headway.model.kernels.products.tiles import Tile, tile_for, tile_within
from tests.model.kernels.reference import activation as activation_reference
from tests.model.kernels.reference import linear as reference
from tests.model.kernels.reference import norm as norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ON_CARD = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bf16's raw bits")
BFLOAT16 = pytest.param(torch.bfloat16, marks=ON_CARD)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16], ids=str)
EPSILON = 1e-3  # large enough to have an effect
ROWS = [1, 2, 5, 16, 17, 33, 65]
# (outputs, inputs) of a layer's four products and of the output head.
SHAPES = {
    "SmolLM2-135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    "Llama-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "Qwen2.5-7B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A product and its options; outputs are counted before the gate."""

    rows: int
    outputs: int = 102  # not a multiple of any tile, and even, for pairs
    inputs: int = 80
    dtype: torch.dtype = torch.float32
    has_norm: bool = False
    has_bias: bool = False
    is_gated: bool = False
    has_residual: bool = False
    num_parts: int = 1  # of the squares of x
    tile: Tile | None = None

    @property
    def width(self) -> int:
        return self.outputs // 2 if self.is_gated else self.outputs


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(case: Case) -> dict[str, Any]:
    """All inputs except the output. Rows of x differ in size, so that the norm has an effect."""
    sizes = 2.0 ** (torch.arange(case.rows)[:, None] % 5 - 2)
    x_mk = (draw(1, case.rows, case.inputs) * sizes).to(case.dtype)
    given: dict[str, Any] = {"x_mk": x_mk, "is_gated": case.is_gated}
    given["weight_nk"] = (draw(2, case.outputs, case.inputs) / case.inputs**0.5).to(case.dtype)
    if case.has_norm:
        given["epsilon"] = EPSILON
        pieces = torch.tensor_split(x_mk.float().square(), case.num_parts, dim=1)
        given["squares_mj"] = torch.stack([piece.sum(1) for piece in pieces], dim=1)
    if case.has_bias:
        given["bias_n"] = draw(3, case.outputs).to(case.dtype)
    if case.has_residual:
        given["residual_mn"] = draw(4, case.rows, case.width).to(case.dtype)
    return given


@contextmanager
def poison() -> Iterator[None]:
    """Uninitialized memory holds NaN. `use_deterministic_algorithms` imports torch's compiler."""
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.ones(1, device=DEVICE).new_empty(3).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def moved(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in given.items()}


def found(case: Case, **options: Any) -> Tensor:
    with poison():
        return linear(**moved(arguments(case) | options), tile=case.tile).cpu()


def exact(case: Case) -> Tensor:
    """The reference's result in float64."""
    given = arguments(case)
    return reference.linear(
        **{k: v.double() if isinstance(v, Tensor) else v for k, v in given.items()}
    )


def distance(one: Tensor, other: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def check(case: Case) -> None:
    out = found(case)
    assert out.dtype == case.dtype and out.shape == (case.rows, case.width)
    assert distance(out, exact(case)) < LIMITS[case.dtype]


@pytest.mark.parametrize("inputs", [80, 576, 1024])
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_equals_torch(rows: int, inputs: int) -> None:
    check(Case(rows=rows, inputs=inputs))


@pytest.mark.parametrize("rows", ROWS)
@TYPES
def test_norm_bias_gate_and_residual_are_applied_in_this_order(
    dtype: torch.dtype, rows: int
) -> None:
    check(
        Case(
            rows=rows, inputs=576, dtype=dtype, has_norm=True, has_bias=True, is_gated=True,
            has_residual=True, num_parts=3,
        )
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("part", ["has_norm", "has_bias", "is_gated", "has_residual"])
def test_each_option_works_alone(part: str, rows: int) -> None:
    check(Case(rows=rows, **{part: True}))  # type: ignore[arg-type]


def test_one_row_in_bfloat16_needs_no_matrix_units() -> None:
    # The interpreter truncates bfloat16 where a GPU rounds, which is close enough.
    check(Case(rows=1, inputs=576, dtype=torch.bfloat16, has_norm=True, is_gated=True))


@pytest.mark.parametrize("name", SHAPES)
def test_one_row_is_right_with_the_tiles_of_real_shapes(name: str) -> None:
    tiles = {(tile_for(1, *shape, torch.bfloat16), shape[1]) for shape in SHAPES[name]}
    assert max(tile.outputs for tile, _ in tiles) == 4, "22 outputs have several tiles and a rest"
    for tile, inputs in tiles:
        given = Case(
            rows=1, outputs=22, inputs=inputs, dtype=torch.bfloat16, has_norm=True, tile=tile
        )
        check(replace(given, is_gated=True))
        check(replace(given, has_bias=True, has_residual=True))


@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("slices", [1, 2, 4])
@TYPES
def test_slices_only_change_the_order_of_a_sum(dtype: torch.dtype, slices: int, rows: int) -> None:
    tile = Tile(rows=16, outputs=8, inputs=32, slices=slices, warps=4, stages=2)
    check(Case(rows=rows, inputs=256, dtype=dtype, has_norm=True, tile=tile))


def test_narrow_tiles_of_a_long_sum_use_slices() -> None:
    assert tile_for(5, 102, 1024, torch.float32).slices > 1
    assert tile_for(5, 102, 576, torch.float32).slices == 1  # not divisible


@pytest.mark.parametrize("num_parts", [1, 2, 7, 32])
def test_squares_may_come_in_any_number_of_parts(num_parts: int) -> None:
    check(Case(rows=5, has_norm=True, num_parts=num_parts))


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_squares_of_rows_equal_torch(dtype: torch.dtype, rows: int) -> None:
    x_mk = draw(5, rows, 84).to(dtype)[:, 2:82]  # rows with a stride
    with poison():
        squares = row_squares(x_mk.to(DEVICE)).cpu()
    assert squares.shape == (rows, 1) and squares.dtype == torch.float32
    assert distance(squares, reference.row_squares(x_mk.double())) < 1e-5


@pytest.mark.parametrize("rows", [2, 17, 65])
@pytest.mark.parametrize("is_gated", [False, True])
@TYPES
def test_squares_are_of_the_stored_output(dtype: torch.dtype, is_gated: bool, rows: int) -> None:
    case = Case(rows=rows, dtype=dtype, is_gated=is_gated, has_residual=True)
    shape = (rows, num_squares(rows, case.outputs, case.inputs, dtype))
    squares = torch.full(shape, torch.nan, device=DEVICE)
    assert shape[1] > 1
    out = found(case, squares_out_mj=squares)
    assert torch.equal(out, found(case))  # writing squares does not change the output
    sums = squares.cpu().sum(1, keepdim=True)
    assert distance(sums, reference.row_squares(out)) < 1e-5


def test_a_product_uses_the_squares_of_the_previous_one() -> None:
    """As in a layer: x += inner down; then the norm of x in the next product."""
    rows, width, seed = 18, 72, 6
    x, inner = draw(seed, rows, width).to(DEVICE), draw(seed + 1, rows, 80).to(DEVICE)
    down, after = draw(seed + 2, width, 80).to(DEVICE), draw(seed + 3, 50, width).to(DEVICE)
    squares = torch.full((rows, num_squares(rows, width, 80, x.dtype)), torch.nan, device=DEVICE)
    expected = x + inner @ down.T
    linear(inner, down, residual_mn=x, out_mn=x, squares_out_mj=squares)
    assert distance(x, expected) < 1e-5
    ones = torch.ones(width, device=DEVICE)
    right = norm_reference.rms_norm(expected, ones, EPSILON) @ after.T
    assert distance(linear(x, after, epsilon=EPSILON, squares_mj=squares), right) < 1e-5


@pytest.mark.parametrize("rows", [1, 5, 17])
@TYPES
def test_a_residual_can_be_added_to_in_place(dtype: torch.dtype, rows: int) -> None:
    case = Case(rows=rows, dtype=dtype, has_residual=True)
    given = moved(arguments(case))
    residual = given["residual_mn"]
    out = linear(**given, out_mn=residual)
    assert out is residual
    assert torch.equal(out.cpu(), found(case))


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_rows_may_have_a_stride_and_the_gaps_are_untouched(rows: int) -> None:
    case = Case(rows=rows, has_norm=True, has_residual=True)
    given = moved(arguments(case))
    wide = torch.full((rows, case.inputs + 40), torch.nan, device=DEVICE)
    wide[:, 8:-32] = given["x_mk"]
    home = torch.full((rows, case.width + 24), 7.0, device=DEVICE)
    home[:, 16:-8] = given["residual_mn"]
    out = home[:, 16:-8]
    linear(**given | {"x_mk": wide[:, 8:-32], "residual_mn": out, "out_mn": out})
    assert torch.equal(out.cpu(), found(case))
    assert (home[:, :16] == 7).all() and (home[:, -8:] == 7).all()


def test_offsets_of_rows_may_exceed_32_bits(tmp_path: Path) -> None:
    size, stride = 2**31 + 64, 2**30  # the third row starts after 2**31 numbers
    if DEVICE == "cuda":
        room = torch.empty(size, dtype=torch.float16, device=DEVICE)
    else:  # a sparse file, which takes no memory
        room = torch.from_file(str(tmp_path / "room"), True, size, dtype=torch.float16)
    x, out = room.as_strided((3, 64), (stride, 1)), room.as_strided((3, 32), (stride, 1))
    weight = draw(2, 32, 64).to(DEVICE, torch.float16)
    x.copy_(draw(1, 3, 64))
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(linear(x, weight).float(), expected, rtol=2e-3, atol=2e-2)
    linear(x.contiguous(), weight, out_mn=out)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_row_does_not_depend_on_other_rows(rows: int) -> None:
    full, given = found(Case(rows=16, inputs=576)), arguments(Case(rows=16, inputs=576))
    x_mk = given["x_mk"][:rows].clone()
    x_mk[1] = torch.nan
    out = found(Case(rows=rows, inputs=576), x_mk=x_mk)
    assert out[1].isnan().all()
    keep = torch.arange(rows) != 1
    assert torch.equal(out[keep], full[:rows][keep])


@pytest.mark.parametrize("rows", [1, 3])
def test_epsilon_keeps_zero_rows_zero_and_affects_small_rows(rows: int) -> None:
    x = torch.zeros(rows, 64, device=DEVICE)
    x[-1] = 1e-3
    options = {"epsilon": 1e-6, "squares_mj": row_squares(x)}
    out = linear(x, torch.eye(64, device=DEVICE), **options)  # type: ignore[arg-type]
    assert not out[:-1].any()
    torch.testing.assert_close(out[-1], torch.full_like(out[-1], 0.5**0.5))


def test_one_row_computes_its_own_squares() -> None:
    case = Case(rows=1, inputs=576, has_norm=True)
    assert torch.equal(found(case, squares_mj=None), found(case))


def test_no_rows_launch_nothing() -> None:
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(6, 64, device=DEVICE)
    assert linear(x, weight, epsilon=EPSILON, squares_mj=row_squares(x)).shape == (0, 6)
    assert linear(x, weight, is_gated=True).shape == (0, 3)
    assert row_squares(x).shape == (0, 1)


def test_the_reference_combines_the_references_of_its_parts() -> None:
    case = Case(rows=4, has_norm=True, has_bias=True, is_gated=True, has_residual=True, num_parts=2)
    given = arguments(case)
    normed = norm_reference.rms_norm(given["x_mk"], torch.ones(case.inputs), EPSILON)
    inner = torch.nn.functional.linear(normed, given["weight_nk"], given["bias_n"])
    right = activation_reference.silu_multiply(inner) + given["residual_mn"]
    torch.testing.assert_close(reference.linear(**given), right)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("memory", [44 * 1024, 80 * 1024, 207 * 1024])
def test_every_chosen_tile_is_valid(name: str, dtype: torch.dtype, memory: int) -> None:
    for rows in range(1, 257):
        for outputs, inputs in SHAPES[name]:
            tile = tile_within((132, memory), rows, outputs, inputs, dtype)
            assert all(is_power_of_two(size) for size in tile[:5]), tile
            assert tile.outputs % 2 == 0, "a pair must be in one tile"
            assert tile.warps <= 8 and tile.stages >= 1
            assert tile.slices == 1 or inputs % (tile.slices * tile.inputs) == 0, tile
            if rows > 1:
                assert tile.rows >= 16 and tile.inputs >= 16 and tile.outputs >= 8, tile
                stage = (tile.rows + tile.outputs) * tile.inputs * tile.slices * dtype.itemsize
                assert tile.stages * stage <= memory, tile
            tile = tile_for(rows, outputs, inputs, dtype)
            assert num_squares(rows, outputs, inputs, dtype) == -(-outputs // tile.width)
