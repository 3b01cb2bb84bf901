"""fp8 weights on a GPU: accuracy, speed of the products, and speed of a 7B shape.

    python bench/gpu_fp8.py --out F                 all parts, about two minutes on an H200
    python bench/gpu_fp8.py --only products         one part
    python bench/gpu_fp8.py --only quality --model FILE.gguf
    python bench/gpu_fp8.py --tiny                  runs in seconds without a GPU, as a test

quality   perplexity of bench/gpu_quality.py's text in bfloat16 and in fp8; the goal is within 1
          percent; also by the number of layers that stay bfloat16
products  us per product of the 7B shape, and its relative error against float32, by rows: cuBLAS in
          bfloat16 (`bfloat16`), torch._scaled_mm (`scaled_mm`), our kernel with rows in bfloat16
          (`float_rows`) and in fp8 (`fp8_rows`), each with the chosen tile first, then others;
          `quantize` is the time to quantize the rows
7b        one request of 16 tokens in and 256 out, and 128 requests of 256 to 1,024 in and 128 to
          512 out, random weights, median of --repeat runs after one warm-up; builds after the start
7b_kv     the same with an fp8 KV cache
Prints one JSON object, progress to stderr. A part that fails reports the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gpu
import torch
import torch.nn.functional as F  # noqa: N812
from gpu_kernels import seconds
from torch import Tensor

from headway import LLM
from headway.model.backends.fp8 import Fp8Backend
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.model.kernels.fp8 import quantize_rows, scaled_linear
from headway.model.kernels.launch import compile_all
from headway.model.kernels.linear import linear
from headway.model.kernels.tiles import Tile, tile_for
from headway.model.weights.checkpoint import open_checkpoint
from headway.model.weights.fp8 import FP8, quantize

Figures = dict[str, Any]
SHAPE = "qwen2.5-7b"
PRODUCTS = {  # (outputs, inputs)
    "qkv": (4608, 3584), "output": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944),
}  # fmt: skip
ROWS = (1, 2, 8, 16, 32, 64, 96, 128, 192, 256)
ROTATED_BYTES = 400 * 2**20  # of matrices in turn, so that none stays in the L2 cache
VECTOR_TILES = [
    Tile(1, 4, 2048, 1, 4, 1), Tile(1, 8, 2048, 1, 4, 1), Tile(1, 4, 4096, 1, 8, 1),
    Tile(1, 8, 1024, 1, 2, 1), Tile(1, 4, 1024, 1, 2, 1), Tile(1, 8, 4096, 1, 8, 1),
]  # fmt: skip
# Tried for rows up to the first number of the tile, or for any rows by tiles of the largest.
FLOAT_TILES = [
    Tile(16, 32, 256, 1, 4, 5), Tile(16, 64, 128, 1, 4, 6), Tile(16, 64, 256, 1, 4, 4),
    Tile(32, 32, 256, 1, 4, 4), Tile(32, 64, 128, 1, 4, 6), Tile(32, 128, 128, 1, 4, 5),
    Tile(64, 32, 128, 1, 4, 6), Tile(64, 64, 128, 1, 4, 6), Tile(64, 128, 128, 1, 4, 5),
    Tile(64, 128, 128, 1, 8, 5), Tile(64, 64, 128, 1, 4, 4),
]  # fmt: skip
FP8_TILES = [
    Tile(64, 32, 256, 1, 4, 5), Tile(64, 64, 128, 1, 4, 6), Tile(64, 64, 256, 1, 4, 5),
    Tile(64, 128, 128, 1, 4, 4), Tile(128, 32, 128, 1, 4, 5), Tile(128, 64, 128, 1, 4, 4),
    Tile(128, 64, 128, 1, 8, 4), Tile(128, 128, 128, 1, 8, 3), Tile(128, 128, 128, 1, 8, 6),
    Tile(256, 64, 128, 1, 8, 4), Tile(256, 128, 128, 1, 8, 4),
]  # fmt: skip


class Way(NamedTuple):
    """One way to compute a product: launches in turn, with different matrices."""

    name: str
    tile: Tile | None
    launches: list[Callable[[], Tensor]]


# Products.


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
        for tile in self._tiles(num_rows, self.dtype):
            options = {"x_mk": x, "tile": tile}
            yield self._ours("float_rows", options)
        if num_rows > 1:
            for tile in self._tiles(num_rows, FP8):
                out = torch.empty((num_rows, self.outputs), dtype=self.dtype, device=self.device)
                options = {"x_mk": rounded.values_tk, "x_scale_m": rounded.scale_t, "tile": tile}
                yield self._ours("fp8_rows", options | {"out_mn": out})

    def _ours(self, name: str, options: Figures) -> Way:
        launches = [
            partial(linear, weight_nk=each.q, scale_n=each.scale, **options)
            for each in self.matrices
        ]
        return Way(name, options["tile"], launches)

    def _tiles(self, num_rows: int, x_dtype: torch.dtype) -> list[Tile]:
        """The chosen tile first, then others for this number of rows."""
        chosen = tile_for(num_rows, self.outputs, self.inputs, FP8, x_dtype)
        if num_rows == 1:
            return [chosen, *(tile for tile in VECTOR_TILES if tile != chosen)]
        if x_dtype != FP8 and num_rows > 64:
            return []
        every = FP8_TILES if x_dtype == FP8 else FLOAT_TILES
        sizes = {tile.rows for tile in every}
        best = min((size for size in sizes if size >= num_rows), default=max(sizes))
        # Also tiles of half the rows, which read the matrix twice.
        return [chosen, *(t for t in every if t.rows in (best, best // 2) and t != chosen)]


def measure_products(asked: argparse.Namespace) -> Figures:
    shapes, rows, device = PRODUCTS, ROWS, "cuda"
    if asked.tiny:
        shapes, rows, device = {"tiny": (48, 64)}, (1, 3), "cpu"
    report: Figures = {}
    with torch.inference_mode():
        for name, (outputs, inputs) in shapes.items():
            product = Product(outputs, inputs, device)
            if device != "cpu":
                compile_all(partial(launch_all, product, rows), lambda *_: None)
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
    given = {}
    if num_rows <= 64:
        given["float_rows"] = linear(x, weight, scale_n=scale), x.float()
    if num_rows > 1:
        given["scaled_mm"] = scaled_linear(rounded, weight, scale), values
        out = torch.empty((num_rows, product.outputs), dtype=product.dtype, device=x.device)
        options = {"x_scale_m": rounded.scale_t, "scale_n": scale, "out_mn": out}
        given["fp8_rows"] = linear(rounded.values_tk, weight, **options), values
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


# The model.


def measure_model(asked: argparse.Namespace, kv_cache_dtype: str) -> Figures:
    begun = time.perf_counter()
    with LLM(
        str(HERE / "shapes" / SHAPE), load_format="dummy", device="cuda", quantization="fp8",
        kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=16384, max_model_len=4096,
    ) as llm:  # fmt: skip
        found: Figures = {"start_seconds": time.perf_counter() - begun}
        builds: list[int] = []
        llm.engine.observers.append(lambda report: builds.append(report.result.num_builds))
        for name, work in (("batch_1", gpu.fixed(1, 16, 256)), ("128", mixed_lengths(128))):
            first = gpu.run(llm, work, 0.6)
            took = statistics.median(gpu.run(llm, work, 0.6) for _ in range(asked.repeat))
            num_output = sum(work[1])
            found[name] = {
                "first_seconds": first, "seconds": took, "ms_per_token": 1e3 * took / num_output,
                "output_tokens_per_second": num_output / took,
            }  # fmt: skip
            log(f"{name}: {found[name]}")
        found["builds_after_start"] = sum(builds)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def mixed_lengths(count: int) -> gpu.Work:
    """Prompts of 256 to 1,024 tokens and outputs of 128 to 512, with seed 0."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(256, 1024))] for _ in range(count)
    ]
    return prompts, [source.randint(128, 512) for _ in range(count)]


