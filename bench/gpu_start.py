"""Seconds until an engine on a GPU is ready, without and with compiled kernels in the cache.

    python bench/gpu_start.py                    prints one JSON object
    python bench/gpu_start.py --shapes qwen3-0.6b --repeat 3 --out bench/results/gpu_start.json

Every start is a process of its own, with random weights of a real shape, bfloat16. `process` counts
from the start of the process, and `engine` from the constructor of LLM, after all imports. This
process imports the same modules before, so that they are in the file cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton  # noqa: F401
from gpu import MAX_LENGTHS, SHAPES

from headway import LLM


def start_here(shape: str) -> None:
    """Start an engine in this process, and print the seconds that it took."""
    begun = time.perf_counter()
    llm = LLM(
        str(SHAPES / shape), load_format="dummy", device="cuda", max_num_batched_tokens=16384,
        max_model_len=MAX_LENGTHS[shape],
    )  # fmt: skip
    print(json.dumps({"engine": time.perf_counter() - begun, "ended": time.time()}))
    llm.close()


def start(shape: str, cache: Path) -> dict[str, float]:
    """Start an engine in a new process, with compiled kernels in this folder."""
    begun = time.time()
    child = subprocess.run(
        [sys.executable, __file__, "--here", shape], env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(child.stdout.splitlines()[-1])
    return {"process": found["ended"] - begun, "engine": found["engine"]}


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", choices=MAX_LENGTHS, default=["qwen3-0.6b", "qwen2.5-7b"]
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        start_here(asked.here)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {"commit": commit.stdout.strip()}
    for shape in asked.shapes:
        cold, warm = [], []
        for number in range(asked.repeat):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(start(shape, Path(cache)))
                warm.append(start(shape, Path(cache)))
            print(shape, number, "without", cold[-1], "with", warm[-1], file=sys.stderr, flush=True)
        report[shape] = {"without_cache": medians(cold), "with_cache": medians(warm)}
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
