"""Products with 4-bit integers equal those with the dequantized matrix, in every division."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.products import int4
from headway.model.kernels.products.int4 import Int4Matrix, Int4Tile, dequantized, int4_linear, pack
from tests.model.kernels.reference import linear as linear_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 on a card; the interpreter multiplies bfloat16's raw bits.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}[DTYPE]
SHAPES = {  # outputs, inputs, group
    "groups of 32": (40, 288, 32), "groups of 64": (66, 192, 64), "groups of 128": (64, 512, 128),
    "groups of 96": (34, 288, 96), "two blocks in a group": (20, 1024, 512), "whole rows": (72, 320, 320),
}  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialized memory holds NaN. `use_deterministic_algorithms` imports torch's compiler."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def draw(seed: int, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, DTYPE)


def matrix(outputs: int, inputs: int, group: int) -> tuple[Int4Matrix, Tensor]:
    """A random matrix with zero points from 0 to 16, and its numbers."""
    source = torch.Generator().manual_seed(outputs)
    q = torch.randint(16, (outputs, inputs), generator=source)
    zero = torch.randint(17, (outputs, inputs // group), generator=source)
    scale = (0.5 + torch.rand(zero.shape, generator=source)) / inputs**0.5
    wide = (q - zero.repeat_interleave(group, 1)).float() * scale.repeat_interleave(group, 1)
    return pack(*(each.to(DEVICE) for each in (q.byte(), scale, zero))), wide.to(DEVICE)


def distance(one: Tensor, other: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("name", SHAPES)
def test_dequantized_numbers_are_rounded_once(name: str) -> None:
    packed, wide = matrix(*SHAPES[name])
    assert torch.equal(dequantized(packed, torch.float32), wide)
    assert torch.equal(dequantized(packed, torch.float16), wide.half())


@pytest.mark.parametrize(("programs", "scales"), [(1, False), (2, True), (3, False), (5, True)])
@pytest.mark.parametrize(("name", "rows"), [*zip(SHAPES, (1, 5, 16, 20, 3, 2), strict=True)])
def test_products_are_those_of_the_dequantized_matrix(
    name: str, rows: int, programs: int, scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the blocks of all tiles are divided among programs."""
    num_blocks = -(-SHAPES[name][0] // 32) * -(-SHAPES[name][1] // 256) * -(-rows // 16)
    monkeypatch.setattr(int4, "num_programs", lambda *_: min(programs, num_blocks))
    packed, wide = matrix(*SHAPES[name])
    x, residual, bias = (
        draw(1, rows, wide.shape[1]), draw(2, rows, len(wide)), draw(3, len(wide))
    )  # fmt: skip
    tile = Int4Tile(16, 32, warps=4, stages=1, programs=1, scales_numbers=scales)
    packed, options = packed._replace(bias_n=bias), {"bias_n": bias}
    expected = linear_reference.linear(x.float(), wide, residual_mn=residual, **options)
    found = int4_linear(
        x, packed, residual_mn=residual, out_mn=torch.empty_like(residual), tile=tile
    )
    assert distance(found, expected) < LIMIT
    expected = linear_reference.linear(x.float(), wide, is_gated=True, **options)
    assert distance(int4_linear(x, packed, is_gated=True, tile=tile), expected) < LIMIT
    assert not int4._counters(x.device).any(), "the next product counts from zero"


def test_every_tile_multiplies_up_to_its_rows() -> None:
    packed, wide = matrix(64, 256, 128)
    for rows in int4.TILES:
        x = draw(rows, rows, 256)
        assert distance(int4_linear(x, packed), x.float() @ wide.T) < LIMIT
    assert len(int4_linear(x[:0], packed)) == 0
