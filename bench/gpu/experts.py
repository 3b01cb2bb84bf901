"""A mixture of experts on a GPU: its kernels, candidates for their tiles, and the speed of decoding.

    python -m bench.gpu.experts                     prints one JSON object; takes a few minutes
    python -m bench.gpu.experts --only tiles --rows 1 32
    python -m bench.gpu.experts --tiny              runs in seconds without a GPU, as a test

kernels  microseconds of each kernel of a layer's experts by rows, in a CUDA graph with one launch for
         each of --layers layers, whose weights and choices differ; `floor` is the time of the bytes
         of the chosen experts and of the router, or of the operations. `sum` is the time of the last
         product with the sum less that without it. `chain` is the time of a layer in a graph of all
         kernels of one layer after those of another, as a model without attention runs them: it
         counts the waiting of kernels for each other. `error` is the distance of a layer's output
         from float32 over its norm; the report is not ok above 0.01. Up to 8 rows are measured both
         listed by expert and not (`few`; see max_few in products/experts.py)
tiles    the same for the two products with each candidate, the fastest first; `chosen` is the tile of
         the package (products/grouped.py, products/experts.py)
decode   output tokens per second of 1 to 256 requests of 256 prompt and 128 output tokens, prompts
         included, with random weights: the median of three runs after a first, and the share of the
         floor of bench.gpu.roofline; `vllm` is what vLLM 0.24 reached in these cases on an H200
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.gpu import roofline
from bench.gpu.kernels import TINY, seconds
from bench.harness import SHAPES, Bench, Figures, log
from headway.model.config import ModelConfig, from_hf, load_hf
from headway.model.kernels.activation import GATES
from headway.model.kernels.launch import compile_all
from headway.model.kernels.products import experts, grouped
from headway.model.kernels.products.experts import ExpertRows, VectorTile
from headway.model.kernels.products.grouped import Stack
from headway.model.kernels.products.linear import linear, row_squares
from headway.model.kernels.products.tiles import Tile, device_limits
from headway.model.kernels.routing import list_pairs

Launches = list[Callable[[], object]]
bench = Bench(__doc__)
bench.option("--shape", default="qwen3-30b-a3b", help="folder in bench/shapes")
bench.option(
    "--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 128, 256, 512, 1024, 2048, 8192]
)
bench.option("--layers", type=int, default=8)
bench.option("--tiny", action="store_true", help="use a tiny model, on the CPU")
VLLM = {1: 224, 8: 824, 32: 1904, 128: 5533, 256: 8565}
MAX_TRIED = 8  # rows that are also measured without lists
FEW_TILES = [  # of rows that are not listed
    VectorTile(16, 1024, 8), VectorTile(8, 1024, 8), VectorTile(8, 1024, 4), VectorTile(4, 1024, 4),
    VectorTile(16, 512, 4), VectorTile(32, 512, 8), VectorTile(32, 1024, 16), VectorTile(8, 2048, 8),
]  # fmt: skip
STAGES = {  # by rows, outputs and inputs of a tile: those that were among the fastest of some case
    (16, 32, 128): (4, 6), (16, 32, 256): (3, 4), (16, 64, 128): (3, 4, 6), (16, 64, 256): (3,),
    (16, 128, 128): (3, 4), (16, 256, 128): (3,), (32, 32, 256): (3,), (32, 64, 128): (3, 4),
    (32, 128, 64): (3, 4, 6), (32, 128, 128): (3, 4), (64, 128, 64): (3, 4),
    (64, 128, 128): (3, 4), (64, 256, 64): (3, 4), (128, 128, 64): (3, 4), (128, 256, 64): (3, 4),
}  # fmt: skip


def candidates(rows: float, num_inputs: int) -> list[Tile]:
    """Tiles for this mean number of rows of an expert, which fit into the memory of the device."""
    memory = device_limits()[1]
    return [
        Tile(height, outputs, inputs, 1, 8 if height * outputs >= 128 * 128 else 4, stages)
        for (height, outputs, inputs), each in STAGES.items() for stages in each
        if height >= min(rows / 4, 128) and height <= max(4 * rows, 32)
        and num_inputs % inputs == 0 and (height + outputs) * inputs * 2 * stages <= memory
    ]  # fmt: skip


class Layers:
    """The experts of some layers, and rows that go through them."""

    def __init__(self, config: ModelConfig, num_layers: int, device: str) -> None:
        about = config.experts
        assert about is not None, "the shape has no experts"
        self.about, self.hidden, self.epsilon = about, config.hidden_size, config.norm_eps
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.device, self.num_layers = device, num_layers
        size = (about.num_experts, 2 * about.width, self.hidden)
        self.gate_up = [self.random(*size) for _ in range(num_layers)]
        self.down = [self.random(size[0], self.hidden, about.width) for _ in range(num_layers)]
        self.router = [self.random(size[0], self.hidden) for _ in range(num_layers)]

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, 0.02)

    def run(self, rows: int, max_few: int) -> tuple[dict[str, Launches], list[Tensor]]:
        """The launches of each kernel, for all layers, and the router's outputs."""
        about, x = self.about, self.random(rows, self.hidden)
        logits = [
            torch.randn((rows, about.num_experts), device=self.device)
            for _ in range(self.num_layers)
        ]
        inner, out = self.random(rows * about.num_chosen, about.width), torch.empty_like(x)
        norm = self.norm_of(x)
        made: dict[str, Launches] = {
            name: [] for name in ("router", "list", "gate_up", "down", "all", "chain")
        }
        for number, own in enumerate(logits):
            gate_up, down = Stack(self.gate_up[number]), Stack(self.down[number])
            routing = partial(linear, x, self.router[number], out_mn=torch.empty_like(own), **norm)
            route = partial(self.routed, x, number=number, max_few=max_few, **norm)
            made["router"].append(routing)
            made["chain"].append(partial(self.layer, routing, route, x, out))
            made["all"].append(partial(self.summed, route(own), inner, out))
            if rows <= max_few:
                made["gate_up"].append(partial(route, own))
                continue
            listing = partial(list_pairs, own, about.num_experts, about.num_chosen)
            given = (listing()[1], about.num_chosen)
            gated = partial(grouped.grouped, x, gate_up, *given, gate=GATES["silu"], **norm)
            made["list"].append(listing)
            made["gate_up"].append(gated)
            made["down"].append(partial(grouped.grouped, inner, down, *given))
        return {name: each for name, each in made.items() if each}, logits

    def norm_of(self, x: Tensor) -> dict[str, Any]:
        """The options of a product with a norm, as in a pass over a few rows."""
        return {"epsilon": self.epsilon, "squares_mj": row_squares(x)}

    def routed(self, x: Tensor, logits: Tensor, *, number: int, **options: Any) -> ExpertRows:
        return ExpertRows(
            x, logits, Stack(self.gate_up[number]), Stack(self.down[number]),
            num_chosen=self.about.num_chosen, normalizes=self.about.normalizes, **options,
        )  # fmt: skip

    def summed(
        self, routed: ExpertRows, inner: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Add up, and compute the squares for the next norm; a row that is not listed needs none."""
        squares = None
        if routed.num_parts:
            squares = torch.empty((len(out), routed.num_parts), device=self.device)
        routed.summed(inner, residual_mn=residual, out_mn=out, squares_out_mj=squares)
        if squares is None and len(out) > 1:
            row_squares(out)

    def layer(
        self, routing: Callable[[], Tensor], route: Callable[[Tensor], ExpertRows], x: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """All kernels of a layer; x stays, because its rows would become alike after many runs."""
        routed = route(routing())
        self.summed(routed, routed.inner_pn, out, x)

    def floors(self, logits: list[Tensor], ceilings: roofline.Ceilings) -> dict[str, float]:
        """Seconds of the bytes of what is read, or of the operations, in one layer."""
        about, pairs = self.about, len(logits[0]) * self.about.num_chosen
        used = [len(each.topk(about.num_chosen)[1].unique()) for each in logits]
        matrix = about.width * self.hidden
        mean = sum(used) / len(used)
        sizes = {"router": (about.num_experts * self.hidden, len(logits[0])),
                 "gate_up": (2 * matrix * mean, 2 * matrix * pairs / (2 * matrix * mean)),
                 "all": (matrix * mean, pairs / mean)}  # fmt: skip
        return {
            name: max(2 * numbers / ceilings.bandwidth, 2 * numbers * rows / ceilings.flops)
            for name, (numbers, rows) in sizes.items()
        }

    def error(self, rows: int, max_few: int) -> float:
        """The distance of a layer's output from float32, over its norm."""
        about, x = self.about, self.random(rows, self.hidden)
        logits = torch.randn((rows, about.num_experts), device=self.device)
        routed = self.routed(x, logits, number=0, max_few=max_few, **self.norm_of(x))
        found = routed.summed(routed.inner_pn).float()
        shares, chosen = logits.softmax(-1).topk(about.num_chosen)
        if about.normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        wide = F.rms_norm(x.float(), (self.hidden,), eps=self.epsilon)
        expected = torch.zeros_like(wide)
        for expert in range(about.num_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (
                (wide[row] @ self.gate_up[0][expert].float().T).unflatten(-1, (-1, 2)).unbind(-1)
            )
            out = (F.silu(gate) * up) @ self.down[0][expert].float().T
            expected.index_add_(0, row, out * shares[row, place, None])
        return float((found - expected).norm() / expected.norm())


class Chosen:
    """What the parts share."""

    def __init__(self, asked: Namespace) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if asked.tiny else "cuda"
        self.rows, self.config = asked.rows, load_hf(SHAPES / asked.shape)
        self.ceilings = roofline.Ceilings(bandwidth=1e10, flops=1e11)
        if asked.tiny:
            sparse = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
            self.rows, self.config = [1, 9], from_hf(TINY | sparse, "tiny")
        else:
            self.ceilings = roofline.measured()
        self.layers = Layers(self.config, 2 if asked.tiny else asked.layers, self.device)


def microseconds(launches: Launches, device: str) -> float:
    return round(1e6 * seconds(launches, device), 2)


@bench.part
def kernels(asked: Namespace) -> Figures:
    given = Chosen(asked)
    report: Figures = {**asdict(given.ceilings), "ok": True}
    with torch.inference_mode():
        for name, rows, max_few in ways(given.rows):
            launches, logits = given.layers.run(rows, max_few)
            took = {kernel: microseconds(each, given.device) for kernel, each in launches.items()}
            floors = given.layers.floors(logits, given.ceilings)
            error = given.layers.error(rows, max_few)
            found: Figures = {
                "us": took, "floor_us": {n: round(1e6 * s, 2) for n, s in floors.items()},
                "whole_us": round(sum(took[n] for n in took if n not in ("down", "chain")), 2),
                "sum_us": round(took["all"] - took["down"], 2) if "down" in took else None,
                "error": error,
            }  # fmt: skip
            report[name] = found
            report["ok"] = report["ok"] and error < 0.01
            log(f"{name}: {found}")
    return report


def ways(rows: list[int]) -> Iterator[tuple[str, int, int]]:
    """Names, numbers of rows, and the most rows that are not listed."""
    for count in rows:
        if count <= MAX_TRIED:
            yield f"{count} rows, few", count, MAX_TRIED
        yield f"{count} rows", count, 0


@contextmanager
def using(tile: Tile | VectorTile) -> Iterator[None]:
    """Use this tile for any number of rows."""
    kept = dict(grouped.TILES), experts.GATED_TILE, experts.DOWN_TILE
    if isinstance(tile, VectorTile):
        experts.GATED_TILE = experts.DOWN_TILE = tile
    else:
        grouped.TILES.clear()
        grouped.TILES[float("inf")] = tile
    try:
        yield
    finally:
        grouped.TILES.clear()
        grouped.TILES.update(kept[0])
        experts.GATED_TILE, experts.DOWN_TILE = kept[1:]


def tried(
    layers: Layers, rows: int, max_few: int, *, tiny: bool
) -> dict[str, list[Tile | VectorTile]]:
    """Tiles by kernel; the first is that of the package."""
    about, most = layers.about, 1 if tiny else None
    if rows <= max_few:
        chosen = {"gate_up": experts.GATED_TILE, "all": experts.DOWN_TILE}
        return {name: list(dict.fromkeys([own, *FEW_TILES[:most]])) for name, own in chosen.items()}
    mean = rows * about.num_chosen / about.num_experts
    own = next(tile for limit, tile in grouped.TILES.items() if mean <= limit)
    return {
        name: list(dict.fromkeys([own, *candidates(mean, width)[:most]]))
        for name, width in (("gate_up", layers.hidden), ("down", about.width))
    }


@bench.part
def tiles(asked: Namespace) -> Figures:
    given = Chosen(asked)
    layers, report = given.layers, Figures()
    with torch.inference_mode():
        for name, rows, max_few in ways(given.rows):
            launches, _ = layers.run(rows, max_few)
            plan = tried(layers, rows, max_few, tiny=asked.tiny)

            def build(plan: Any = plan, launches: Any = launches) -> None:
                for kernel, each in plan.items():
                    for tile in each:
                        with using(tile):
                            launches[kernel][0]()

            compile_all(build)
            for kernel, each in plan.items():
                found: dict[str, float] = {}
                for tile in each:
                    try:
                        with using(tile):
                            took = microseconds(launches[kernel], given.device)
                            found[str(tuple(tile)[:6])] = took
                    except Exception as error:  # too large for the device
                        log(f"{kernel}, {name}, {tile}: {error}")
                report.setdefault(name, {})[kernel] = {
                    "chosen": str(tuple(each[0])[:6]),
                    "us": dict(sorted(found.items(), key=lambda of: of[1])),
                }
                log(f"{kernel}, {name}: {report[name][kernel]}")
    return report


@bench.part
def decode(asked: Namespace) -> Figures:
    from bench.gpu.speed import dummy, fixed, timed

    config = load_hf(SHAPES / asked.shape)
    ceilings, report = roofline.measured(), Figures()
    with dummy(asked.shape, max_model_len=4096) as llm:
        for count, theirs in VLLM.items():
            work = fixed(count, 256, 128)
            found = timed(llm, work, 0.6, 3)
            floor = roofline.floor(config, [(256, 128)] * count, ceilings).seconds
            found |= {"floor_seconds": floor, "percent_of_floor": 100 * floor / found["seconds"]}
            if asked.shape == "qwen3-30b-a3b":
                found |= {"vllm": theirs, "times_vllm": found["output_tokens_per_second"] / theirs}
            report[str(count)] = found
            log(f"{count} requests: {found}")
    return report


def leave_out(asked: Namespace) -> Figures:
    bench.on_demand = {"decode"} if asked.tiny else set()
    return {"shape": "tiny" if asked.tiny else asked.shape}


if __name__ == "__main__":
    bench.main(start=leave_out)
