"""Scheduling on a GPU with random weights: gaps during long prompts, and swap or recompute.

    python -m bench.gpu.schedule                          prints one JSON object
    python -m bench.gpu.schedule --only swap --out bench/results/gpu_schedule.json
    python -m bench.gpu.schedule --device cpu --tiny      runs all parts in seconds, as a test

gaps: requests decode while long prompts arrive, each after the one before has finished. For every
--max-num-batched-tokens, the time between tokens of the decoding requests, and the time to first
token of the long ones.

swap: for every context, the time to copy its blocks out and in and to compute its last token (as
for a request that is swapped in), and the time to recompute all its tokens, each on an idle device;
which is less; and which the rule `swap_if_cheaper` picks with the costs measured when the model was
loaded.
For another --max-num-batched-tokens than the model's, the costs are measured again.

profile: `headway bench profile`, and its error by kind of step; --log writes all steps.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from bench.harness import SHAPES, Bench, Figures
from headway import LLM, Engine, Scheduler
from headway.engine.gc_freeze import gc_freeze
from headway.events import Completed, Event
from headway.executor.gpu.costs import measured, recompute_seconds, resume_seconds, swap_seconds
from headway.lab.cost import Profile
from headway.lab.loadgen.requests import random_prompt
from headway.lab.profiling.calibration import make_calibration
from headway.lab.profiling.fit import observations, predict
from headway.lab.real.profiling import CALIBRATIONS, Logs, copy_blocks, fit_profile, run
from headway.request import Request, RequestParams
from headway.scheduler.policies.swap import swap_if_cheaper

LIMIT_MS = 25.0  # the goal for the longest gap
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """In tokens, unless noted."""

    num_running: int  # requests
    context: int  # of each running request when the first long prompt arrives
    long: int
    num_long: int  # requests
    budgets: tuple[int, ...]  # max_num_batched_tokens
    contexts: tuple[int, ...]  # swapped or recomputed


FULL = Sizes(num_running=128, context=500, long=32768, num_long=4, budgets=(512, 1024, 2048, 8192),
             contexts=(256, 1024, 2048, 4096, 8192, 16384, 32768))  # fmt: skip
SMALL = Sizes(num_running=3, context=20, long=200, num_long=2, budgets=(16, 64), contexts=(16, 256))


class Watch:
    """An observer of the times of tokens."""

    def __init__(self) -> None:
        self.first_tokens: dict[str, float] = {}
        self.gaps: list[float] = []  # of all decoding requests, including long ones
        self._latest: dict[Request, float] = {}

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Completed):
            return
        now, latest = event.result.ended, self._latest
        for request, _ in event.outputs():
            if request in latest:
                self.gaps.append(now - latest[request])
            else:
                self.first_tokens[request.id] = now
            latest[request] = now


class Stage:
    """A separate engine over a loaded model: empty cache, no running requests."""

    def __init__(self, llm: LLM, budget: int) -> None:
        self.watch, self.clock = Watch(), llm.engine.clock
        config = replace(llm.config, max_num_batched_tokens=budget)
        self.engine = Engine(
            Scheduler(config), llm.executor, self.clock,
            async_scheduling=llm.engine.async_scheduling, observers=[self.watch],
        )  # fmt: skip

    def ask(self, name: str, prompt: list[int], num_output: int) -> None:
        self.engine.add(name, prompt, RequestParams(max_tokens=num_output))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.engine.step()
            if self.engine.fault:
                raise RuntimeError(self.engine.fault)

    def interrupt(self, name: str, prompt: list[int]) -> tuple[float, list[float]]:
        """Run one more request: its time to first token, and all gaps meanwhile."""
        self.watch.gaps = []
        begun = self.clock.now()
        self.ask(name, prompt, 16)
        self.run_until(lambda: name not in self.engine.scheduler.requests)
        return self.watch.first_tokens[name] - begun, self.watch.gaps


def gaps(llm: LLM, sizes: Sizes, budget: int) -> Figures:
    """The figures for one step budget."""
    stage, source = Stage(llm, budget), random.Random(0)
    vocab_size = llm.loaded.decoder.config.vocab_size
    room = llm.config.max_model_len - sizes.context
    prompts = [random_prompt(source, sizes.long, vocab_size) for _ in range(sizes.num_long)]
    with gc_freeze():  # as in a server
        for number in range(sizes.num_running):
            prompt = random_prompt(source, sizes.context, vocab_size)
            stage.ask(f"running {number}", prompt, min(2048, room))
        stage.run_until(lambda: len(stage.watch.first_tokens) == sizes.num_running)
        interrupted = [
            stage.interrupt(f"long {number}", prompt) for number, prompt in enumerate(prompts)
        ]
    for name in list(stage.engine.scheduler.requests):
        stage.engine.abort(name)
    stage.engine.run()
    found = 1e3 * np.concatenate([seen for _, seen in interrupted])
    return {
        "max_num_batched_tokens": budget, "worst_gap_ms": float(found.max()),
        "p99_gap_ms": float(np.quantile(found, 0.99)), "p50_gap_ms": float(np.median(found)),
        "ttft_of_long_ms": [1e3 * seconds for seconds, _ in interrupted],
        "is_under_limit": bool(found.max() < LIMIT_MS),
    }  # fmt: skip


@dataclass(frozen=True)
class Alone:
    """A scheduler view in which requests share no blocks, for the swap rule."""

    block_size: int

    def num_private_blocks(self, request: Request) -> int:
        return -(-request.num_computed // self.block_size)


def swap_row(llm: LLM, rule: swap_if_cheaper, num_tokens: int, budget: int) -> Figures:
    """The times for one context, the faster way, and the rule's choice."""
    config, executor = replace(llm.config, max_num_batched_tokens=budget), llm.executor
    request = Request("probe", [0] * num_tokens, RequestParams())
    request.computed_base = num_tokens
    view: Any = Alone(config.block_size)
    copies = swap_seconds(executor, view.num_private_blocks(request))
    again = recompute_seconds(executor, config, num_tokens)
    last = resume_seconds(executor, config, num_tokens)
    faster = "swap" if copies + last < again else "recompute"
    picked = "swap" if rule(request, view) else "recompute"
    return {
        "tokens": num_tokens, "out_and_in_ms": 1e3 * copies, "last_token_ms": 1e3 * last,
        "recompute_ms": 1e3 * again, "faster": faster, "picked": picked,
        "is_right": faster == picked, "swap_share": (copies + last) / again,
    }  # fmt: skip


