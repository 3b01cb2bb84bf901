"""The types of the KV cache on this CPU: size, speed and perplexity.

    python -m bench.cpu.kv_cache                                  prints one JSON object
    python -m bench.cpu.kv_cache --quantization int8 --batch 8 --prompt-len 1024

token_bytes  keys and values of one token in all layers
prefill      prompt tok/s of the steps with prompts
decode       tok/s of all other steps
attention_ms, rotation_ms   parts of these; the rotation stores keys and values
perplexity   of the first 1,500 tokens of the licence's text, as in bench/cpu/compare.py
Both types run in this process in alternating order; speeds are medians over the rounds.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections import Counter
from time import perf_counter

import torch

from bench.cpu.compare import NUM_SCORED, licence_tokens, nll, run_headway
from bench.cpu.peers import Rates
from bench.harness import Bench, Figures, medians
from headway import LLM, Completed
from headway.events import Event
from headway.executor.cpu import CpuExecutor
from headway.model.backends.native.backend import PARTS, NativeBackend
from headway.model.registry import resolve

TYPES = {"float32": "auto", "int8": "int8"}  # by the value of kv_cache_dtype


class Subject:
    """The model with one type of KV cache, and the time of its steps."""

    def __init__(self, kv_cache_dtype: str, options: Namespace) -> None:
        length = options.prompt_len + options.output_len
        self.llm = LLM(
            options.model, device="cpu", quantization=options.quantization,
            kv_cache_dtype=kv_cache_dtype, threads=options.threads, max_num_seqs=options.batch,
            num_blocks=-(-max(length * options.batch, NUM_SCORED + 1) // 16) + options.batch,
            block_size=16, observers=[self._observe],
        )  # fmt: skip
        backend = self.llm.loaded.decoder.backend
        assert isinstance(backend, NativeBackend), f"{backend.name} is not the native kernels"
        self._times = backend.times = torch.zeros(len(PARTS), dtype=torch.int64)
        executor = self.llm.executor
        assert isinstance(executor, CpuExecutor)
        executor.device_blocks.zero_()  # the system provides memory when it is first used
        self._spent: dict[str, Counter[str]] = {}
        self._last, self.rounds = 0.0, list[Rates]()

    def _observe(self, event: Event) -> None:
        """Add the time since the last step to the steps with or without prompts."""
        if not isinstance(event, Completed):
            return
        plan, now = event.plan, perf_counter()
        inside = dict(zip(PARTS, (self._times / 1e6).tolist(), strict=True))
        self._times.zero_()
        num_tokens = sum(c.end - c.start for c in plan.chunks) or len(plan.decodes)
        figures = {"steps": 1, "tokens": num_tokens, "seconds": now - self._last, **inside}
        self._spent.setdefault("prefill" if plan.chunks else "decode", Counter()).update(figures)
        self._last = now

    def measure(self, prompts: list[list[int]], num_output: int) -> None:
        """Run one round from an empty prefix cache."""
        self._spent, self._last = {}, perf_counter()
        run_headway(self.llm, prompts, [num_output] * len(prompts))
        found = {name: each["tokens"] / each["seconds"] for name, each in self._spent.items()}
        decode = self._spent["decode"]
        parts = {f"{name}_ms": decode[name] / decode["steps"] for name in ("attention", "rotation")}
        self.rounds.append(found | parts)

    def report(self, scored: list[int]) -> Figures:
        loaded = self.llm.loaded
        num_tokens = loaded.config.num_blocks * loaded.config.block_size
        return {
            "token_bytes": loaded.kv_bytes // num_tokens,
            **{name: round(value, 2) for name, value in medians(self.rounds).items()},
            "perplexity": round(math.exp(nll(self.llm, scored)), 4),
        }


def measure(options: Namespace) -> Figures:
    subjects = {name: Subject(value, options) for name, value in TYPES.items()}
    text = licence_tokens(resolve(options.model))
    starts = range(0, 61 * options.batch, 61)
    prompts = [(text * 2)[start : start + options.prompt_len] for start in starts]
    for number in range(options.rounds):
        for subject in list(subjects.values())[:: 1 if number % 2 == 0 else -1]:
            subject.measure(prompts, options.output_len)
    found = {name: each.report(text[:NUM_SCORED]) for name, each in subjects.items()}
    wide, narrow = found["float32"], found["int8"]
    cost = 100 * (narrow["perplexity"] / wide["perplexity"] - 1)
    names = ("model", "quantization", "batch", "prompt_len", "output_len")
    setting = {name: getattr(options, name) for name in names}
    ratios = {
        "tokens in the same memory": round(wide["token_bytes"] / narrow["token_bytes"], 3),
        "decode": round(narrow["decode"] / wide["decode"], 3),
        "perplexity_cost_percent": round(cost, 3),
    }
    return {**setting, **found, "int8 against float32": ratios}


if __name__ == "__main__":
    bench = Bench(__doc__)
    bench.option("--model", default="smollm2-135m", help="name or path")
    bench.option("--quantization", default="none", help="of the weights")
    bench.option("--batch", type=int, default=32, help="requests at a time")
    bench.option("--prompt-len", type=int, default=128, help="tokens of a prompt")
    bench.option("--output-len", type=int, default=128, help="tokens of an output")
    bench.option("--rounds", type=int, default=3)
    bench.option("--threads", type=int, default=os.cpu_count())
    bench.main(measure)
