"""The types of the KV cache on this CPU: size, speed and perplexity.

    python bench/cpu_kv_cache.py                                  prints one JSON object
    python bench/cpu_kv_cache.py --quantization int8 --batch 8 --prompt-len 1024

token_bytes  keys and values of one token in all layers
prefill      prompt tok/s of the steps with prompts
decode       tok/s of all other steps
attention_ms, rotation_ms   parts of these; the rotation stores keys and values
perplexity   of the first 1,500 tokens of the licence's text, as in bench/cpu_compare.py
Both types run in this process in alternating order; speeds are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch
from cpu_compare import NUM_SCORED, nll, run_headway
from cpu_peers import Rates

from headway import LLM
from headway.events import Completed, Event
from headway.executor.cpu import CpuExecutor
from headway.model.backends.native.backend import PARTS, NativeBackend

TYPES = {"float32": "auto", "int8": "int8"}  # by the value of kv_cache_dtype


class Subject:
    """The model with one type of KV cache, and the time of its steps."""

    def __init__(self, kv_cache_dtype: str, options: argparse.Namespace) -> None:
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
        num_tokens = plan.num_prefill or len(plan.decodes)
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

    def report(self, scored: list[int]) -> dict[str, Any]:
        loaded = self.llm.loaded
        num_tokens = loaded.config.num_blocks * loaded.config.block_size
        names = self.rounds[0]
        medians = {name: statistics.median(each[name] for each in self.rounds) for name in names}
        return {
            "token_bytes": loaded.kv_bytes // num_tokens,
            **{name: round(value, 2) for name, value in medians.items()},
            "perplexity": round(math.exp(nll(self.llm, scored)), 4),
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or path")
    parser.add_argument("--quantization", default="none", help="of the weights")
    parser.add_argument("--batch", type=int, default=32, help="requests at a time")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    options = parse()
    subjects = {name: Subject(value, options) for name, value in TYPES.items()}
    tokenizer = subjects["int8"].llm.tokenizer
    assert tokenizer is not None, "the model has a tokenizer"
    text = tokenizer.encode((HERE.parent / "LICENSE").read_text())
    starts = range(0, 61 * options.batch, 61)
    prompts = [(text * 2)[start : start + options.prompt_len] for start in starts]
    for number in range(options.rounds):
        for subject in list(subjects.values())[:: 1 if number % 2 == 0 else -1]:
            subject.measure(prompts, options.output_len)
    found = {name: each.report(text[:NUM_SCORED]) for name, each in subjects.items()}
    wide, narrow = found["float32"], found["int8"]
    cost = 100 * (narrow["perplexity"] / wide["perplexity"] - 1)
    setting = {name: getattr(options, name) for name in ("model", "quantization", "batch")}
    lengths = {"prompt_len": options.prompt_len, "output_len": options.output_len}
    ratios = {
        "tokens in the same memory": round(wide["token_bytes"] / narrow["token_bytes"], 3),
        "decode": round(narrow["decode"] / wide["decode"], 3),
        "perplexity_cost_percent": round(cost, 3),
    }
    print(json.dumps({**setting, **lengths, **found, "int8 against float32": ratios}, indent=2))


if __name__ == "__main__":
    main()