def swap(llm: LLM, sizes: Sizes, budget: int) -> Figures:
    """All contexts, with the loaded model's rule or, for another budget, a newly measured one."""
    config = replace(llm.config, max_num_batched_tokens=budget)
    rule: Any = llm.config.swap
    if budget != llm.config.max_num_batched_tokens:
        rule = swap_if_cheaper(**measured(llm.executor, config)._asdict())
    most = min(config.max_model_len, config.num_blocks * config.block_size,
               config.num_host_blocks * config.block_size)  # fmt: skip
    rows = [swap_row(llm, rule, n, budget) for n in sizes.contexts if n <= most]
    llm.reset_cache()  # the blocks were overwritten
    return {
        "max_num_batched_tokens": budget, "rule": repr(rule),
        "wrong": [row["tokens"] for row in rows if not row["is_right"]], "rows": rows,
    }  # fmt: skip


def profiled(llm: LLM, *, is_quick: bool, log: Path | None) -> Figures:
    """Measure, fit and compare; writes all steps to the file `log` as JSON lines."""
    kv_tokens = llm.config.num_blocks * llm.config.block_size
    spec = CALIBRATIONS[llm.loaded.is_on_gpu, is_quick]
    logs = run(llm, make_calibration(min(llm.config.max_model_len, kv_tokens), spec))
    copies = copy_blocks(llm)
    if log:
        kinds = {**logs._asdict(), "copies": copies}
        log.write_text("".join(
            json.dumps({"kind": kind, **to_builtins(line)}) + "\n" for kind, lines in kinds.items() for line in lines
        ))  # fmt: skip
    found, error, warnings = fit_profile(llm, "bench", logs, copies)
    return {
        "held_out": error._asdict(), "warnings": warnings, "profile": asdict(found),
        "error_by_kind": error_by_kind(logs, found),
    }  # fmt: skip


def error_by_kind(logs: Logs, found: Profile) -> dict[str, Figures]:
    """For each kind of step: number, total seconds, and the median of predicted / measured - 1."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for part in ("fitted", "held_out"):
        seen = observations(getattr(logs, part))
        plain = seen.select(seen.is_plain)
        tokens, samples, *_ = plain.passes.T
        for count, is_decode, seconds, predicted in zip(
            tokens, tokens == samples, plain.seconds, predict(found, plain), strict=True
        ):
            size = 2 ** int(np.ceil(np.log2(count)))
            what = "decodes" if is_decode else "tokens, with prompts"
            kinds.setdefault(f"{part}: up to {size:5} {what}", []).append((seconds, predicted))
    return {
        kind: {
            "steps": len(pairs), "seconds": sum(seconds for seconds, _ in pairs),
            "median_error": float(np.median([predicted / seconds - 1 for seconds, predicted in pairs])),
        }
        for kind, pairs in sorted(kinds.items())
    }  # fmt: skip


@cache
def load(device: str, is_tiny: bool) -> LLM:
    if not is_tiny:
        return LLM(
            str(SHAPES / "qwen3-0.6b"), load_format="dummy", device=device,
            max_num_batched_tokens=8192, max_model_len=33792, num_host_blocks=2112,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        return LLM(folder, load_format="dummy", device=device, threads=1, max_num_seqs=16,
                   kv_memory="1MiB", num_host_blocks=32)  # fmt: skip


def given(asked: Namespace) -> tuple[LLM, Sizes, list[int]]:
    """The model, sizes and step budgets."""
    sizes = SMALL if asked.tiny else FULL
    budgets = list(asked.max_num_batched_tokens or sizes.budgets)
    return load(asked.device, asked.tiny), sizes, budgets


def all_gaps(asked: Namespace) -> list[Figures]:
    llm, sizes, budgets = given(asked)
    return [gaps(llm, sizes, budget) for budget in budgets]


def all_swaps(asked: Namespace) -> list[Figures]:
    llm, sizes, budgets = given(asked)
    ends = (budgets[0], budgets[-1]) if len(budgets) > 1 else budgets
    return [swap(llm, sizes, budget) for budget in ends]


def profile(asked: Namespace) -> Figures:
    llm, *_ = given(asked)
    return profiled(llm, is_quick=asked.quick or asked.tiny, log=asked.log)


def start(asked: Namespace) -> Figures:
    begun = time.perf_counter()
    llm, *_ = given(asked)
    return {
        "device": llm.loaded.device, "limit_ms": LIMIT_MS,
        "start_seconds": time.perf_counter() - begun, "swap_rule": repr(llm.config.swap),
    }  # fmt: skip


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--max-num-batched-tokens", nargs="+", type=int, help="step budgets to try")
    bench.option("--device", default="cuda")
    bench.option("--tiny", action="store_true", help="use a tiny model and few requests")
    bench.option("--quick", action="store_true", help="make a shorter profile")
    bench.option("--log", type=Path, help="write the profile's steps here, one JSON per line")
    bench.parts = {"gaps": all_gaps, "swap": all_swaps, "profile": profile}
    bench.main(start=start)
