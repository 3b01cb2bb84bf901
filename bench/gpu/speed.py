"""Speed on a GPU with random weights of real shapes, compared with the roofline of the same work.

    python -m bench.gpu.speed                 prints one JSON object
    python -m bench.gpu.speed --only 256 batch_1 --out bench/results/gpu.json
    python -m bench.gpu.speed --only code 7b_code --trace azure2023_code.csv
    python -m bench.gpu.speed --only start --shapes qwen3-0.6b

Every figure of a case is the median of --repeat runs through `LLM.generate`, after a first one.
Prompts share no prefix. bfloat16. `code`, `7b_code` and `30b_code` are the first requests of a
trace, all at once, prompts of at most 7,000 tokens and outputs of at most 400; they are left out
without --trace.
Two parts run only with --only:

start  seconds until an engine is ready, without and with compiled kernels in the cache. Every start
       is a process of its own. `process` counts from the start of the process, and `engine` from
       the constructor of LLM, after all imports. This process imports the same modules before, so
       that they are in the file cache
waits  how long the GPU waits for the host in the case `256`. The device records the time before and
       after every pass (a captured decode, or a mixed pass and its sampling). Between two passes it
       runs only small copies or waits, and all of this counts as waiting. The time before the first
       pass and after the last, when requests are added and results are made, counts as waiting too.
       The figure is therefore an upper bound for waiting between passes. Waiting inside a pass is
       not visible here. It can occur in large mixed passes, which are launched kernel by kernel, so
       the report has their time and the time of their arithmetic
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import roofline
from bench.harness import SHAPES, Bench, Figures, in_new_process, log, medians
from headway import LLM, SamplingParams
from headway.events import Completed, Event
from headway.lab.workload.files import read_workload
from headway.model.config import load_hf

Work = tuple[list[list[int]], list[int]]
bench = Bench(__doc__)


def dummy(shape: str, **options: Any) -> LLM:
    """An engine with random weights of this shape."""
    given: Figures = {"max_num_batched_tokens": 16384, **options}
    return LLM(str(SHAPES / shape), load_format="dummy", device="cuda", **given)


def count_builds(llm: LLM, builds: list[int]) -> None:
    """From now on, add the kernels that each step has to build to a list."""

    def observe(event: Event) -> None:
        if isinstance(event, Completed):
            builds.append(event.result.num_builds)

    llm.engine.observers.append(observe)


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
            raise RuntimeError(f"a request failed: {result.outputs[0].error}")
    return seconds


def timed(llm: LLM, work: Work, temperature: float, repeat: int) -> Figures:
    """The first run, and the median of the later ones."""
    first = run(llm, work, temperature)
    seconds = statistics.median(run(llm, work, temperature) for _ in range(repeat))
    prompts, outputs = work
    return {
        "first_seconds": first, "seconds": seconds,
        "output_tokens_per_second": sum(outputs) / seconds,
        "prompt_tokens_per_second": sum(map(len, prompts)) / seconds,
        "ms_per_token": 1e3 * seconds / sum(outputs),
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


def code_traffic(trace: Path | None, count: int) -> Work:
    """The lengths of the first requests of a trace, with random tokens."""
    if trace is None:
        raise ValueError("the requests of a trace need --trace FILE")
    source, requests = random.Random(0), read_workload(trace, limit=count)
    prompts = [
        [source.randint(0, 10000) for _ in range(min(each.num_prompt, MAX_PROMPT))]
        for each in requests
    ]
    return prompts, [min(each.num_output, MAX_OUTPUT) for each in requests]


MAX_PROMPT, MAX_OUTPUT = 7000, 400  # of a trace
MAX_LENGTHS = {
    "qwen3-0.6b": 33024, "qwen2.5-7b": 8192, "llama-8b": 4096, "qwen3-30b-a3b": 8192,
}  # fmt: skip
TRACED, NUM_LARGE_CODE = ("code", "7b_code", "30b_code"), 120
# Shape, work by --trace, and temperature; those of one shape after each other.
CASES: dict[str, tuple[str, Callable[[Path | None], Work], float]] = {
    "256": ("qwen3-0.6b", lambda _: roofline.field_lengths(256), 0.6),
    "256_greedy": ("qwen3-0.6b", lambda _: roofline.field_lengths(256), 0.0),
    "1024": ("qwen3-0.6b", lambda _: roofline.field_lengths(1024), 0.6),
    "16": ("qwen3-0.6b", lambda _: roofline.field_lengths(16), 0.6),
    "4": ("qwen3-0.6b", lambda _: fixed(4, 1000, 256), 0.6),
    "batch_1": ("qwen3-0.6b", lambda _: fixed(1, 16, 256), 0.6),
    "32k_prompt": ("qwen3-0.6b", lambda _: fixed(1, 32768, 1), 0.6),
    "code": ("qwen3-0.6b", partial(code_traffic, count=400), 0.6),
    "7b_128": ("qwen2.5-7b", lambda _: mixed_lengths(128), 0.6),
    "7b_batch_1": ("qwen2.5-7b", lambda _: fixed(1, 16, 256), 0.6),
    "7b_code": ("qwen2.5-7b", partial(code_traffic, count=NUM_LARGE_CODE), 0.6),
    "8b_64": ("llama-8b", lambda _: fixed(64, 1024, 256), 0.6),
    "8b_batch_1": ("llama-8b", lambda _: fixed(1, 16, 256), 0.6),
    "30b_code": ("qwen3-30b-a3b", partial(code_traffic, count=NUM_LARGE_CODE), 0.6),
}


class Loaded:
    """The model of the latest case, which the next case uses if it has the same shape."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.shape = ""
        self.builds: list[int] = []  # of all steps

    def use(self, shape: str, asked: Namespace) -> LLM:
        if self.llm is None or shape != self.shape:
            if self.llm:
                self.llm.close()
            self.llm = None
            gc.collect()
            torch.cuda.empty_cache()
            begun = time.perf_counter()
            self.llm = dummy(
                shape, max_num_batched_tokens=asked.max_num_batched_tokens,
                max_model_len=MAX_LENGTHS[shape], attention=asked.attention,
                block_size=asked.block_size,
            )  # fmt: skip
            bench.report[f"{shape}_start_seconds"] = time.perf_counter() - begun
            self.shape = shape
            count_builds(self.llm, self.builds)
        return self.llm


