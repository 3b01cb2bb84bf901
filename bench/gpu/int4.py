"""Products with 4-bit matrices on a GPU: candidates for the tiles, prompts, and the speed of decoding.

    python -m bench.gpu.int4                        prints one JSON object; takes a few minutes
    python -m bench.gpu.int4 --only tiles --rows 1 128
    python -m bench.gpu.int4 --tiny                 runs in seconds without a GPU

tiles    microseconds of a product of each matrix of Llama-2-7B's shape with each candidate, in a CUDA
         graph with enough matrices that none stays in the L2 cache: `chosen` is the package's tile
         (kernels/products/int4.py), `best` the fastest five, `bfloat16` the package's product of as
         many decodes (linear up to 128 rows, else torch), `floor` the time of the bytes. `error` is
         the distance from float32 over its norm; the report is not ok above 0.01
prompts  the same for rows that cuBLAS multiplies by a dequantized copy
decode   output tokens/s of 1, 32 and 128 requests of 256 prompt and 128 output tokens, in 4 bits and
         in bfloat16, with random weights of --shape, and the ratio
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.gpu import roofline
from bench.gpu.kernels import seconds
from bench.harness import SHAPES, Bench, Figures, log
from headway.model.kernels.launch import compile_all
from headway.model.kernels.products import int4
from headway.model.kernels.products.int4 import Int4Tile, dequantized, int4_linear, pack
from headway.model.kernels.products.linear import linear

Launches = list[Callable[[], object]]
bench = Bench(__doc__)
PRODUCTS = {  # (outputs, inputs)
    "qkv": (12288, 4096), "output": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008),
}  # fmt: skip
bench.option("--rows", nargs="+", type=int, default=[1, 16, 32, 64, 128, 256])
bench.option("--shape", default="qwen2.5-7b", help="folder in bench/shapes, for decode")
bench.option("--products", nargs="+", choices=list(PRODUCTS), default=list(PRODUCTS))
bench.option("--group", type=int, default=128)
bench.option("--tiny", action="store_true", help="use a tiny matrix, on the CPU")
PROMPTS = (320, 512, 1024, 4096)
FORMS = (  # outputs, warps, programs
    (32, 1, 16), (64, 2, 8), (64, 2, 6), (64, 2, 4), (128, 4, 4), (128, 4, 3), (128, 4, 2),
    (64, 4, 4),
)  # fmt: skip
LARGE_FORMS = (  # of more than 16 rows
    (64, 4, 4), (64, 4, 3), (64, 4, 2), (128, 4, 2), (128, 8, 2), (128, 8, 1), (256, 8, 1),
)  # fmt: skip
ROTATED_BYTES = 400 * 2**20  # of matrices in turn, so that none stays in the L2 cache
SCHEME = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
LINEAR_ROWS = 128  # up to which decodes of a 7B model use our kernel


def candidates(rows: int) -> list[Int4Tile]:
    """Tiles of which one or two have all rows, and no more than half is padding if there are many."""
    few = max(rows, 8)
    forms, kinds = (LARGE_FORMS, (False, True)) if rows > 16 else (FORMS, (False,))
    return [
        Int4Tile(height, outputs, warps, stages, programs, scales)
        for height in (8, 16, 32, 64, 128) if few / 2 <= height < 2 * few
        for outputs, warps, programs in forms for stages in (2, 3, 4) for scales in kinds
    ]  # fmt: skip


class Product:
    """Matrices of one shape in 4 bits, and one of them in floats."""

    def __init__(self, outputs: int, inputs: int, group: int, device: str) -> None:
        self.outputs, self.inputs, self.device = outputs, inputs, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        size = outputs * inputs
        count = 1 if device == "cpu" else max(2, 2 * ROTATED_BYTES // size)
        q, groups = (outputs, inputs), (outputs, inputs // group)
        self.packed = [
            pack(
                torch.randint(16, q, dtype=torch.uint8, device=device),
                (0.5 + torch.rand(groups, device=device)) / 8 / inputs**0.5,
                torch.randint(16, groups, dtype=torch.uint8, device=device),
            )
            for _ in range(count)
        ]
        floats = 1 if device == "cpu" else max(2, ROTATED_BYTES // (2 * size))
        self.floats = [dequantized(each, self.dtype) for each in self.packed[:floats]]

    def rows(self, count: int) -> Tensor:
        return torch.randn((count, self.inputs), device=self.device).to(self.dtype)

    def microseconds(self, x: Tensor, tile: Int4Tile) -> float:
        launches: Launches = [partial(int4_linear, x, each, tile=tile) for each in self.packed]
        return 1e6 * seconds(launches, self.device)

    def bfloat16(self, x: Tensor) -> float:
        multiply = linear if len(x) <= LINEAR_ROWS else F.linear
        launches: Launches = [partial(multiply, x, each) for each in self.floats]
        return 1e6 * seconds(launches, self.device)

    def floor(self, rows: int, ceilings: roofline.Ceilings) -> float:
        num_bytes = self.packed[0].num_bytes + 2 * rows * (self.inputs + self.outputs)
        flops = 2 * rows * self.outputs * self.inputs
        return 1e6 * max(num_bytes / ceilings.bandwidth, flops / ceilings.flops)

    def error(self, x: Tensor) -> float:
        exact = x.double() @ dequantized(self.packed[0], torch.float32).double().T
        return float((int4_linear(x, self.packed[0]).double() - exact).norm() / exact.norm())


def products(asked: Namespace) -> tuple[dict[str, tuple[int, int]], str, roofline.Ceilings]:
    torch.manual_seed(0)
    if asked.tiny:
        return {"tiny": (96, 512)}, "cpu", roofline.Ceilings(bandwidth=1e10, flops=1e11)
    return {name: PRODUCTS[name] for name in asked.products}, "cuda", roofline.measured()


@bench.part
def tiles(asked: Namespace) -> Figures:
    shapes, device, ceilings = products(asked)
    report: Figures = {"ok": True}
    for name, shape in shapes.items():
        product = Product(*shape, asked.group, device)
        for rows in [1, 3] if asked.tiny else asked.rows:
            x, plan = product.rows(rows), candidates(rows)[: 2 if asked.tiny else None]
            own = next(tile for most, tile in int4.TILES.items() if rows <= most or most == 128)

            def build(x: Tensor = x, plan: Any = plan, product: Product = product) -> None:
                for tile in plan:
                    int4_linear(x, product.packed[0], tile=tile)

            compile_all(build)
            found: dict[str, float] = {}
            for tile in dict.fromkeys([own, *plan]):
                try:
                    found[str(tuple(tile))] = round(product.microseconds(x, tile), 2)
                except Exception as error:  # too large for the device
                    log(f"{name}, {rows} rows, {tile}: {error}")
            figures: Figures = {
                "chosen": [str(tuple(own)), found.get(str(tuple(own)))], "tried": len(found),
                "best": sorted(found.items(), key=lambda each: each[1])[:5],
                "bfloat16": round(product.bfloat16(x), 2), "error": product.error(x),
                "floor": round(product.floor(rows, ceilings), 2),
            }  # fmt: skip
            report[f"{name}, {rows} rows"] = figures
            report["ok"] = report["ok"] and figures["error"] < 0.01
            log(f"{name}, {rows} rows: {figures}")
    return report


@bench.part
def prompts(asked: Namespace) -> Figures:
    shapes, device, ceilings = products(asked)
    report = Figures()
    for name, shape in shapes.items():
        product = Product(*shape, asked.group, device)
        for rows in [3] if asked.tiny else PROMPTS:
            x = product.rows(rows)

            def multiply(each: int4.Int4Matrix, x: Tensor = x) -> Tensor:
                return F.linear(x, dequantized(each, x.dtype))

            launches: Launches = [partial(multiply, each) for each in product.packed]
            report[f"{name}, {rows} rows"] = {
                "us": round(1e6 * seconds(launches, device), 2),
                "bfloat16": round(product.bfloat16(x), 2),
                "floor": round(product.floor(rows, ceilings), 2),
            }  # fmt: skip
            log(f"{name}, {rows} rows: {report[f'{name}, {rows} rows']}")
    return report


@bench.part
def decode(asked: Namespace) -> Figures:
    from bench.gpu.speed import dummy, fixed, timed

    config = json.loads((SHAPES / asked.shape / "config.json").read_text())
    config["quantization_config"] = SCHEME | {"group_size": asked.group}
    report = Figures()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for dtype in ("auto", "bfloat16"):
            with dummy(folder, max_model_len=4096, dtype=dtype) as llm:
                for count in (1, 32, 128):
                    speed = timed(llm, fixed(count, 256, 128), 0.6, 3)["output_tokens_per_second"]
                    report.setdefault(str(count), {})[llm.loaded.precision] = speed
    for requests, speeds in report.items():
        speeds["ratio"] = speeds["int4"] / speeds["bfloat16"]
        log(f"{requests} requests: {speeds}")
    return report


def leave_out(asked: Namespace) -> Figures:
    bench.on_demand = {"decode"} if asked.tiny else set()
    return {"shape": "tiny" if asked.tiny else asked.shape}


if __name__ == "__main__":
    bench.main(start=leave_out)
