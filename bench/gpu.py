"""Speed on a GPU with random weights of real shapes, compared with the roofline of the same work.

    python bench/gpu.py                 prints one JSON object
    python bench/gpu.py --only 256 batch_1 --out bench/results/gpu.json
    python bench/gpu.py --only code 7b_code --trace azure2023_code.csv

Every figure is the median of --repeat runs through `LLM.generate`, after a first one. Prompts share
no prefix. bfloat16. `code` and `7b_code` are the first requests of a trace, all at once, prompts of
at most 7,000 tokens and outputs of at most 400; they are left out without --trace.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import roofline

from headway import LLM, SamplingParams
from headway.lab.workload.files import read_workload
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
    first = run(llm, work, temperature)
    seconds = statistics.median(run(llm, work, temperature) for _ in range(repeat))
    prompts, outputs = work
    lengths = [(len(p), o) for p, o in zip(prompts, outputs, strict=True)]
    floor = roofline.floor(load_hf(SHAPES / shape), lengths, ceilings)
    return {
        "first_seconds": first, "seconds": seconds,
        "output_tokens_per_second": sum(outputs) / seconds,
        "prompt_tokens_per_second": sum(map(len, prompts)) / seconds,
        "ms_per_token": 1e3 * seconds / sum(outputs), "floor_seconds": floor.seconds,
        "percent_of_floor": 100 * floor.seconds / seconds,
    }  # fmt: skip


def fixed(count: int, prompt: int, output: int) -> Work:
    prompts = [[(7 * number + place) % 10000 for place in range(prompt)] for number in range(count)]
    return prompts, [output] * count


def mixed_lengths(count: int) -> Work:
    """Prompts of 256 to 1,024 tokens and outputs of 128 to 512, with seed 0."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(256, 1024))] for _ in range(count)
    ]
    return prompts, [source.randint(128, 512) for _ in range(count)]


def code_traffic(trace: Path, count: int) -> Work:
    """The lengths of the first requests of a trace, with random tokens."""
    source, requests = random.Random(0), read_workload(trace, limit=count)
    prompts = [
        [source.randint(0, 10000) for _ in range(min(each.num_prompt, MAX_PROMPT))]
        for each in requests
    ]
    return prompts, [min(each.num_output, MAX_OUTPUT) for each in requests]


MAX_PROMPT, MAX_OUTPUT = 7000, 400  # of a trace
MAX_LENGTHS = {"qwen3-0.6b": 33024, "qwen2.5-7b": 8192, "llama-8b": 4096}
CODE_REQUESTS = {"code": ("qwen3-0.6b", 400), "7b_code": ("qwen2.5-7b", 120)}
CASES: dict[str, tuple[str, Callable[[], Work], float]] = {
    "256": ("qwen3-0.6b", lambda: roofline.field_lengths(256), 0.6),
    "256_greedy": ("qwen3-0.6b", lambda: roofline.field_lengths(256), 0.0),
    "1024": ("qwen3-0.6b", lambda: roofline.field_lengths(1024), 0.6),
    "16": ("qwen3-0.6b", lambda: roofline.field_lengths(16), 0.6),
    "4": ("qwen3-0.6b", lambda: fixed(4, 1000, 256), 0.6),
    "batch_1": ("qwen3-0.6b", lambda: fixed(1, 16, 256), 0.6),
    "32k_prompt": ("qwen3-0.6b", lambda: fixed(1, 32768, 1), 0.6),
    "7b_128": ("qwen2.5-7b", lambda: mixed_lengths(128), 0.6),
    "7b_batch_1": ("qwen2.5-7b", lambda: fixed(1, 16, 256), 0.6),
    "8b_64": ("llama-8b", lambda: fixed(64, 1024, 256), 0.6),
    "8b_batch_1": ("llama-8b", lambda: fixed(1, 16, 256), 0.6),
}


def chosen_cases(
    names: list[str] | None, trace: Path | None
) -> dict[str, tuple[str, Callable[[], Work], float]]:
    """The cases with these names, or all; those of one shape after each other."""
    cases = dict(CASES)
    if trace:
        cases |= {
            name: (shape, partial(code_traffic, trace, count), 0.6)
            for name, (shape, count) in CODE_REQUESTS.items()
        }
    missing = set(names or []) - set(cases)
    if missing:
        raise SystemExit(f"{', '.join(sorted(missing))}: use --trace FILE")
    found = {name: case for name, case in cases.items() if not names or name in names}
    shapes = list(MAX_LENGTHS)
    return dict(sorted(found.items(), key=lambda item: shapes.index(item[1][0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*CASES, *CODE_REQUESTS])
    parser.add_argument("--trace", type=Path, help="a .csv of requests, for code and 7b_code")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--attention", default="triton", help="as for `headway serve`")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    cases = chosen_cases(asked.only, asked.trace)
    import torch

    ceilings = roofline.measured()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "commit": commit.stdout.strip(), "bandwidth": ceilings.bandwidth, "flops": ceilings.flops,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
    }  # fmt: skip
    builds: list[int] = []
    llm, loaded = None, ""
    for name, (shape, work, temperature) in cases.items():
        if shape != loaded:
            if llm:
                llm.close()
            llm = None
            gc.collect()
            torch.cuda.empty_cache()
            begun = time.perf_counter()
            llm = LLM(
                str(SHAPES / shape), load_format="dummy", device="cuda",
                max_num_batched_tokens=asked.max_num_batched_tokens,
                max_model_len=MAX_LENGTHS[shape],
                attention=asked.attention, block_size=asked.block_size,
            )  # fmt: skip
            report[f"{shape}_start_seconds"], loaded = time.perf_counter() - begun, shape
            llm.engine.observers.append(lambda step: builds.append(step.result.num_builds))
        report[name] = measure(llm, shape, work(), temperature, asked.repeat, ceilings)
        report["builds_after_start"] = sum(builds)
        print(name, report[name], file=sys.stderr, flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
