"""The gated product: the kernel for Hopper GPUs equals the reference; the choice of its tile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels.products import gated
from headway.model.kernels.products.gated import (
    TILES,
    GatedTile,
    gated_product,
    in_two_kernels,
    tile_for,
)
from tests.model.kernels.reference.activation import silu_multiply
from tests.support.hopper import ON_HOPPER


def operands(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(num_rows)
    x_tk = torch.randn((num_rows, num_inputs), generator=source)
    weight_2nk = torch.randn((2 * num_outputs, num_inputs), generator=source) * num_inputs**-0.5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return x_tk.to(device, dtype), weight_2nk.to(device, dtype)


def expected(x_tk: Tensor, weight_2nk: Tensor) -> Tensor:
    return silu_multiply(x_tk.double() @ weight_2nk.double().t())


def hopper_product(x_tk: Tensor, weight_2nk: Tensor, tile: GatedTile) -> Tensor:
    kernel = gated.hopper_kernel()
    assert kernel is not None and kernel.supports(x_tk, weight_2nk)
    return kernel.gated_product_hopper(x_tk, weight_2nk, tile)


@ON_HOPPER
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_is_right(tile: GatedTile, dtype: torch.dtype) -> None:
    """Also with rows and outputs that do not fill the last tiles, and with more and fewer steps
    than stages."""
    for num_rows, num_inputs, num_outputs in (
        (1, 64, 8), (63, 128, 200), (300, 1024, 3072), (257, 320, 1000), (2049, 192, 4096),
    ):  # fmt: skip
        x_tk, weight_2nk = operands(num_rows, num_inputs, num_outputs, dtype)
        right = expected(x_tk, weight_2nk)
        error = (hopper_product(x_tk, weight_2nk, tile) - right).norm() / right.norm()
        assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4)


@ON_HOPPER
def test_a_row_depends_neither_on_the_tile_nor_on_other_rows() -> None:
    x_tk, weight_2nk = operands(900, 1024, 3072)
    found = [hopper_product(x_tk, weight_2nk, tile) for tile in TILES]
    found += [hopper_product(x_tk[:300], weight_2nk, tile) for tile in TILES]
    assert all(torch.equal(each, found[0][: len(each)]) for each in found)


@ON_HOPPER
def test_large_gates_do_not_overflow() -> None:
    """Each output has the input of one gate and the ups 1; silu is 0 or the gate itself."""
    gates = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30], device="cuda")
    x_tk = torch.zeros((len(gates), 64), device="cuda", dtype=torch.bfloat16)
    x_tk[:, 0], x_tk[:, 1] = gates, 1
    weight_2nk = torch.zeros((16, 64), device="cuda", dtype=torch.bfloat16)
    weight_2nk[0::2, 0], weight_2nk[1::2, 1] = 1, 1
    for tile in TILES:
        out = hopper_product(x_tk, weight_2nk, tile)
        assert torch.equal(out, x_tk[:, :1].clamp(min=0).expand(-1, 8))


@ON_HOPPER
def test_many_rows_use_the_kernel() -> None:
    x_tk, weight_2nk = operands(4096, 1024, 3072)
    tile = tile_for(4096, 3072, 1024)
    assert tile is not None
    found = gated_product(x_tk, weight_2nk, None)
    assert torch.equal(found, hopper_product(x_tk, weight_2nk, tile))


def test_few_rows_a_bias_and_other_types_are_left_to_two_kernels() -> None:
    for dtype, num_rows in ((torch.float32, 300), (torch.bfloat16, 3)):
        x_tk, weight_2nk = operands(num_rows, 24, 20, dtype)
        for bias_2n in (None, torch.ones_like(weight_2nk[:, 0])):
            inner = torch.nn.functional.linear(x_tk, weight_2nk, bias_2n)
            found, right = gated_product(x_tk, weight_2nk, bias_2n), silu_multiply(inner)
            torch.testing.assert_close(found, right, rtol=2e-2, atol=1e-2)


def test_the_kernel_supports_sizes_that_the_copy_engine_can_read() -> None:
    from headway.model.kernels.products.gated_hopper import supports

    def is_supported(inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return supports(*operands(5, inputs, outputs, dtype))

    assert is_supported(64, 8) and is_supported(192, 24) and is_supported(64, 8, torch.float16)
    assert not any(is_supported(*sizes) for sizes in ((32, 8), (72, 8), (64, 4), (64, 12)))
    assert not is_supported(64, 8, torch.float32)
    x_tk, weight_2nk = operands(5, 128, 8)
    assert not supports(x_tk[:, :64], weight_2nk[:, :64].contiguous())
    assert not supports(x_tk[:, :64].contiguous(), weight_2nk[:, :64])


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "rows_of_128", "rows_of_256", "others"),
    [
        (3584, 18944, (256, 512, 1536), (1024, 2048, 4096, 8192, 16384), (1, 64, 255, 300)),
        (4096, 14336, (), (1024, 2048, 4096, 8192), (512,)),
        (1024, 3072, (512, 1024, 1536, 5000), (4096, 8192, 16384), (256, 768)),
    ],
)
def test_a_tile_is_used_where_it_was_measured_to_be_faster(
    num_inputs: int, num_outputs: int, rows_of_128: tuple[int, ...], rows_of_256: tuple[int, ...],
    others: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Than cuBLAS and the activation, on an H200."""
    monkeypatch.setattr(gated, "device_limits", lambda: (132, 200 * 1024))

    def height(num_rows: int) -> int:
        tile = tile_for.__wrapped__(num_rows, num_outputs, num_inputs)
        return 2 * tile.rows if tile else 0

    assert all(height(num_rows) == 128 for num_rows in rows_of_128)
    assert all(height(num_rows) == 256 for num_rows in rows_of_256)
    assert not any(height(num_rows) for num_rows in others)


def tiles_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[GatedTile]:
    """The tiles with which the kernel is called from now on; it computes nothing."""
    asked = list[GatedTile]()
    kernel = SimpleNamespace(
        supports=lambda *_: True, gated_product_hopper=lambda _x, _w, tile: asked.append(tile)
    )
    monkeypatch.setattr(gated, "hopper_kernel", lambda: kernel)
    return asked


def test_all_tiles_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later pass may have any number of rows."""
    asked = tiles_asked_for(monkeypatch)
    monkeypatch.setattr(gated, "is_compiling", lambda: True)
    gated_product(*operands(3, 24, 20, torch.float32), None)
    assert asked == list(TILES)


def test_memory_is_measured_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of fewer rows may use two kernels, which also store the product."""
    asked = tiles_asked_for(monkeypatch)
    tile = next(iter(TILES))
    monkeypatch.setattr(gated, "tile_for", lambda *_: tile)
    given = operands(3, 24, 20, torch.float32)
    with in_two_kernels():
        found = gated_product(*given, None)
    assert found.shape == (3, 20) and not asked
    gated_product(*given, None)
    assert asked == [tile]
