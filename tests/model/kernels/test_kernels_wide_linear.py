"""Products with extra outputs or with parts of the inputs: they equal the reference; their tiles."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headway.model.kernels.products import tiles
from headway.model.kernels.products.linear import linear
from tests.model.kernels.reference import linear as reference
from tests.model.kernels.test_kernels_linear import (
    DEVICE,
    SHAPES,
    TYPES,
    Case,
    arguments,
    check,
    distance,
    found,
    is_power_of_two,
    moved,
)

LIMITS = (132, 207 * 1024)  # of an H200
# Small tiles with extra outputs, with slices, and with parts of the inputs.
WIDE = {
    "extra": tiles.Tile(rows=32, outputs=32, inputs=16, slices=1, warps=4, stages=2, extra=16),
    "sliced": tiles.Tile(rows=16, outputs=32, inputs=16, slices=2, warps=4, stages=2, extra=8),
    "parts": tiles.Tile(rows=32, outputs=32, inputs=16, slices=1, warps=4, stages=2, parts=5),
}
WIDE_TILES = pytest.mark.parametrize("tile", WIDE.values(), ids=list(WIDE))


@pytest.mark.parametrize("rows", [2, 32, 45])
@TYPES
@WIDE_TILES
def test_wide_tiles_equal_the_reference(tile: tiles.Tile, dtype: torch.dtype, rows: int) -> None:
    check(Case(rows=rows, inputs=160, dtype=dtype, tile=tile))
    check(
        Case(
            rows=rows, inputs=160, dtype=dtype, has_norm=True, has_bias=True, is_gated=True,
            has_residual=True, num_parts=3, tile=tile,
        )
    )  # fmt: skip


@WIDE_TILES
def test_squares_of_wide_tiles_are_of_the_stored_output(tile: tiles.Tile) -> None:
    case = Case(rows=45, inputs=160, has_residual=True, tile=tile)
    squares = torch.full((45, -(-case.outputs // tile.width)), torch.nan, device=DEVICE)
    out = found(case, squares_out_mj=squares)
    assert torch.equal(out, found(case))
    sums = squares.cpu().sum(1, keepdim=True)
    assert distance(sums, reference.row_squares(out)) < 1e-5


@WIDE_TILES
def test_rows_of_wide_tiles_may_have_a_stride(tile: tiles.Tile) -> None:
    case = Case(rows=33, inputs=160, has_residual=True, tile=tile)
    given = moved(arguments(case))
    wide = torch.full((33, case.inputs + 16), torch.nan, device=DEVICE)
    home = torch.full((33, case.width + 10), 7.0, device=DEVICE)
    wide[:, 8:-8], home[:, 4:-6] = given["x_mk"], given["residual_mn"]
    out = home[:, 4:-6]
    linear(**given | {"x_mk": wide[:, 8:-8], "residual_mn": out, "out_mn": out}, tile=tile)
    assert torch.equal(out.cpu(), found(case))
    assert (home[:, :4] == 7).all() and (home[:, -6:] == 7).all()


@pytest.mark.parametrize("name", SHAPES)
def test_every_chosen_wide_tile_is_valid(name: str) -> None:
    for rows in range(1, 300):
        for outputs, inputs in SHAPES[name]:
            tile = tiles.wide_tile_within(LIMITS, rows, outputs, inputs, torch.bfloat16)
            small = tiles.wide_tile_within((132, 80 * 1024), rows, outputs, inputs, torch.bfloat16)
            assert small is None, "such tiles need much shared memory"
            if tile is None:
                continue
            assert 16 < rows <= 128 and tile.slices == 1
            sizes = (*tile[:5], tile.parts, tile.extra or 1)
            assert all(is_power_of_two(size) for size in sizes), tile
            assert inputs % (tile.inputs * tile.parts) == 0, tile
            assert tile.parts == 1 or tile.extra == 0, tile
            stage = (tile.rows + tile.width) * tile.inputs * 2
            assert tile.stages >= 2 and tile.stages * stage <= 227 * 1024 - 8 * 1024, tile


def test_a_large_matrix_has_about_one_wide_tile_for_each_multiprocessor() -> None:
    def num_programs(rows: int, outputs: int, inputs: int) -> int:
        tile = tiles.wide_tile_within(LIMITS, rows, outputs, inputs, torch.bfloat16)
        assert tile is not None and tile.rows == 128
        return -(-rows // tile.rows) * -(-outputs // tile.width) * tile.parts

    assert num_programs(65, 37888, 3584) == num_programs(128, 37888, 3584) == 132
    assert num_programs(96, 28672, 4096) == num_programs(96, 3584, 18944) == 112
    others = (64, 37888, 3584), (129, 37888, 3584), (96, 1024, 3072), (16, 3584, 18944)
    for shape in others:
        assert tiles.wide_tile_within(LIMITS, *shape, torch.bfloat16) is None


@pytest.mark.parametrize("name", SHAPES)
def test_a_tile_has_extra_outputs_only_where_a_second_tile_would_follow(name: str) -> None:
    for rows in range(2, 257):
        for outputs, inputs in SHAPES[name]:
            shape = rows, outputs, inputs, torch.bfloat16
            tile = tiles.tile_within(LIMITS, *shape)
            wider = tiles.widened(tile, LIMITS, *shape)
            if wider == tile:
                continue
            num_row_tiles = -(-rows // tile.rows)
            num_programs = num_row_tiles * -(-outputs // wider.width)
            assert num_programs <= 132 < num_row_tiles * -(-outputs // tile.outputs)
            assert is_power_of_two(wider.extra) and wider.extra >= 8 and inputs % wider.inputs == 0
            stage = (wider.rows + wider.width) * wider.inputs * 2
            assert wider.stages >= 3 and wider.stages * stage <= LIMITS[1], wider
            assert 2 * tile.stages * (tile.rows + tile.outputs) * tile.inputs * 2 > LIMITS[1]


@pytest.mark.parametrize("name", SHAPES)
def test_a_balanced_tile_gives_the_busiest_multiprocessor_fewer_outputs(name: str) -> None:
    for rows in range(1, 257):
        for outputs, inputs in SHAPES[name]:
            shape = rows, outputs, inputs, torch.bfloat16
            assert tiles.balanced_tile_within((132, 80 * 1024), *shape) is None, (
                "needs shared memory"
            )
            tile = tiles.balanced_tile_within(LIMITS, *shape)
            usual = tiles.tile_within(LIMITS, *shape)
            if tile is None:
                continue
            assert 2 <= rows <= tile.rows and tile.parts == 1
            rounds, usual_rounds = (-(-outputs // t.width // 132) for t in (tile, usual))
            assert rounds * tile.width <= usual_rounds * usual.width and rounds <= usual_rounds
            assert rounds <= (2 if tile.outputs == 128 else 1)
            assert all(is_power_of_two(size) for size in (*tile[:5], tile.extra or 1)), tile
            assert tile.extra == 0 or tile.extra >= (16 if tile.rows == 64 else 8)
            assert tile.slices * tile.rows == 64, tile
            assert inputs % (tile.inputs * tile.slices) == 0, tile
            num_buffers = tile.stages - (tile.slices > 1)  # the last stage needs none
            stage = (tile.rows + tile.width) * tile.inputs * tile.slices * 2
            assert num_buffers >= 3 and min(rounds, 2) * num_buffers * stage <= LIMITS[1], tile


def test_products_of_large_models_are_balanced() -> None:
    for outputs, inputs, few, more in (
        (4608, 3584, 40, 48),
        (6144, 4096, 48, 48),
        (37888, 3584, 144, 144),
        (2560, 9728, 24, 32),
        (51200, 5120, 0, 0),  # three rounds of 144 outputs are slower than four of 128
        (28672, 4096, 0, 0),  # 224 tiles of 128 outputs are almost as good
        (4096, 4096, 0, 0),  # 128 tiles of 32 outputs already are
        (6144, 1024, 0, 0),  # few inputs
    ):
        for rows, width in ((1, 0), (2, few), (16, few), (17, more), (64, more), (65, 0)):
            tile = tiles.balanced_tile_within(LIMITS, rows, outputs, inputs, torch.bfloat16)
            assert (tile.width if tile else 0) == width
    assert tiles.balanced_tile_within(LIMITS, 16, 6144, 4096, torch.float32) is None


def test_the_first_product_of_a_7b_layer_has_extra_outputs_from_65_rows_on_too() -> None:
    for rows in (65, 128):
        shape = rows, 4608, 3584, torch.bfloat16
        assert tiles.widened(tiles.tile_within(LIMITS, *shape), LIMITS, *shape).width == 80
