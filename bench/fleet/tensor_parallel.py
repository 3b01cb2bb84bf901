"""Tensor parallelism: the cost of plans and collectives, the compute of a rank, failing ranks.

    python -m bench.fleet.tensor_parallel                    without a GPU only `delta`
    python -m bench.fleet.tensor_parallel --tiny             tiny models, also without a GPU
    python -m bench.fleet.tensor_parallel --only failures --rounds 30

delta     a plan of 256 decodes: bytes, and time to send it
captured  one GPU: a group of one rank against no group, with the same decode steps as CUDA graphs
          with and without NCCL collectives; with one rank they move no data between GPUs, so the
          difference is what the division itself costs
rank      one GPU: the compute of rank 0 of 2 and 4. It has its part of the model and torch's fake
          process group, whose collectives do nothing. Speeds of whole groups are predictions:
          compute plus the communication term of headway/lab/cost.py with the link that is printed
failures  only with --only: each round starts a group of two or three ranks with a tiny model,
          generates, and sends a signal to one of the others after a random time: SIGKILL, SIGSTOP,
          or one whose handler never returns, so that the main thread hangs while other threads run.
          For each kind the seconds from the signal to the error, and what was left behind:
          processes, and files in shared memory
Random weights, bfloat16, decodes after 512 tokens.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

if "--tiny" in sys.argv:  # must be set before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from bench.harness import SHAPES, Bench, Figures, log
from headway import LLM, Config, Engine, Plan, Scheduler, preset
from headway.lab.cost import load_profile
from headway.model.config import ModelConfig, load_hf
from headway.model.sharding import Shard
from headway.parallel.delta import PlanEncoder
from headway.parallel.group import Group, connect
from headway.parallel.progress import anonymous_file
from headway.parallel.spec import framed, messages
from headway.request import Request, RequestParams

bench = Bench(__doc__)
bench.option("--tiny", action="store_true", help="tiny models, also without a GPU")
bench.option("--rounds", type=int, default=30, help="failures in all")
bench.option("--seed", type=int, default=0, help="of failures")
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


def setup_of(asked: Namespace) -> Setup:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not asked.tiny:
        return Setup(device)
    return Setup(
        device, rows=(1, 3), captured_rows=(1, 3), prompt=24, context=8, room=24, rounds=1,
        replays=1, is_tiny=True,
    )  # fmt: skip


# NVLink 4 of an H200, in one direction, with the share of a link that all-reduces reach in the
# profile llama3-70b-4xa100, and that profile's time per all-reduce. Not measured.
LINK_BANDWIDTH, LINK_SECONDS = 450e9 * 230 / 300, 12e-6


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


@bench.part
def delta(_: Namespace) -> Figures:
    """A steady step of 256 decodes, one in 16 of which needs a block, to three other ranks."""
    requests = []
    for row in range(256):
        request = Request(str(row), [1], RequestParams())
        request.row = row
        requests.append(request)
    plan = Plan(0, decodes=requests, rows=np.arange(256))
    plan.new_blocks = [(request, 12345 + request.row) for request in requests[::16]]
    encoder, pairs = PlanEncoder(256), [socket.socketpair() for _ in range(3)]
    readers = [messages(reader.makefile("rb")) for _, reader in pairs]
    first, seconds = len(encoder.encode(plan)), []
    for _ in range(2000):
        begun = time.perf_counter()
        message = encoder.encode(plan)
        for writer, _ in pairs:
            writer.sendall(framed(message))
        seconds.append(time.perf_counter() - begun)
        for reader in readers:
            next(reader)
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


@bench.part
def captured(asked: Namespace) -> Figures:
    """Decode steps of an 8B model with and without a group of one rank, alternating.

    `noise` is the cost of another executor without a group. All use the same KV cache, so that
    nothing but the group differs.
    """
    setup = setup_of(asked)
    setup = replace(setup, rows=setup.captured_rows)
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
    shape = replace(
        profile.model, all_reduces=2 * model.num_layers + 1, all_reduce_bytes=2 * model.hidden_size
    )
    machine = replace(
        profile.machine, num_devices=size, fixed_seconds=0.0, link_bandwidth=LINK_BANDWIDTH,
        link_seconds=LINK_SECONDS,
    )  # fmt: skip
    costs = replace(profile, model=shape, machine=machine).unit_costs
    return costs.fixed + tokens * costs.exchange


def measure_rank(name: str, size: int, setup: Setup) -> Figures:
    """The compute of rank 0 of `size`, and the predicted speed of the whole group."""
    model = setup.model(name)
    decoder = load_part(model, FakeGroup(size) if size > 1 else None, setup.device)
    executor, found = captured_steps(decoder, setup), Figures()
    for num_rows in setup.rows:
        measure = step_seconds(executor, num_rows, setup)
        compute = median(measure() for _ in range(setup.rounds))
        found[f"{num_rows} rows"] = _with_prediction(model, size, num_rows, compute)
    compute = prefill_seconds(decoder, setup)
    found[f"prompt of {setup.prompt}"] = _with_prediction(model, size, setup.prompt, compute)
    return {"weights_gb": round(decoder.num_bytes / 1e9, 1), **found}


def _with_prediction(model: ModelConfig, size: int, tokens: int, compute: float) -> Figures:
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


@bench.part
def rank(asked: Namespace) -> Figures:
    free_memory()
    found: Figures = {
        "predictions": "measured compute of one rank plus assumed communication; not measured",
        "assumed_link": {
            "bytes_per_second": LINK_BANDWIDTH, "seconds_per_all_reduce": LINK_SECONDS
        },
    }  # fmt: skip
    for name, sizes in (("llama-8b", (1, 2, 4)), ("llama-70b", (2, 4))):
        for size in sizes:
            found[f"{name}, {size} ranks"] = measure_rank(name, size, setup_of(asked))
            free_memory()
    return found


KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "hangs": signal.SIGUSR1}
HANGING = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))\n"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 160, "hidden_size": 96,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096, "eos_token_id": 0,
}  # fmt: skip
MAX_SECONDS = 0.5  # until the signal
GONE_SECONDS = 3.0  # for processes to end
SHARED = Path("/dev/shm")


def shared_files() -> set[str]:
    return {file.name for file in SHARED.iterdir()} if SHARED.is_dir() else set()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fail(folder: str, size: int, sent: signal.Signals, random: Random) -> tuple[float, int]:
    """Seconds from the signal to the error, and the number of processes that are left."""
    with LLM(folder, tensor_parallel_size=size, device="cpu", load_format="dummy", threads=1,
             num_blocks=200, max_num_seqs=8) as llm:  # fmt: skip
        assert llm.loaded.ranks is not None
        pids = [each.process.pid for each in llm.loaded.ranks.watch._ranks]
        engine, sent_at = Engine(Scheduler(llm.config), llm.executor), list[float]()

        def send() -> None:
            sent_at.append(time.monotonic())
            os.kill(random.choice(pids), sent)

        timer, number = threading.Timer(random.uniform(0, MAX_SECONDS), send), 0
        timer.start()
        while not engine.fault:
            if not engine.has_work:
                params = RequestParams(max_tokens=50, ignore_eos=True)
                prompt = [random.randrange(160) for _ in range(random.randrange(1, 300))]
                engine.add(str(number), prompt, params)
                number += 1
            engine.step()
        seconds = time.monotonic() - sent_at[0]
        limit = time.monotonic() + GONE_SECONDS
        while any(map(is_running, pids)) and time.monotonic() < limit:
            time.sleep(0.02)
        return seconds, sum(map(is_running, pids))


@bench.part
def failures(asked: Namespace) -> Figures:
    random, before = Random(asked.seed), shared_files()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    num_left = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        Path(folder, "sitecustomize.py").write_text(HANGING)
        sys.path.append(folder)  # of the ranks, too
        for number in range(asked.rounds):
            kind, size = list(KINDS)[number % len(KINDS)], random.choice((2, 3))
            taken, left = fail(folder, size, KINDS[kind], random)
            seconds[kind].append(taken)
            num_left += left
            log(f"round {number + 1} of {asked.rounds}: {kind}, {taken:.3f} s")
    files = [name for name in shared_files() - before if not name.startswith("sem.")]
    return {
        kind: {"failures": len(each), "median_seconds": round(median(each), 3),
               "max_seconds": round(max(each), 3)}
        for kind, each in seconds.items() if each
    } | {"processes_left": num_left, "files_left": len(files)}  # fmt: skip


if __name__ == "__main__":
    has_device = torch.cuda.is_available() or "--tiny" in sys.argv
    bench.on_demand = {"failures"} if has_device else {"captured", "rank", "failures"}
    bench.main()
