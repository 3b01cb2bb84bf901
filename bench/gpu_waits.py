"""How long a GPU waits for the host in the case "256" of bench/gpu.py.

    python bench/gpu_waits.py                prints one JSON object
    python bench/gpu_waits.py --out bench/results/gpu_waits.json

The device records the time before and after every pass (a captured decode, or a mixed pass and its
sampling). Between two passes it runs only small copies or waits, and all of this counts as waiting.
The time before the first pass and after the last, when requests are added and results are made,
counts as waiting too. The figure is therefore an upper bound for waiting between passes. Waiting
inside a pass is not visible here. It can occur in large mixed passes, which are launched kernel by
kernel, so the report has their time and the time of their arithmetic.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import gpu
import roofline

from headway import LLM
from headway.model.config import load_hf


class Passes:
    """Device events around the passes that go through a function."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, Any]] = []

    def watched(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def run(*given: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in "ba")
            before.record()
            found = function(*given)
            after.record()
            self.events.append((kind, before, after))
            return found

        return run

    def summary(self, run_seconds: float) -> dict[str, Any]:
        """Seconds of the passes by kind, between them, and before and after them."""
        import torch

        torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for kind, before, after in self.events:
            seconds[kind] = seconds.get(kind, 0.0) + before.elapsed_time(after) / 1e3
        pairs = zip(self.events, self.events[1:], strict=False)
        gaps = [one.elapsed_time(other) / 1e3 for (*_, one), (_, other, _) in pairs]
        whole = self.events[0][1].elapsed_time(self.events[-1][2]) / 1e3
        waiting = run_seconds - whole + sum(gaps)
        return {
            "passes": len(self.events), "seconds_of": seconds, "seconds_between": sum(gaps),
            "seconds_before_and_after": run_seconds - whole, "waiting_seconds": waiting,
            "waiting_percent": 100 * waiting / run_seconds, "longest_between_ms": 1e3 * max(gaps),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parser.parse_args()
    import torch

    shape, work, temperature = gpu.CASES["256"]
    llm = LLM(
        str(gpu.SHAPES / shape), load_format="dummy", device="cuda", max_num_batched_tokens=16384,
        max_model_len=4096,
    )  # fmt: skip
    plain = min(gpu.run(llm, work(), temperature) for _ in range(2))
    passes, executor = Passes(), llm.executor
    executor.graphs.run = passes.watched("decodes", executor.graphs.run)
    executor._mixed = passes.watched("with prompts", executor._mixed)
    watched = gpu.run(llm, work(), temperature)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    ceilings = roofline.measured()
    prompts, _ = work()
    lengths = [(len(prompt), 1) for prompt in prompts]
    report = {
        "gpu": torch.cuda.get_device_name(), "commit": commit.stdout.strip(),
        "run_seconds": plain, "watched_run_seconds": watched,
        "prompts_floor_seconds": roofline.floor(load_hf(gpu.SHAPES / shape), lengths,
                                                ceilings).seconds,
        **passes.summary(watched), "command": "python bench/gpu_waits.py",
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
