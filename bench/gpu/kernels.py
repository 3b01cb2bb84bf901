"""Time of GPU kernels: those of a decode step, prefill attention, and the gated product of the MLP.

    python -m bench.gpu.kernels                           prints one JSON object
    python -m bench.gpu.kernels --only decode --shape llama-8b --rows 1 64 --context 1200
    python -m bench.gpu.kernels --tiny                    runs in seconds without a GPU, as a test

decode     each kernel of a decode step, compared with the roofline of its work. It is launched once
           per layer, with that layer's weights and keys, in one CUDA graph. The time of a launch is
           that of a replay divided by the number of launches, so each kernel starts when the one
           before ends, as in a step, but after one of its own kind. Lengths are spread from half to
           one and a half times --context, the longest first. Sequences are split, and products use
           our kernels or cuBLAS, as in a step of decodes
attention  causal, over a paged cache in blocks of 16 positions, in random order, head size 128; the
           chosen kernel and plain Triton, and for the rest of a long prompt also the kernel without
           programs that share queries. Operations are those that the mask leaves
gated      silu(gate) * up of the MLP, by rows, inputs and outputs; the chosen kernels, and cuBLAS
           with an activation of its own
Random numbers, bfloat16. The last two: medians of CUDA graphs with a cold L2 cache, by turns in three
rounds; `difference` is the distance of the results of the first and the last over their norm; 0 if
both are the same kernels.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F  # noqa: N812
import triton
from torch import Tensor

from bench.gpu import roofline
from bench.harness import SHAPES, Bench, Figures, log
from headway.executor.gpu.graphs import padded_rows
from headway.model.backends.gpu import prefers_cublas
from headway.model.config import ModelConfig, from_hf, load_hf
from headway.model.kernels.attention import prefill
from headway.model.kernels.attention.decode import HeadTransform, decode_attention
from headway.model.kernels.attention.splits import choose_num_splits
from headway.model.kernels.logit_thresholds import SamplingTensors
from headway.model.kernels.products.gated import gated_product, in_two_kernels
from headway.model.kernels.products.linear import linear, num_squares
from headway.model.kernels.sampling import sample, workspace

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
bench = Bench(__doc__)
bench.option("--shape", default="qwen3-0.6b", help="folder in bench/shapes")
bench.option("--rows", nargs="+", type=int, default=[1, 64, 128, 256])
bench.option("--context", type=int, default=800, help="mean positions per sequence")
bench.option("--tiny", action="store_true", help="use tiny models and prompts, on the CPU")
BLOCK_SIZE, TEMPERATURE, NUM_ROUNDS = 16, 0.6, 3
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


@bench.part
def decode(asked: Namespace) -> Figures:
    config = from_hf(TINY, "tiny") if asked.tiny else load_hf(SHAPES / asked.shape)
    rows, context = ([1, 3], 20) if asked.tiny else (asked.rows, asked.context)
    device = "cpu" if asked.tiny else "cuda"
    if asked.tiny:
        ceilings = roofline.Ceilings(bandwidth=1e10, flops=1e11)
    else:
        ceilings = roofline.measured()
    report: Figures = {
        **asdict(ceilings), "shape": "tiny" if asked.tiny else asked.shape, "context": context,
        "kernels": {},
    }  # fmt: skip
    with torch.inference_mode():
        for count in rows:
            for name, kernel in Step(config, count, context, device).kernels():
                took = seconds(kernel.launches, device)
                floor = max(kernel.num_bytes / ceilings.bandwidth, kernel.flops / ceilings.flops)
                found = {"us": 1e6 * took, "floor_us": 1e6 * floor}
                report["kernels"].setdefault(name, {})[str(count)] = found
                log(f"{name}, {count} rows: {found}")
                del kernel
    return report


# New and earlier tokens of each prompt, query heads, key-value heads
Case = tuple[list[tuple[int, int]], int, int]
CASES: dict[str, Case] = {
    "8192 tokens, 16 heads of 8": ([(8192, 0)], 16, 8),
    "8192 tokens, 32 heads of 8": ([(8192, 0)], 32, 8),
    "8192 tokens, 28 heads of 4": ([(8192, 0)], 28, 4),
    "8 x 2048 tokens, 16 heads of 8": ([(2048, 0)] * 8, 16, 8),
    "16 x 1024 tokens, 16 heads of 8": ([(1024, 0)] * 16, 16, 8),
    "32768 tokens, 16 heads of 8": ([(32768, 0)], 16, 8),
    "64 tokens after 32768, 16 heads of 8": ([(64, 32768)], 16, 8),
    "384 tokens after 32768, 16 heads of 8": ([(384, 32768)], 16, 8),
    "512 tokens after 4096, 16 heads of 8": ([(512, 4096)], 16, 8),
    "512 tokens, 16 heads of 8": ([(512, 0)], 16, 8),
    "64 tokens after 8000, 28 heads of 4": ([(64, 8000)], 28, 4),
    "256 tokens after 8000, 28 heads of 4": ([(256, 8000)], 28, 4),
}
TINY_CASES: dict[str, Case] = {"2 prompts": ([(5, 0), (40, 3)], 4, 2)}
# Inputs and outputs by model, and rows.
GATED = {"0.6B": (1024, 3072), "7B": (3584, 18944), "8B": (4096, 14336)}
GATED_ROWS = (512, 2048, 8192, 16384)


def inputs(case: Case, head_dim: int, device: str) -> Figures:
    """Arguments of prefill_attention."""
    prompts, num_heads, kv_heads = case
    counts_new, lengths = [new for new, _ in prompts], [sum(each) for each in prompts]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    tables = torch.zeros((len(lengths), -(-max(counts) // 16) * 16), dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor([next(order) for _ in range(count)])
    shape = (sum(counts) + 1, 1, 2, kv_heads, BLOCK_SIZE, head_dim)
    q_thd = torch.randn((sum(counts_new), num_heads, head_dim), dtype=dtype, device=device)
    ints: Figures = {"dtype": torch.int32, "device": device}
    return {
        "q_thd": q_thd, "out_thd": torch.empty_like(q_thd), "layer": 0, "longest": max(counts_new),
        "blocks": torch.randn(shape, dtype=dtype, device=device), "tables": tables.to(device),
        "row_ids_s": torch.arange(len(lengths), **ints), "ends_s": torch.tensor(lengths, **ints),
        "starts_s": torch.tensor([sum(counts_new[:s]) for s in range(len(lengths) + 1)], **ints),
        "counters": torch.zeros(2**12, **ints),
    }  # fmt: skip


def cold_seconds(work: Callable[[], object], device: str) -> float:
    work()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()  # a launch takes the host longer than small kernels run
        with torch.cuda.graph(graph):
            work()
        took = triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")
        return float(took) / 1e3
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def compared(works: dict[str, Callable[[], Tensor]], flops: float, device: str) -> Figures:
    """The time of each by turns, and the difference of the first and the last."""
    results = [work().float().clone() for work in works.values()]
    rounds = [[cold_seconds(work, device) for work in works.values()] for _ in range(NUM_ROUNDS)]
    found: Figures = {}
    for name, times in zip(works, zip(*rounds, strict=True), strict=True):
        took = statistics.median(times)
        found[name] = {"us": round(took * 1e6, 1), "tflops": round(flops / took / 1e12, 1)}
    return found | {"difference": float((results[0] - results[-1]).norm() / results[-1].norm())}


def measure(case: Case, head_dim: int, device: str) -> Figures:
    arguments = inputs(case, head_dim, device)
    prompts, num_heads, _ = case
    flops = sum(2 * num_heads * head_dim * new * (2 * old + new) for new, old in prompts)
    chosen = prefill.hopper_kernel

    def attend(kernel: Any, other: Figures) -> Tensor:
        prefill.hopper_kernel = kernel
        prefill.prefill_attention(**arguments | other)
        prefill.hopper_kernel = chosen
        return arguments["out_thd"]  # type: ignore[no-any-return]

    works = {"kernel": partial(attend, chosen, {})}
    if prompts[0][1]:
        works["alone"] = partial(attend, chosen, {"counters": None})
    return compared(works | {"plain": partial(attend, lambda: None, {})}, flops, device)


def measure_gated(num_rows: int, num_inputs: int, num_outputs: int, device: str) -> Figures:
    x_tk = torch.randn((num_rows, num_inputs), device=device).to(torch.bfloat16)
    weight = torch.randn((2 * num_outputs, num_inputs), device=device) * num_inputs**-0.5
    work = partial(gated_product, x_tk, weight.to(torch.bfloat16), None)

    def plain() -> Tensor:
        with in_two_kernels():
            return work()

    flops = 4 * num_rows * num_inputs * num_outputs
    return compared({"kernel": work, "plain": plain}, flops, device)


@bench.part
def attention(asked: Namespace) -> Figures:
    torch.manual_seed(0)
    cases, *rest = (TINY_CASES, 16, "cpu") if asked.tiny else (CASES, 128, "cuda")
    return {name: measure(case, *rest) for name, case in cases.items()}


@bench.part
def gated(asked: Namespace) -> Figures:
    device = "cpu" if asked.tiny else "cuda"
    return {
        f"{name}, {num_rows} rows": measure_gated(num_rows, *shape, device)
        for name, shape in ({"tiny": (32, 16)} if asked.tiny else GATED).items()
        for num_rows in ((5,) if asked.tiny else GATED_ROWS)
    }


if __name__ == "__main__":
    bench.main()
