"""Tensor parallelism: the cost of sending plans and of captured collectives, and of one rank.

    python bench/tensor_parallel.py delta       a plan of 256 decodes: bytes, and time to send it
    python bench/tensor_parallel.py captured    one GPU: a group of one rank against no group
    python bench/tensor_parallel.py rank        one GPU: the compute of one rank of 2 and 4
    python bench/tensor_parallel.py             all; without a GPU only `delta`
    python bench/tensor_parallel.py --tiny      all, with tiny models, also without a GPU

`captured` runs the same decode steps as CUDA graphs with and without NCCL collectives; with one rank
they move no data between GPUs, so the difference is what the division itself costs. `rank` gives
rank 0 its part of the model and torch's fake process group, whose collectives do nothing. What it
measures is compute; speeds of whole groups are predictions: compute plus the communication term of
headway/lab/cost.py with the link that is printed. Random weights, bfloat16, decodes after 512 tokens.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from headway.config import Config
from headway.lab.cost import load_profile
from headway.model.config import ModelConfig, load_hf
from headway.model.sharding import Shard
from headway.parallel.channel import Channel, anonymous_file
from headway.parallel.delta import PlanEncoder, largest_delta
from headway.parallel.group import Group, connect
from headway.plan import Plan
from headway.request import Request, RequestParams
from headway.scheduler import preset

SHAPES = Path(__file__).parent / "shapes"
TINY = {"hidden_size": 32, "intermediate_size": 128, "num_layers": 1, "num_heads": 4,
        "num_kv_heads": 4, "head_dim": 16, "vocab_size": 64}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The device, and the size of what is measured there."""

    device: torch.device
    rows: tuple[int, ...] = (1, 32, 256)
    captured_rows: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    prompt: int = 2048  # tokens of the prefill
    context: int = 512  # tokens before the measured steps
    room: int = 256  # tokens for the measured steps
    rounds: int = 7
    replays: int = 16
    is_tiny: bool = False

    @property
    def config(self) -> Config:
        blocks = max(self.rows) * (self.context + self.room) // 16
        return preset(
            max_num_seqs=max(self.rows), num_blocks=blocks, max_model_len=4096,
            max_num_batched_tokens=self.prompt,
        )  # fmt: skip

    def model(self, name: str) -> ModelConfig:
        model = load_hf(SHAPES / name)
        return replace(model, **TINY) if self.is_tiny else model


# NVLink 4 of an H200, in one direction, with the share of a link that all-reduces reach in the
# profile llama3-70b-4xa100, and that profile's time per all-reduce. Not measured.
LINK_BANDWIDTH, LINK_SECONDS = 450e9 * 230 / 300, 12e-6
MIB = 1 << 20


class FakeGroup(Group):
    """Rank 0 of a group whose other ranks do not exist: gathers copy its own part."""

    def __init__(self, size: int) -> None:
        from torch._C._distributed_c10d import FakeProcessGroup

        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        super().__init__(make(0, size), 0, size)

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        parts = x.new_empty((self.size, *x.shape))
        parts[:] = x
        whole = parts.transpose(0, 1).reshape(len(x), -1)
        return whole[:, : sum(widths)]


def measure_delta() -> dict[str, Any]:
    """A steady step of 256 decodes, one in 16 of which needs a block, to three other ranks."""
    config = preset(max_num_seqs=256, num_blocks=32768)
    requests = []
    for row in range(256):
        request = Request(str(row), [1], RequestParams())
        request.row = row
        requests.append(request)
    plan = Plan(0, decodes=requests, rows=np.arange(256))
    plan.new_blocks = [(request, 12345 + request.row) for request in requests[::16]]
    file, encoder = anonymous_file(), PlanEncoder(256)
    capacity = 2 * largest_delta(config) + MIB
    writer, *readers = (Channel(file, rank, 4, capacity) for rank in range(4))
    first, seconds = len(encoder.encode(plan)), []
    for _ in range(2000):
        begun = time.perf_counter()
        message = encoder.encode(plan)
        writer.write(message, lambda: None)
        seconds.append(time.perf_counter() - begun)
        for reader in readers:
            reader.read()
    return {
        "bytes": len(message), "bytes_if_all_rows_change": first,
        "microseconds": round(median(seconds) * 1e6, 1),
        "microseconds_p99": round(sorted(seconds)[-20] * 1e6, 1),
    }  # fmt: skip