def measure(asked: Namespace, name: str) -> Figures:
    """A case, with the floor of its work."""
    ceilings = roofline.measured()
    bench.report |= asdict(ceilings)
    shape, work, temperature = CASES[name]
    given = work(asked.trace)
    found = timed(loaded.use(shape, asked), given, temperature, asked.repeat)
    bench.report["builds_after_start"] = sum(loaded.builds)
    lengths = [(len(p), o) for p, o in zip(*given, strict=True)]
    seconds = roofline.floor(load_hf(SHAPES / shape), lengths, ceilings).seconds
    found |= {"floor_seconds": seconds, "percent_of_floor": 100 * seconds / found["seconds"]}
    log(f"{name} {found}")
    return found


def start_here(shape: str) -> dict[str, float]:
    """Start an engine in this process: the seconds that it took."""
    begun = time.perf_counter()
    llm = dummy(shape, max_model_len=MAX_LENGTHS[shape])
    found = {"engine": time.perf_counter() - begun, "ended": time.time()}
    llm.close()
    return found


def start_with(shape: str, cache: str) -> dict[str, float]:
    """Start an engine in a new process, with compiled kernels in this folder."""
    begun = time.time()
    found = in_new_process(start_here, shape, TRITON_CACHE_DIR=cache)
    return {"process": found["ended"] - begun, "engine": found["engine"]}


@bench.part
def start(asked: Namespace) -> Figures:
    import triton  # noqa: F401

    report: Figures = {}
    for shape in asked.shapes:
        cold, warm = [], []
        for number in range(asked.repeat):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(start_with(shape, cache))
                warm.append(start_with(shape, cache))
            log(f"{shape} {number} without {cold[-1]} with {warm[-1]}")
        report[shape] = {"without_cache": medians(cold), "with_cache": medians(warm)}
    return report


class Passes:
    """Device events around the passes that go through a function."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any, Any]] = []

    def watched(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
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


@bench.part
def waits(_: Namespace) -> Figures:
    shape, work, temperature = CASES["256"]
    with dummy(shape, max_model_len=4096) as llm:
        plain = min(run(llm, work(None), temperature) for _ in range(2))
        passes, executor = Passes(), llm.executor
        executor.graphs.run = passes.watched("decodes", executor.graphs.run)
        executor._mixed = passes.watched("with prompts", executor._mixed)
        watched = run(llm, work(None), temperature)
        figures = passes.summary(watched)
    ceilings = roofline.measured()
    lengths = [(len(prompt), 1) for prompt in work(None)[0]]
    floor = roofline.floor(load_hf(SHAPES / shape), lengths, ceilings)
    return {
        "run_seconds": plain, "watched_run_seconds": watched,
        "prompts_floor_seconds": floor.seconds, **figures,
    }  # fmt: skip


def leave_out(asked: Namespace) -> Figures:
    """Parts that run only with --only, and without --trace the cases of one."""
    bench.on_demand = {"start", "waits", *(() if asked.trace else TRACED)}
    return {"max_num_batched_tokens": asked.max_num_batched_tokens}


if __name__ == "__main__":
    loaded = Loaded()
    bench.parts |= {name: partial(measure, name=name) for name in CASES}
    bench.option("--trace", type=Path, help="a .csv of requests, for the cases of code")
    bench.option("--repeat", type=int, default=3)
    bench.option("--attention", default="triton", help="as for `headway serve`")
    bench.option("--block-size", type=int, default=16)
    bench.option("--max-num-batched-tokens", type=int, default=16384)
    bench.option(
        "--shapes", nargs="+", choices=MAX_LENGTHS, default=["qwen3-0.6b", "qwen2.5-7b"],
        help="for start",
    )  # fmt: skip
    bench.main(start=leave_out)
