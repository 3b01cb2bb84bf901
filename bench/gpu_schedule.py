"""Scheduling on a GPU with random weights: gaps during long prompts, and swap or recompute.

    python bench/gpu_schedule.py                          prints one JSON object
    python bench/gpu_schedule.py --only swap --out bench/results/gpu_schedule.json
    python bench/gpu_schedule.py --device cpu --tiny      runs all parts in seconds, as a test

gaps: requests decode while long prompts arrive, each after the one before has finished. For every
--max-num-batched-tokens, the time between tokens of the decoding requests, and the time to first
token of the long ones.

swap: for every context, the time to copy its blocks out and in and to compute its last token (as
for a request that is swapped in), and the time to recompute all its tokens, each on an idle device;
which is less; and which the rule `swap_if_cheaper` picks with the costs measured when the model was
loaded.
For another --max-num-batched-tokens than the model's, the costs are measured again.

profile: `headway profile`, and its error by kind of step; --log writes all events.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profiled import profiled

from headway import LLM
from headway.engine.engine import Engine
from headway.engine.gc_freeze import gc_freeze
from headway.events import Completed, Event
from headway.executor.gpu.swap_cost import measured, recompute_seconds, resume_seconds, swap_seconds
from headway.lab.loadgen.requests import random_prompt
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler
from headway.scheduler.policies.swap import swap_if_cheaper

SHAPES = Path(__file__).parent / "shapes"
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


def gaps(llm: LLM, sizes: Sizes, budget: int) -> dict[str, Any]:
    """The figures for one step budget."""
    stage, source = Stage(llm, budget), random.Random(0)
    vocab_size, room = (
        llm.loaded.decoder.config.vocab_size,
        llm.config.max_model_len - sizes.context,
    )
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


def swap_row(llm: LLM, rule: swap_if_cheaper, num_tokens: int, budget: int) -> dict[str, Any]:
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


def swap(llm: LLM, sizes: Sizes, budget: int) -> dict[str, Any]:
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


def load(device: str, *, is_tiny: bool) -> LLM:
    if not is_tiny:
        return LLM(
            str(SHAPES / "qwen3-0.6b"), load_format="dummy", device=device,
            max_num_batched_tokens=8192, max_model_len=33792, num_host_blocks=2112,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        return LLM(folder, load_format="dummy", device=device, threads=1, max_num_seqs=16,
                   kv_memory="1MiB", num_host_blocks=32)  # fmt: skip


def parts(llm: LLM, asked: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    sizes = SMALL if asked.tiny else FULL
    budgets = tuple(asked.max_num_batched_tokens or sizes.budgets)
    ends = (budgets[0], budgets[-1]) if len(budgets) > 1 else budgets
    return {
        "gaps": lambda: [gaps(llm, sizes, budget) for budget in budgets],
        "swap": lambda: [swap(llm, sizes, budget) for budget in ends],
        "profile": lambda: profiled(llm, is_quick=asked.quick or asked.tiny, log=asked.log),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=["gaps", "swap", "profile"])
    parser.add_argument("--max-num-batched-tokens", nargs="+", type=int, help="step budgets to try")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and few requests")
    parser.add_argument("--quick", action="store_true", help="make a shorter profile")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument(
        "--log", type=Path, help="write the profile's events here, one JSON per line"
    )
    asked = parser.parse_args()
    begun = time.perf_counter()
    llm = load(asked.device, is_tiny=asked.tiny)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {
        "device": llm.loaded.device, "commit": commit.stdout.strip(), "limit_ms": LIMIT_MS,
        "start_seconds": time.perf_counter() - begun, "swap_rule": repr(llm.config.swap),
    }  # fmt: skip
    for name, part in parts(llm, asked).items():
        if asked.only and name not in asked.only:
            continue
        begun = time.perf_counter()
        try:
            report[name] = part()
        except Exception as error:  # still run the other parts
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