def load_part(model: ModelConfig, group: Group | None, device: torch.device) -> Any:
    """A decoder with random weights: the whole model, or rank 0's part."""
    from headway.model.backends.gpu import GpuBackend
    from headway.model.loader import load_decoder
    from headway.model.weights.checkpoint import DummyCheckpoint

    shard = Shard(model, group, is_exact=False) if group else None
    backend = GpuBackend(torch.bfloat16, str(device))
    return load_decoder(DummyCheckpoint(model, device), backend, device, shard=shard)


@torch.inference_mode()
def captured_steps(decoder: Any, setup: Setup, blocks: torch.Tensor | None = None) -> Any:
    """An executor with captured decode steps of all numbers of rows; `blocks` is the KV cache."""
    from headway.executor.gpu.executor import GpuExecutor
    from headway.model.kernels.launch import compile_all

    executor = GpuExecutor(decoder, setup.config)
    if blocks is not None:
        executor.device_blocks = blocks
    steps = [step_size(executor, num_rows, setup) for num_rows in setup.rows]

    def run_all() -> None:
        for step in steps:
            executor._decode_step(*step)

    if setup.device.type == "cuda":
        with decoder.shortened(2):
            compile_all(run_all)
    for step in steps:
        executor._capture(*step)
    return executor


def step_size(executor: Any, num_rows: int, setup: Setup) -> tuple[int, int]:
    """Rows and splits of the step that the executor would run."""
    executor.rows.lengths[:num_rows] = setup.context
    return num_rows, executor._num_splits(np.arange(num_rows))


def step_seconds(executor: Any, num_rows: int, setup: Setup) -> Callable[[], float]:
    """A function that measures the mean time of some decode steps."""
    length, size = setup.context + setup.room, step_size(executor, num_rows, setup)
    width = length // executor.rows.block_size

    @torch.inference_mode()
    def measure() -> float:
        for row in range(num_rows):
            executor.state.set_blocks(row, 0, list(range(row * width, (row + 1) * width)))
            executor.state.set_limit(row, length - 1)
            executor.state.set_length(row, setup.context)
            executor.rows.lengths[row] = setup.context
        executor.state.send()
        executor._send_rows(np.arange(num_rows))
        return timed(lambda: executor.graphs.run(size), setup.replays)

    return measure


@torch.inference_mode()
def timed(work: Callable[[], object], count: int) -> float:
    """Mean seconds on the device of `count` calls, after one more."""
    if not torch.cuda.is_available():
        begun_at = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - begun_at) / count
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    work()
    begun.record()  # type: ignore[no-untyped-call]
    for _ in range(count):
        work()
    ended.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / count


@contextmanager
def divided(decoder: Any, shard: Shard | None) -> Iterator[None]:
    """Use a shard that has the whole model, or none."""
    decoder.shard = decoder.backend.shard = shard
    yield
    decoder.shard = decoder.backend.shard = None


def measure_captured(setup: Setup) -> dict[str, Any]:
    """Decode steps of an 8B model with and without a group of one rank, alternating.

    `noise` is the cost of another executor without a group. All use the same KV cache, so that
    nothing but the group differs.
    """
    model = setup.model("llama-8b")
    decoder = load_part(model, None, setup.device)
    shard = Shard(model, connect(anonymous_file(), 0, 1, setup.device), is_exact=False)
    plain = captured_steps(decoder, setup)
    with divided(decoder, shard):
        grouped = captured_steps(decoder, setup, plain.device_blocks)
    other = captured_steps(decoder, setup, plain.device_blocks)
    found = {}
    for num_rows in setup.rows:
        each = [step_seconds(executor, num_rows, setup) for executor in (plain, grouped, other)]
        rounds = [[measure() for measure in each] for _ in range(setup.rounds)]
        without, with_group, again = (median(column) for column in zip(*rounds, strict=True))
        found[f"{num_rows} rows"] = {
            "ms": round(without * 1e3, 4), "ms_with_collectives": round(with_group * 1e3, 4),
            "cost": round(with_group / without - 1, 4), "noise": round(again / without - 1, 4),
        }  # fmt: skip
    return found


