"""Speed of prefill attention and of the gated product of the MLP: the chosen kernels and plain ones.

    python bench/gpu_prefill.py                          prints one JSON object
    python bench/gpu_prefill.py --out bench/results/gpu_prefill.json
    python bench/gpu_prefill.py --tiny                   runs in seconds without a GPU, as a test

attention  causal, over a paged cache in blocks of 16 positions, in random order, head size 128; the
           chosen kernel and plain Triton, and for the rest of a long prompt also the kernel without
           programs that share queries. Operations are those that the mask leaves
gated      silu(gate) * up of the MLP, by rows, inputs and outputs; the chosen kernels, and cuBLAS
           with an activation of its own
Random numbers, bfloat16. Medians of CUDA graphs with a cold L2 cache, by turns in three rounds.
`difference` is the distance of the results of the first and the last over their norm; 0 if both are
the same kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton
from torch import Tensor

from headway.model.kernels.attention import prefill
from headway.model.kernels.products import gated

BLOCK_SIZE, NUM_ROUNDS = 16, 3
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
TINY: dict[str, Case] = {"2 prompts": ([(5, 0), (40, 3)], 4, 2)}
# Inputs and outputs by model, and rows.
GATED = {"0.6B": (1024, 3072), "7B": (3584, 18944), "8B": (4096, 14336)}
ROWS = (512, 2048, 8192, 16384)


def inputs(case: Case, head_dim: int, device: str) -> dict[str, Any]:
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
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return {
        "q_thd": q_thd, "out_thd": torch.empty_like(q_thd), "layer": 0, "longest": max(counts_new),
        "blocks": torch.randn(shape, dtype=dtype, device=device), "tables": tables.to(device),
        "row_ids_s": torch.arange(len(lengths), **ints), "ends_s": torch.tensor(lengths, **ints),
        "starts_s": torch.tensor([sum(counts_new[:s]) for s in range(len(lengths) + 1)], **ints),
        "counters": torch.zeros(2**12, **ints),
    }  # fmt: skip


def seconds(work: Callable[[], object], device: str) -> float:
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


def compared(works: dict[str, Callable[[], Tensor]], flops: float, device: str) -> dict[str, Any]:
    """The time of each by turns, and the difference of the first and the last."""
    results = [work().float().clone() for work in works.values()]
    rounds = [[seconds(work, device) for work in works.values()] for _ in range(NUM_ROUNDS)]
    found: dict[str, Any] = {}
    for name, times in zip(works, zip(*rounds, strict=True), strict=True):
        took = statistics.median(times)
        found[name] = {"us": round(took * 1e6, 1), "tflops": round(flops / took / 1e12, 1)}
    return found | {"difference": float((results[0] - results[-1]).norm() / results[-1].norm())}


def measure(case: Case, head_dim: int, device: str) -> dict[str, Any]:
    arguments = inputs(case, head_dim, device)
    prompts, num_heads, _ = case
    flops = sum(2 * num_heads * head_dim * new * (2 * old + new) for new, old in prompts)
    chosen = prefill.hopper_kernel

    def attend(kernel: Any, other: dict[str, Any]) -> Tensor:
        prefill.hopper_kernel = kernel
        prefill.prefill_attention(**arguments | other)
        prefill.hopper_kernel = chosen
        return arguments["out_thd"]  # type: ignore[no-any-return]

    works = {"kernel": partial(attend, chosen, {})}
    if prompts[0][1]:
        works["alone"] = partial(attend, chosen, {"counters": None})
    return compared(works | {"plain": partial(attend, lambda: None, {})}, flops, device)


def measure_gated(num_rows: int, num_inputs: int, num_outputs: int, device: str) -> dict[str, Any]:
    x_tk = torch.randn((num_rows, num_inputs), device=device).to(torch.bfloat16)
    weight = torch.randn((2 * num_outputs, num_inputs), device=device) * num_inputs**-0.5
    work = partial(gated.gated_product, x_tk, weight.to(torch.bfloat16), None)

    def plain() -> Tensor:
        with gated.in_two_kernels():
            return work()

    return compared(
        {"kernel": work, "plain": plain}, 4 * num_rows * num_inputs * num_outputs, device
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--tiny", action="store_true", help="tiny prompts, without a GPU")
    asked = parser.parse_args()
    device = "cpu" if asked.tiny else "cuda"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    torch.manual_seed(0)
    cases, head_dim = (TINY, 16) if asked.tiny else (CASES, 128)
    report = {
        "gpu": None if asked.tiny else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": commit.stdout.strip(),
        "attention": {name: measure(case, head_dim, device) for name, case in cases.items()},
        "gated": {
            f"{name}, {num_rows} rows": measure_gated(num_rows, *shape, device)
            for name, shape in ({"tiny": (32, 16)} if asked.tiny else GATED).items()
            for num_rows in ((5,) if asked.tiny else ROWS)
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
