"""The roofline of a model and a workload: its time at the ceilings of a GPU, without overlap.

    python -m bench.gpu.roofline bench/shapes/qwen3-0.6b             prints one JSON object
    python -m bench.gpu.roofline SHAPE --requests 64 --input 1024 --output 256 --seconds 1.9

It adds the time of the products and attention of every prompt, at the ceiling of operations, and of
one read of the weights and of all keys and values for every decode step, at the ceiling of
bandwidth. Of experts, a step reads those that its tokens choose, if each is equally likely. All
requests start together and none waits. It is no strict bound: a step with prompts and decodes could
overlap the two and read the weights once. The ceilings (bandwidth, operations) are what the GPU
sustains for two seconds, by a large copy and a large product, or given.
With --seconds, the time of a run, it also prints the fraction of the floor that the run reached.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bench.harness import Bench, Figures
from headway.model.config import ModelConfig, load_hf

Lengths = list[tuple[int, int]]  # prompt and output tokens of each request


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Bytes and operations per second that a GPU can do."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The needs of a workload, and its time without overlap."""

    weight_bytes: float
    kv_bytes: float
    prefill_flops: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def floor(config: ModelConfig, lengths: Lengths, ceilings: Ceilings, itemsize: int = 2) -> Floor:
    """Prefill is limited by operations and decode by bytes; at these sizes the other is small."""
    sizes = {n: math.prod(s) for n, s in config.shapes().items() if len(s) == 2 and "layers" in n}
    matrices, head = sum(sizes.values()), config.vocab_size * config.hidden_size
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    pairs = sum(prompt * (prompt + 1) / 2 for prompt, _ in lengths)
    width = 4 * config.num_layers * config.num_heads * config.head_dim
    flops = (
        2 * config.num_used(in_layers=True) * sum(prompt for prompt, _ in lengths)
        + width * pairs
        + 2 * head * len(lengths)
    )
    steps = max(output for _, output in lengths) - 1
    rows = (sum(output > step for _, output in lengths) for step in range(1, steps + 1))
    unread = sum((1 - config.expert_share) ** count for count in rows) * experts
    # The prompt gives the first output token; each other token reads all tokens before it.
    contexts = [prompt + place for prompt, output in lengths for place in range(1, output)]
    window = config.sliding_window or 0
    full, windowed = (
        config.layers_of_kind(windowed=kind).kv_bytes(itemsize) for kind in (False, True)
    )
    weight_bytes = itemsize * (steps * (matrices + head) - unread)
    kv_bytes = full * sum(contexts) + windowed * sum(min(each, window) for each in contexts)
    return Floor(
        weight_bytes=weight_bytes, kv_bytes=kv_bytes, prefill_flops=flops,
        prefill_seconds=flops / ceilings.flops,
        decode_seconds=(weight_bytes + kv_bytes) / ceilings.bandwidth,
    )  # fmt: skip


@cache
def measured() -> Ceilings:
    """Measure this GPU once with random numbers: copies and products that it can sustain."""
    import torch

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = _sustained_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = _sustained_seconds(lambda: a @ b)
    return Ceilings(bandwidth=2 * source.nbytes / copy, flops=2 * 8192**3 / product)


def _sustained_seconds(run: Callable[[], object], length: float = 2.0) -> float:
    """Time of one call in the second half of `length` seconds of calls without a pause.

    Products reach the power limit of a GPU after a moment, and its clock then falls: on an H200
    they are up to a sixth slower than the first ones.
    """
    import torch

    times, begun = [], time.perf_counter()
    while time.perf_counter() - begun < length:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e4)
    return statistics.median(times[len(times) // 2 :])


def field_lengths(
    count: int, shortest: int = 100, longest: int = 1024
) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of a common benchmark for engines like this, with seed 0."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(shortest, longest))]
        for _ in range(count)
    ]
    return prompts, [source.randint(shortest, longest) for _ in range(count)]


def measure(asked: Namespace) -> Figures:
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
        percent = 100 * found.seconds / asked.seconds
        report |= {"seconds": asked.seconds, "percent_of_floor": percent}
    return report


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("shape", type=Path, help="a folder with a config.json")
    bench.option("--requests", type=int, default=256)
    bench.option("--input", type=int, help="prompt tokens (default: 100 to 1024)")
    bench.option("--output", type=int, help="output tokens (default: 100 to 1024)")
    bench.option("--bandwidth", type=float, help="bytes per second (default: measured)")
    bench.option("--flops", type=float, help="operations per second (default: measured)")
    bench.option("--seconds", type=float, help="time of a run, to compare")
    bench.main(measure)
