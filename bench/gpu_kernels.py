"""Time of each kernel of a decode step on a GPU, compared with the roofline of its work.

    python bench/gpu_kernels.py                           prints one JSON object
    python bench/gpu_kernels.py --shape llama-8b --rows 1 64 --context 1200
    python bench/gpu_kernels.py --tiny                    runs in seconds without a GPU, as a test

Every kernel is launched once per layer, with that layer's weights and keys, in one CUDA graph. The
time of a launch is that of a replay divided by the number of launches, so each kernel starts when
the one before ends, as in a step, but after one of its own kind. Lengths are spread from half to
one and a half times --context, the longest first. Sequences are split, and products use our kernels
or cuBLAS, as in a step of decodes. bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import roofline
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.executor.gpu.graphs import padded_rows
from headway.model.backends.gpu import prefers_cublas
from headway.model.config import ModelConfig, from_hf, load_hf
from headway.model.kernels.attention.decode import HeadTransform, decode_attention
from headway.model.kernels.attention.splits import choose_num_splits
from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.model.kernels.products.gated import gated_product
from headway.model.kernels.products.linear import linear, num_squares
from headway.model.kernels.sampling import sample, workspace

SHAPES = Path(__file__).parent / "shapes"
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK_SIZE, TEMPERATURE = 16, 0.6
TYPE = torch.bfloat16


class Kernel(NamedTuple):
    """Launches of a kernel, and the bytes and operations of one launch."""

    launches: list[Callable[[], object]]
    num_bytes: float
    flops: float


class Step:
    """The kernels of a decode step with `num_rows` rows."""

    def __init__(self, config: ModelConfig, num_rows: int, context: int, device: str) -> None:
        self._config, self._rows, self._context, self._device = config, num_rows, context, device
        self._x = self._random(num_rows, config.hidden_size)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = self._random(num_rows, heads * config.head_dim)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """One kernel at a time, so that the memory of one is free for the next."""
        config = self._config
        wide = config.num_heads * config.head_dim
        inner = config.intermediate_size
        yield "qkv", self._product(self._qkv.shape[1], config.hidden_size)
        yield "attention", self._attention()
        yield "output", self._product(config.hidden_size, wide, adds=True)
        yield "gate and up", self._product(2 * inner, config.hidden_size, is_gated=True)
        yield "down", self._product(config.hidden_size, inner, adds=True)
        yield "head", self._head()
        yield "draw", self._draw()

    def _random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=TYPE, device=self._device).normal_(0.0, 0.02)

    def _product(
        self, num_outputs: int, num_inputs: int, *, is_gated: bool = False, adds: bool = False
    ) -> Kernel:
        config, rows = self._config, self._rows
        options: dict[str, Any] = {"is_gated": is_gated}
        if adds:
            options |= {"residual_mn": self._x, "out_mn": self._x}
            parts = num_squares(rows, num_outputs, num_inputs, TYPE)
            if rows > 1:
                options["squares_out_mj"] = torch.empty((rows, parts), device=self._device)
        else:
            parts = num_squares(rows, config.hidden_size, config.intermediate_size, TYPE)
            options["epsilon"] = config.norm_eps
            if rows > 1:
                options["squares_mj"] = torch.ones((rows, parts), device=self._device)
        x = self._random(rows, num_inputs)
        matrices = [self._random(num_outputs, num_inputs) for _ in range(config.num_layers)]

        def multiply(matrix: Tensor) -> object:
            if not prefers_cublas(rows, config):
                return linear(x, matrix, **options)
            if adds:
                return self._x.addmm_(x, matrix.t())
            return gated_product(x, matrix, None) if is_gated else F.linear(x, matrix)

        return Kernel(
            [partial(multiply, matrix) for matrix in matrices],
            TYPE.itemsize * (num_outputs * num_inputs + rows * (num_outputs + num_inputs)),
            2 * rows * num_outputs * num_inputs,
        )

    def _attention(self) -> Kernel:
        config, rows, device = self._config, self._rows, self._device
        lengths = torch.linspace(1.5 * self._context, 0.5 * self._context, rows).int()
        if rows == 1:
            lengths.fill_(self._context)
        width = int(lengths.max()) // BLOCK_SIZE + 1
        shape = (rows * width, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE)
        blocks = self._random(*shape, config.head_dim)
        tables = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
        row_ids = torch.arange(rows, dtype=torch.int32, device=device)
        positions = lengths.to(device).long()
        last = tables[row_ids.long(), positions // BLOCK_SIZE].long()
        half = (width * BLOCK_SIZE, config.head_dim // 2)
        norms = [torch.ones(config.head_dim, dtype=TYPE, device=device) for _ in "qk"]
        transform = HeadTransform(
            *(norms if config.qk_norm else (None, None)), config.norm_eps,
            *(torch.ones(half, device=device) for _ in "cs"),
        )  # fmt: skip
        out = torch.empty((rows, config.num_heads * config.head_dim), dtype=TYPE, device=device)
        options: dict[str, Any] = {
            "num_heads": config.num_heads, "blocks": blocks, "tables": tables, "row_ids_s": row_ids,
            "positions_s": positions, "slots_s": last * BLOCK_SIZE + positions % BLOCK_SIZE,
            "transform": transform,
            "num_splits": choose_num_splits(
                padded_rows(rows) * config.num_kv_heads, lengths.long().numpy(), config.num_kv_heads
            ),
        }  # fmt: skip
        read = int(lengths.sum()) * config.kv_bytes(TYPE.itemsize) / config.num_layers
        flops = 4 * int(lengths.sum()) * config.num_heads * config.head_dim
        return Kernel(
            [
                lambda layer=layer: decode_attention(self._qkv, out, layer=layer, **options)
                for layer in range(config.num_layers)
            ],
            read + TYPE.itemsize * (self._qkv.numel() + out.numel()),
            flops,
        )

    def _head(self) -> Kernel:
        size = (self._config.vocab_size, self._config.hidden_size)
        matrix, rows = self._random(*size), self._rows
        return Kernel(
            [lambda: F.linear(self._x, matrix)] * 4,
            TYPE.itemsize * (matrix.numel() + self._x.numel() + rows * size[0]),
            2 * rows * matrix.numel(),
        )

    def _draw(self) -> Kernel:
        rows, device = self._rows, self._device
        logits = self._random(rows, self._config.vocab_size)
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        settings = SamplingTensors(
            temperature=torch.full((rows,), TEMPERATURE, device=device), top_k=zeros,
            top_p=torch.ones(rows, device=device), min_p=torch.zeros(rows, device=device),
            seed=zeros.long(), num_generated=zeros,
        )  # fmt: skip
        row_ids, out = torch.arange(rows, dtype=torch.int32, device=device), zeros.clone()
        space = workspace(rows, self._config.vocab_size, device)
        launch = partial(sample, logits, row_ids, settings, out, space)
        return Kernel([launch] * 4, logits.nbytes, 0.0)


def seconds(launches: list[Callable[[], object]], device: str) -> float:
    """Seconds of one launch: the median of several measurements."""

    def run() -> None:
        for launch in launches:
            launch()

    run()  # compiles the kernels
    if device == "cpu":
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) / len(launches)
    graph, times = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / 5 / len(launches))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b", help="folder in bench/shapes")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 128, 256])
    parser.add_argument("--context", type=int, default=800, help="mean positions per sequence")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, on the CPU")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    config = from_hf(TINY, "tiny") if asked.tiny else load_hf(SHAPES / asked.shape)
    rows, context = ([1, 3], 20) if asked.tiny else (asked.rows, asked.context)
    device = "cpu" if asked.tiny else "cuda"
    if asked.tiny:
        ceilings = roofline.Ceilings(bandwidth=1e10, flops=1e11)
    else:
        ceilings = roofline.measured()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {
        "gpu": "none" if asked.tiny else torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit.stdout.strip(), "bandwidth": ceilings.bandwidth, "flops": ceilings.flops,
        "shape": "tiny" if asked.tiny else asked.shape, "context": context, "kernels": {},
    }  # fmt: skip
    with torch.inference_mode():
        for count in rows:
            for name, kernel in Step(config, count, context, device).kernels():
                took = seconds(kernel.launches, device)
                floor = max(kernel.num_bytes / ceilings.bandwidth, kernel.flops / ceilings.flops)
                found = {"us": 1e6 * took, "floor_us": 1e6 * floor}
                report["kernels"].setdefault(name, {})[str(count)] = found
                print(f"{name}, {count} rows: {found}", file=sys.stderr, flush=True)
                del kernel
    text = json.dumps(report, indent=2) + "\n"
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
