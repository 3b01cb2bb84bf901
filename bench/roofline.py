"""The least time a GPU can take for a model and a workload, from bytes and operations alone.

    python bench/roofline.py bench/shapes/qwen3-0.6b                 prints one JSON object
    python bench/roofline.py SHAPE --requests 64 --input 1024 --output 256 --seconds 1.9

Counted: every prompt's products and attention; for every decode step the weights once and the keys
and values of everybody once. All requests start together and none waits. The ceilings are measured
on the GPU if there is one (a large copy, a large product), or given. With --seconds, what a run
took, the share of the floor it reached is told too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headway.model.config import ModelConfig, load_hf

Lengths = list[tuple[int, int]]  # prompt and output tokens of each request


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a GPU can do: bytes and operations a second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a workload needs, and the least seconds for it."""

    weight_bytes: float
    kv_bytes: float
    prefill_flops: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def floor(config: ModelConfig, lengths: Lengths, ceilings: Ceilings, itemsize: int = 2) -> Floor:
    """Prefill is bound by operations, decode by bytes: at these sizes each is the larger by far."""
    matrices = sum(
        math.prod(s) for n, s in config.shapes().items() if len(s) == 2 and "layers" in n
    )
    head = config.vocab_size * config.hidden_size
    pairs = sum(prompt * (prompt + 1) / 2 for prompt, _ in lengths)
    width = 4 * config.num_layers * config.num_heads * config.head_dim
    flops = (
        2 * matrices * sum(prompt for prompt, _ in lengths)
        + width * pairs
        + 2 * head * len(lengths)
    )
    steps = max(output for _, output in lengths) - 1
    # The first output comes of the prompt; the others each read all that is before them.
    read = sum((o - 1) * p + o * (o - 1) / 2 for p, o in lengths)
    weight_bytes, kv_bytes = steps * itemsize * (matrices + head), read * config.kv_bytes(itemsize)
    return Floor(
        weight_bytes=weight_bytes, kv_bytes=kv_bytes, prefill_flops=flops,
        prefill_seconds=flops / ceilings.flops,
        decode_seconds=(weight_bytes + kv_bytes) / ceilings.bandwidth,
    )  # fmt: skip


def measured() -> Ceilings:
    """The best of a few tries on this GPU, with random numbers: a copy, and a product."""
    import torch

    def seconds(run: object) -> float:
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()  # type: ignore[operator]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 4]

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = seconds(lambda: a @ b)
    return Ceilings(bandwidth=2 * source.nbytes / copy, flops=2 * 8192**3 / product)


def field_lengths(
    count: int, shortest: int = 100, longest: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths that engines of this kind are often compared with: seed 0."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(shortest, longest))]
        for _ in range(count)
    ]
    return prompts, [source.randint(shortest, longest) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", type=Path, help="a folder with a config.json")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, help="prompt tokens; 100 to 1024 unless given")
    parser.add_argument("--output", type=int, help="output tokens; 100 to 1024 unless given")
    parser.add_argument("--bandwidth", type=float, help="bytes a second; measured unless given")
    parser.add_argument("--flops", type=float, help="operations a second; measured unless given")
    parser.add_argument("--seconds", type=float, help="what a run took")
    asked = parser.parse_args()
    prompts, outputs = field_lengths(asked.requests)
    lengths = [
        (asked.input or len(p), asked.output or o) for p, o in zip(prompts, outputs, strict=True)
    ]
    if asked.bandwidth and asked.flops:
        ceilings = Ceilings(bandwidth=asked.bandwidth, flops=asked.flops)
    else:
        ceilings = measured()
    found = floor(load_hf(asked.shape), lengths, ceilings)
    num_output = sum(output for _, output in lengths)
    report = {"ceilings": asdict(ceilings), **asdict(found), "floor_seconds": found.seconds,
              "floor_tokens_per_second": num_output / found.seconds}  # fmt: skip
    if asked.seconds:
        report |= {
            "seconds": asked.seconds,
            "percent_of_floor": 100 * found.seconds / asked.seconds,
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