@torch.inference_mode()
def prefill_seconds(decoder: Any, setup: Setup) -> float:
    """Time of a prompt in a step of its own."""
    from headway.executor.gpu.memory import prompt_batch

    blocks = decoder.backend.kv_blocks(decoder.config, 1, setup.config.block_size)
    batch = prompt_batch(setup.config, setup.prompt, blocks.device)
    return min(
        timed(lambda: decoder.logits(decoder.forward(batch, blocks)[-1:]), 3) for _ in range(3)
    )


def communication_seconds(model: ModelConfig, size: int, tokens: int) -> float:
    """Predicted time of the all-reduces of a pass, by the formula of headway/lab/cost.py."""
    if size == 1:
        return 0.0
    profile = load_profile("llama3-70b-4xa100")
    profile = replace(
        profile,
        model=replace(
            profile.model, all_reduces=2 * model.num_layers + 1,
            all_reduce_bytes=2 * model.hidden_size,
        ),
        machine=replace(
            profile.machine, num_devices=size, fixed_seconds=0.0, link_bandwidth=LINK_BANDWIDTH,
            link_seconds=LINK_SECONDS,
        ),
    )  # fmt: skip
    return profile.unit_costs.fixed + tokens * profile.unit_costs.exchange


def measure_rank(name: str, size: int, setup: Setup) -> dict[str, Any]:
    """The compute of rank 0 of `size`, and the predicted speed of the whole group."""
    model = setup.model(name)
    decoder = load_part(model, FakeGroup(size) if size > 1 else None, setup.device)
    executor, found = captured_steps(decoder, setup), dict[str, Any]()
    for num_rows in setup.rows:
        measure = step_seconds(executor, num_rows, setup)
        compute = median(measure() for _ in range(setup.rounds))
        found[f"{num_rows} rows"] = _with_prediction(model, size, num_rows, compute)
    compute = prefill_seconds(decoder, setup)
    found[f"prompt of {setup.prompt}"] = _with_prediction(model, size, setup.prompt, compute)
    return {"weights_gb": round(decoder.num_bytes / 1e9, 1), **found}


def _with_prediction(model: ModelConfig, size: int, tokens: int, compute: float) -> dict[str, Any]:
    step = compute + communication_seconds(model, size, tokens)
    return {
        "measured_compute_ms": round(compute * 1e3, 3),
        "predicted_step_ms": round(step * 1e3, 3),
        "predicted_tokens_per_second": round(tokens / step),
    }


def free_memory() -> None:
    """Free what the last measurement held; executors have reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_ranks(setup: Setup) -> dict[str, Any]:
    found: dict[str, Any] = {
        "predictions": "measured compute of one rank plus assumed communication; not measured",
        "assumed_link": {
            "bytes_per_second": LINK_BANDWIDTH,
            "seconds_per_all_reduce": LINK_SECONDS,
        },
    }
    for name, sizes in (("llama-8b", (1, 2, 4)), ("llama-70b", (2, 4))):
        for size in sizes:
            found[f"{name}, {size} ranks"] = measure_rank(name, size, setup)
            free_memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=["all", "delta", "captured", "rank"], default="all"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, also without a GPU")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    setup = Setup(torch.device("cuda", 0) if has_gpu else torch.device("cpu"))
    if options.tiny:
        setup = replace(
            setup,
            rows=(1, 3),
            captured_rows=(1, 3),
            prompt=24,
            context=8,
            room=24,
            rounds=1,
            replays=1,
            is_tiny=True,
        )
    parts = {
        "delta": measure_delta,
        "captured": partial(measure_captured, replace(setup, rows=setup.captured_rows)),
        "rank": partial(measure_ranks, setup),
    }
    chosen = list(parts) if has_gpu or options.tiny else ["delta"]
    results = {}
    for name in chosen if options.part == "all" else [options.part]:
        begun = time.perf_counter()
        results[name] = parts[name]()
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        free_memory()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
