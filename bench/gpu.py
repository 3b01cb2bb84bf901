"""Speed on a GPU with random weights of real shapes, compared with the roofline of the same work.

    python bench/gpu.py                 prints one JSON object
    python bench/gpu.py --only 256 batch_1 --out bench/results/gpu.json

Every figure is the median of --repeat runs through `LLM.generate`, after one warm-up run. Prompts
share no prefix. bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import roofline

from headway import LLM, SamplingParams
from headway.model.config import load_hf

SHAPES = Path(__file__).parent / "shapes"
Work = tuple[list[list[int]], list[int]]


def run(llm: LLM, work: Work, temperature: float) -> float:
    """Seconds to generate all outputs."""
    prompts, outputs = work
    params = [
        SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True, seed=number)
        for number, output in enumerate(outputs)
    ]
    llm.reset_cache()
    begun = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    for result, output in zip(results, outputs, strict=True):
        if len(result.outputs[0].token_ids) != output:
            raise SystemExit(f"a request failed: {result.outputs[0].error}")
    return seconds


def measure(
    llm: LLM, shape: str, work: Work, temperature: float, repeat: int, ceilings: Any
) -> dict[str, Any]:
    run(llm, work, temperature)
    seconds = statistics.median(run(llm, work, temperature) for _ in range(repeat))
    prompts, outputs = work
    lengths = [(len(p), o) for p, o in zip(prompts, outputs, strict=True)]
    floor = roofline.floor(load_hf(SHAPES / shape), lengths, ceilings)
    return {
        "seconds": seconds, "output_tokens_per_second": sum(outputs) / seconds,
        "ms_per_token": 1e3 * seconds / sum(outputs), "floor_seconds": floor.seconds,
        "percent_of_floor": 100 * floor.seconds / seconds,
    }  # fmt: skip


def fixed(count: int, prompt: int, output: int) -> Work:
    prompts = [[(7 * number + place) % 10000 for place in range(prompt)] for number in range(count)]
    return prompts, [output] * count


CASES: dict[str, tuple[str, Callable[[], Work], float]] = {
    "256": ("qwen3-0.6b", lambda: roofline.field_lengths(256), 0.6),
    "256_greedy": ("qwen3-0.6b", lambda: roofline.field_lengths(256), 0.0),
    "1024": ("qwen3-0.6b", lambda: roofline.field_lengths(1024), 0.6),
    "16": ("qwen3-0.6b", lambda: roofline.field_lengths(16), 0.6),
    "batch_1": ("qwen3-0.6b", lambda: fixed(1, 16, 256), 0.6),
    "8b_64": ("llama-8b", lambda: fixed(64, 1024, 256), 0.6),
    "8b_batch_1": ("llama-8b", lambda: fixed(1, 16, 256), 0.6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--attention", default="triton", help="as for `headway serve`")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    import torch

    ceilings = roofline.measured()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit.stdout.strip(), "bandwidth": ceilings.bandwidth, "flops": ceilings.flops,
    }  # fmt: skip
    llm, loaded = None, ""
    for name in asked.only:
        shape, work, temperature = CASES[name]
        if shape != loaded:
            if llm:
                llm.close()
            llm = None
            gc.collect()
            torch.cuda.empty_cache()
            begun = time.perf_counter()
            llm = LLM(
                str(SHAPES / shape), load_format="dummy", device="cuda",
                max_num_batched_tokens=16384, max_model_len=4096, attention=asked.attention,
                block_size=asked.block_size,
            )  # fmt: skip
            report[f"{shape}_start_seconds"], loaded = time.perf_counter() - begun, shape
        report[name] = measure(llm, shape, work(), temperature, asked.repeat, ceilings)
        print(name, report[name], file=sys.stderr, flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
