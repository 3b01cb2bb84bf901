"""Speed of prefill attention on a GPU, by the kernel that the device gets and by plain Triton.

    python bench/gpu_prefill.py                          prints one JSON object
    python bench/gpu_prefill.py --out bench/results/gpu_prefill.json
    python bench/gpu_prefill.py --tiny                   runs in seconds without a GPU, as a test

Causal attention over a paged cache in blocks of 16 positions, in random order; random numbers,
bfloat16, head size 128. Operations are those that the mask leaves: 2 L^2 for each number of a query
of L tokens. Medians of launches with a cold L2 cache. `difference` is the distance of the two
results over their norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton

from headway.model.kernels.attention import prefill

BLOCK_SIZE = 16
Case = tuple[list[int], int, int]  # tokens of each prompt, query heads, key-value heads
CASES: dict[str, Case] = {
    "8192 tokens, 16 heads of 8": ([8192], 16, 8),
    "8192 tokens, 32 heads of 8": ([8192], 32, 8),
    "8192 tokens, 28 heads of 4": ([8192], 28, 4),
    "8 x 2048 tokens, 16 heads of 8": ([2048] * 8, 16, 8),
    "16 x 1024 tokens, 16 heads of 8": ([1024] * 16, 16, 8),
    "32768 tokens, 16 heads of 8": ([32768], 16, 8),
}
TINY: dict[str, Case] = {"2 prompts": ([5, 40], 4, 2)}


def inputs(case: Case, head_dim: int, device: str) -> dict[str, Any]:
    """Arguments of prefill_attention."""
    lengths, num_heads, kv_heads = case
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    tables = torch.zeros((len(lengths), -(-max(counts) // 16) * 16), dtype=torch.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor([next(order) for _ in range(count)])
    shape = (sum(counts) + 1, 1, 2, kv_heads, BLOCK_SIZE, head_dim)
    q_thd = torch.randn((sum(lengths), num_heads, head_dim), dtype=dtype, device=device)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return {
        "q_thd": q_thd, "out_thd": torch.empty_like(q_thd), "layer": 0, "longest": max(lengths),
        "blocks": torch.randn(shape, dtype=dtype, device=device), "tables": tables.to(device),
        "row_ids_s": torch.arange(len(lengths), **ints), "ends_s": torch.tensor(lengths, **ints),
        "starts_s": torch.tensor([sum(lengths[:s]) for s in range(len(lengths) + 1)], **ints),
    }  # fmt: skip


def seconds(arguments: dict[str, Any], device: str) -> float:
    def work() -> None:
        prefill.prefill_attention(**arguments)

    work()
    if device == "cuda":
        return float(triton.testing.do_bench(work, warmup=20, rep=100, return_mode="median")) / 1e3
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(case: Case, head_dim: int, device: str) -> dict[str, Any]:
    arguments, found = inputs(case, head_dim, device), dict[str, Any]()
    lengths, num_heads, _ = case
    flops = sum(2 * num_heads * head_dim * length**2 for length in lengths)
    chosen, results = prefill.hopper_kernel, []
    for name, kernel in (("kernel", chosen), ("plain", lambda: None)):
        prefill.hopper_kernel = kernel  # type: ignore[assignment]
        took = seconds(arguments, device)
        results.append(arguments["out_thd"].float().clone())
        found[name] = {"us": round(took * 1e6, 1), "tflops": round(flops / took / 1e12, 1)}
    prefill.hopper_kernel = chosen
    found["difference"] = float((results[0] - results[1]).norm() / results[1].norm())
    return found


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
        "cases": {name: measure(case, head_dim, device) for name, case in cases.items()},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
