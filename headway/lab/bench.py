"""What a benchmark gives a model, and what it reports: lengths, random prompts, results.

The results' names are those of `vllm bench throughput`, `latency` and `serve`, so that numbers
can be laid side by side. Knows no model and no clock.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.observe.run_stats import RunStats, percentiles
from headway.observe.timeline import RequestTimes

PERCENTAGES = (10, 25, 50, 75, 90, 99)
MARKS = {"mean": "mean", "median": "p50", "p99": "p99"}  # their names, and ours


class Span(NamedTuple):
    """Lengths from `low` to `high`, each as likely as the others."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


def parse_span(name: str, text: str) -> Span:
    """128, or 100-1024; ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    span = Span(int(match[1]), int(match[2] or match[1])) if match else Span(0, 0)
    if not 1 <= span.low <= span.high:
        raise ConfigError(
            f"{name} must be a length such as 128 or a range such as 100-1024: {text!r}"
        )
    return span


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    """Tokens drawn alike from the whole vocabulary: no two such prompts share a block."""
    return [source.randrange(vocab_size) for _ in range(length)]


def throughput(metrics: RunStats, seconds: float) -> dict[str, Any]:
    """How much was done in so many seconds, and how long each request waited for what."""
    lives = metrics.requests
    num_input, num_output = metrics.totals["prompt_tokens"], metrics.totals["output_tokens"]
    num_tokens = num_input + num_output
    result = {
        "elapsed_time": seconds,
        "num_requests": len(lives),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(lives) / seconds,
        "tokens_per_second": num_tokens / seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(lives) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": num_tokens / seconds,
    }
    return result | _latencies(metrics, lives)


def _latencies(metrics: RunStats, lives: Sequence[RequestTimes]) -> dict[str, float]:
    """Milliseconds: to the first token, per token after it, between two, and in all."""
    gaps = {"mean": metrics.mean_gap()} | {f"p{p}": metrics.gap_percentile(p) for p in (50, 99)}
    times = {
        "ttft": percentiles(life.first_token - life.arrival for life in lives),
        "tpot": percentiles(
            (life.finished - life.first_token) / (life.num_output - 1)
            for life in lives
            if life.num_output > 1
        ),
        "itl": gaps,
        "e2el": percentiles(life.finished - life.arrival for life in lives),
    }
    return {
        f"{mark}_{name}_ms": marks[ours] * 1e3
        for name, marks in times.items()
        for mark, ours in MARKS.items()
    }


def latency(seconds: Sequence[float]) -> dict[str, Any]:
    """How long batches took."""
    marks = np.percentile(seconds, PERCENTAGES).tolist()
    return {
        "avg_latency": float(np.mean(seconds)),
        "latencies": list(seconds),
        "percentiles": dict(zip(map(str, PERCENTAGES), marks, strict=True)),
    }
