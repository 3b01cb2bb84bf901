"""Products of few rows with fp8 matrices of the 7B shape, on a GPU; see fp8.py.

Every product is computed in several ways, each with several tiles, in one CUDA graph that goes
through enough matrices that none stays in the L2 cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.gpu.kernels import seconds
from bench.harness import Figures
from headway.model.kernels.launch import compile_all
from headway.model.kernels.products.fp8 import quantize_rows, scaled_linear
from headway.model.kernels.products.linear import linear
from headway.model.kernels.products.tiles import Tile, tile_for
from headway.model.weights.fp8 import FP8, quantize

Log = Callable[[str], None]
PRODUCTS = {  # (outputs, inputs)
    "qkv": (4608, 3584), "output": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944),
}  # fmt: skip
ROWS = (1, 2, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
ROTATED_BYTES = 400 * 2**20  # of matrices in turn, so that none stays in the L2 cache
VECTOR_TILES = [
    Tile(1, outputs, inputs, 1, warps, 1)
    for outputs, inputs, warps in (
        (2, 4096, 2), (2, 4096, 4), (2, 8192, 8), (4, 1024, 2), (4, 2048, 4), (4, 2048, 8),
        (4, 4096, 2), (4, 4096, 4), (4, 4096, 8), (4, 4096, 16), (8, 2048, 4), (8, 2048, 8),
        (8, 4096, 4), (8, 4096, 8), (8, 4096, 16), (16, 2048, 8), (16, 4096, 16),
    )
]  # fmt: skip
TILES = [
    Tile(32, 32, 256, 1, 4, 6), Tile(64, 16, 256, 1, 4, 6), Tile(64, 32, 256, 1, 4, 6),
    Tile(64, 64, 128, 1, 4, 6), Tile(64, 64, 256, 1, 4, 6), Tile(64, 128, 128, 1, 4, 6),
    Tile(64, 128, 256, 1, 4, 4), Tile(128, 64, 128, 1, 4, 6), Tile(128, 64, 256, 1, 8, 4),
    Tile(128, 128, 128, 1, 8, 6), Tile(128, 256, 128, 1, 8, 4),
]  # fmt: skip


class Way(NamedTuple):
    """One way to compute a product: launches in turn, with different matrices."""

    name: str
    tile: Tile | None
    launches: list[Callable[[], Tensor]]


class Product:
    """A product of one shape, in all ways."""

    def __init__(self, outputs: int, inputs: int, device: str) -> None:
        self.outputs, self.inputs, self.device = outputs, inputs, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        count = 1 if device == "cpu" else max(2, ROTATED_BYTES // (outputs * inputs))
        self.floats = [self._random(outputs, inputs) for _ in range(count)]
        self.matrices = [quantize(each) for each in self.floats]

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(0.0, 0.02).to(self.dtype)

    def ways(self, num_rows: int) -> Iterator[Way]:
        x = self._random(num_rows, self.inputs)
        rounded = quantize_rows(x)
        yield Way("bfloat16", None, [partial(F.linear, x, each) for each in self.floats])
        scaled = [partial(scaled_linear, rounded, each.q, each.scale) for each in self.matrices]
        yield Way("scaled_mm", None, scaled)
        yield Way("quantize", None, [lambda: quantize_rows(x).values_tk] * 4)
        given: Figures = {"x_mk": x}
        if num_rows > 1:
            out = torch.empty((num_rows, self.outputs), dtype=self.dtype, device=self.device)
            given = {"x_mk": rounded.values_tk, "x_scale_m": rounded.scale_t, "out_mn": out}
        for tile in self._tiles(num_rows):
            yield self._ours(given | {"tile": tile})

    def _ours(self, options: Figures) -> Way:
        launches = [
            partial(linear, weight_nk=each.q, scale_n=each.scale, **options)
            for each in self.matrices
        ]
        return Way("kernel", options["tile"], launches)

    def _tiles(self, num_rows: int) -> list[Tile]:
        """The chosen tile first, then others for this number of rows."""
        chosen = tile_for(num_rows, self.outputs, self.inputs, FP8)
        others = VECTOR_TILES if num_rows == 1 else [t for t in TILES if t.rows < 2 * num_rows]
        return [chosen, *(tile for tile in others if tile != chosen)]


def measure_products(log: Log, *, is_tiny: bool) -> Figures:
    """Figures by shape and rows; tiny shapes run on the CPU."""
    shapes, rows, device = PRODUCTS, ROWS, "cuda"
    if is_tiny:
        shapes, rows, device = {"tiny": (48, 64)}, (1, 3), "cpu"
    report: Figures = {}
    with torch.inference_mode():
        for name, (outputs, inputs) in shapes.items():
            product = Product(outputs, inputs, device)
            if not is_tiny:
                compile_all(partial(launch_all, product, rows))
            for num_rows in rows:
                found = measure_rows(product, num_rows, device)
                report.setdefault(name, {})[str(num_rows)] = found
                log(f"{name}, {num_rows} rows: {summary(found)}")
            del product
            gc.collect()
    return report


def launch_all(product: Product, rows: tuple[int, ...]) -> None:
    for num_rows in rows:
        for way in product.ways(num_rows):
            if way.tile:
                way.launches[0]()


def measure_rows(product: Product, num_rows: int, device: str) -> Figures:
    found: Figures = {}
    for way in product.ways(num_rows):
        figures: Figures = {"tile": list(way.tile)} if way.tile else {}
        try:
            figures["us"] = 1e6 * seconds(list(way.launches), device)
        except Exception as error:  # for example a tile that does not fit on this GPU
            if device == "cpu":
                raise
            figures["skipped"] = f"{type(error).__name__}: {error}"[:200]
        found.setdefault(way.name, []).append(figures)
    return found | {"errors": errors(product, num_rows)}


def errors(product: Product, num_rows: int) -> Figures:
    """Relative errors of each way with the chosen tile: of its own arithmetic, and in total."""
    x = product._random(num_rows, product.inputs)
    rounded = quantize_rows(x)
    weight, scale = product.matrices[0].q, product.matrices[0].scale
    wide, values = product.matrices[0].wide(), rounded.values_tk.float() * rounded.scale_t
    if num_rows == 1:
        given = {"kernel": (linear(x, weight, scale_n=scale), x.float())}
    else:
        out = torch.empty((num_rows, product.outputs), dtype=product.dtype, device=x.device)
        options = {"x_scale_m": rounded.scale_t, "scale_n": scale, "out_mn": out}
        given = {
            "kernel": (linear(rounded.values_tk, weight, **options), values),
            "scaled_mm": (scaled_linear(rounded, weight, scale), values),
        }
    unrounded = x.float() @ product.floats[0].float().T
    return {
        name: {"own": distance(out, rows @ wide.T), "total": distance(out, unrounded)}
        for name, (out, rows) in given.items()
    }


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def summary(found: Figures) -> str:
    parts = []
    for name, ways in found.items():
        timed = [each for each in ways if "us" in each] if name != "errors" else []
        if timed:
            best = min(timed, key=lambda each: each["us"])
            parts.append(f"{name} {timed[0]['us']:.1f}")
            if len(timed) > 1:
                parts[-1] += f" best {best['us']:.1f} {best['tile']}"
    return "; ".join(parts)