def measure_quality(asked: argparse.Namespace) -> Figures:
    import gpu_quality

    model = gpu_quality.resolve(asked.model)
    _, text = gpu_quality.prompts_and_text(model, gpu_quality.NUM_SCORED)
    found: Figures = {}
    for part in ("bfloat16", "fp8_weights", "fp8_both"):
        with gpu_quality.load_ours(part, str(model), "cuda") as llm:
            found[part] = gpu_quality.read(llm, text)[0]
        log(f"perplexity, {part}: {found[part]:.4f}")
        gc.collect()
    cost = 100 * (found["fp8_weights"] / found["bfloat16"] - 1)
    return {
        "perplexity": found, "cost_percent": cost, "reached": abs(cost) <= 1,
        "by_float_layers": measure_float_layers(model, text),
    }  # fmt: skip


@torch.inference_mode()
def measure_float_layers(model: Path, text: list[int]) -> Figures:
    """Percent of perplexity that fp8 costs, by the first and last layers that stay bfloat16."""
    checkpoint = open_checkpoint(model)
    batch = prompt_batch(text)
    count = checkpoint.config.num_layers
    found: Figures = {}
    for first, last in ((count, 0), (0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (2, 2), (3, 3)):
        kept = frozenset(n for n in range(count) if n < first or n >= count - last)
        decoder = Decoder(checkpoint, Fp8Backend(torch.bfloat16, float_layers=kept))
        blocks = decoder.backend.kv_blocks(decoder.config, -(-len(text) // 16), 16)
        logprobs = decoder.logits(decoder.forward(batch, blocks)).float().log_softmax(-1)
        targets = torch.tensor(text[1:], device="cuda")[:, None]
        perplexity = math.exp(-float(logprobs[:-1].gather(1, targets).double().mean()))
        base = found.setdefault("bfloat16", perplexity)  # the first keeps all layers
        found[f"first {first}, last {last}"] = 100 * (perplexity / base - 1)
    log(f"cost in percent by float layers: {found}")
    return found


def prompt_batch(text: list[int]) -> ForwardBatch:
    """A prefill of one prompt in blocks of 16 tokens, in order."""
    places, count = torch.arange(len(text), device="cuda"), len(text)
    ends = torch.tensor([0, count], dtype=torch.int32, device="cuda")
    return ForwardBatch(
        tokens_t=torch.tensor(text, device="cuda"), positions_t=places, slots_t=places,
        tables_sw=torch.arange(-(-count // 16), dtype=torch.int32, device="cuda")[None],
        starts_s=ends, ends_s=ends[1:], sampled_n=places, longest=count,
        row_ids_s=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "quality": measure_quality,
    "products": measure_products,
    "7b": partial(measure_model, kv_cache_dtype="auto"),
    "7b_kv": partial(measure_model, kv_cache_dtype="fp8"),
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS)[:3])
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or GGUF file")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny products, on the CPU")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: Figures = {
        "gpu": "none" if asked.tiny else torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit.stdout.strip(), "shape": SHAPE,
    }  # fmt: skip
    for name in ["products"] if asked.tiny else asked.only:
        begun = time.perf_counter()
        try:
            report[name] = PARTS[name](asked)
        except Exception as error:  # the other parts still run
            if asked.tiny:
                raise
            report[name] = {"skipped": f"{type(error).__name__}: {error}"}
            log(f"{name}: {report[name]['skipped']}")
        report[f"{name}_took_seconds"] = time.perf_counter() - begun
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
