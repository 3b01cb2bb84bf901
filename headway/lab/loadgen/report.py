"""Benchmark reports with the keys of `vllm bench throughput`, `latency` and `serve`.

Latencies are milliseconds, of requests that completed. For a server, ITL is the time between two
pieces of a stream, as a client sees it, and the stall of a request is its longest ITL.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.lab.loadgen.load import Outcome
from headway.record.stats import RunStats, by_prompt_length, percentiles
from headway.record.timeline import RequestTimeline

Times = Mapping[str, npt.NDArray[np.float64]]  # milliseconds, by keys of LATENCIES
LATENCIES = {
    "ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
    "e2el": "end-to-end latency", "stall": "longest stall of a request",
}  # fmt: skip
STATISTICS = ("mean", "median", "std", "p90", "p99", "p99.9", "max")
# Of an engine, and their keys in RunStats.
ENGINE_STATISTICS = {n: "p50" if n == "median" else n for n in STATISTICS if n != "std"}
PERCENTAGES = (10, 25, 50, 75, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")  # latencies that a single request has


@dataclass(frozen=True, kw_only=True)
class Report:
    """Latencies by keys such as p99_ttft_ms, and the TTFT by class of prompt length."""

    latencies: dict[str, float]
    ttft_by_prompt: list[dict[str, float]]

    def as_json(self) -> dict[str, object]:
        """All values in one object."""
        return {k: v for k, v in {**vars(self), **self.latencies}.items() if k != "latencies"}


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """One load on a server."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    p99_send_delay_ms: float
    errors: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ThroughputReport(Report):
    """An offline run."""

    elapsed_time: float
    num_requests: int
    total_num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_token_throughput: float


class BatchLatencies(TypedDict):
    """Durations of batches in seconds; percentiles by their number."""

    avg_latency: float
    latencies: list[float]
    percentiles: dict[str, float]


def parse_goodput(text: str) -> dict[str, float]:
    """Parse objectives in milliseconds such as ttft:500,tpot:50; ConfigError if invalid."""
    limits = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, _, number = part.partition(":")
        if name not in OBJECTIVES or not re.fullmatch(r"\d+(\.\d*)?", number) or not float(number):
            raise ConfigError(
                f"goodput must look like ttft:500,tpot:50 (milliseconds; {', '.join(OBJECTIVES)}), "
                f"not {text!r}"
            )
        limits[name] = float(number)
    return limits


def times_of(outcomes: Sequence[Outcome]) -> Times:
    """The latencies of completed requests; all but itl have one value per request.

    The tpot and the stall of a request with one token are nan.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    gaps = [np.frombuffer(outcome.gaps) for outcome in done if outcome.gaps]
    return {
        "ttft": _milliseconds([o.first - o.sent for o in done]),
        "tpot": _milliseconds(
            [(o.last - o.first) / (o.num_output - 1) if o.num_output > 1 else np.nan for o in done]
        ),
        "itl": np.concatenate(gaps) * 1e3 if gaps else np.zeros(0),
        "e2el": _milliseconds([o.last - o.sent for o in done]),
        "stall": _milliseconds([max(o.gaps, default=np.nan) for o in done]),
    }


def _milliseconds(seconds: list[float]) -> npt.NDArray[np.float64]:
    return np.array(seconds, dtype=np.float64) * 1e3


def report(
    outcomes: Sequence[Outcome], max_concurrency: int, goodput: Mapping[str, float] | None = None
) -> LoadReport:
    """Counts, rates and latencies of one load on a server."""
    times = times_of(outcomes)
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = sum(o.num_input for o in done), sum(o.num_output for o in done)
    seconds = duration(outcomes)
    return LoadReport(
        duration=seconds,
        completed=len(done),
        failed=len(outcomes) - len(done),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(done) / seconds,
        request_goodput=None if not goodput else num_good(times, goodput) / seconds,
        output_throughput=num_output / seconds,
        total_token_throughput=(num_input + num_output) / seconds,
        max_concurrent_requests=max_concurrency,
        p99_send_delay_ms=_statistic(_milliseconds([o.sent - o.due for o in outcomes]), "p99"),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        latencies={
            f"{name}_{key}_ms": _statistic(times[key], name)
            for key in LATENCIES
            for name in STATISTICS
        },
        ttft_by_prompt=_by_prompt((outcome.num_input for outcome in done), times["ttft"]),
    )


def _by_prompt(lengths: Iterable[int], ttft: Iterable[float]) -> list[dict[str, float]]:
    """TTFT in milliseconds by class of prompt length, [from, to)."""
    return [
        {"from": shortest, "to": end, "requests": len(values)}
        | {f"{name}_ttft_ms": _statistic(np.array(values), name) for name in STATISTICS}
        for shortest, end, values in by_prompt_length(zip(lengths, ttft, strict=True))
    ]


def duration(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first request to the last token; never 0, because it is a divisor."""
    ends = [outcome.last or outcome.sent for outcome in outcomes]
    return max(1e-9, max(ends) - min(o.sent for o in outcomes)) if outcomes else 1e-9


def num_good(times: Times, limits: Mapping[str, float]) -> int:
    """Requests that meet every objective; a request without a value meets it."""
    is_good = np.ones(len(times["ttft"]), dtype=bool)
    for name, limit in limits.items():
        is_good &= ~(times[name] > limit)
    return int(is_good.sum())


def _statistic(values: npt.NDArray[np.float64], name: str) -> float:
    """0.0 without values, as in vLLM."""
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0
    if name in ("mean", "std", "max"):
        return float(getattr(values, name)())
    return float(np.percentile(values, 50 if name == "median" else float(name[1:])))


def throughput(metrics: RunStats, seconds: float) -> ThroughputReport:
    """Counts, rates and latencies of an offline run that took `seconds`."""
    requests = metrics.requests
    num_input, num_output = metrics.totals["prompt_tokens"], metrics.totals["output_tokens"]
    num_tokens = num_input + num_output
    ttft = (1e3 * (request.first_token - request.arrival) for request in requests)
    return ThroughputReport(
        elapsed_time=seconds,
        num_requests=len(requests),
        total_num_tokens=num_tokens,
        requests_per_second=len(requests) / seconds,
        tokens_per_second=num_tokens / seconds,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(requests) / seconds,
        input_throughput=num_input / seconds,
        output_throughput=num_output / seconds,
        total_token_throughput=num_tokens / seconds,
        latencies=_latencies(metrics, requests),
        ttft_by_prompt=_by_prompt((request.num_prompt for request in requests), ttft),
    )


def _latencies(metrics: RunStats, requests: Sequence[RequestTimeline]) -> dict[str, float]:
    times = {
        "ttft": percentiles(request.first_token - request.arrival for request in requests),
        "tpot": percentiles(
            (request.finished - request.first_token) / (request.num_output - 1)
            for request in requests
            if request.num_output > 1
        ),
        "itl": metrics.gaps(),
        "e2el": percentiles(request.finished - request.arrival for request in requests),
        "stall": percentiles(metrics.longest_stalls()),
    }
    return {
        f"{name}_{key}_ms": values[ours] * 1e3
        for key, values in times.items()
        for name, ours in ENGINE_STATISTICS.items()
    }


def latency(seconds: Sequence[float]) -> BatchLatencies:
    """Mean and percentiles of the durations of batches."""
    values = np.percentile(seconds, PERCENTAGES).tolist()
    return {
        "avg_latency": float(np.mean(seconds)),
        "latencies": list(seconds),
        "percentiles": dict(zip(map(str, PERCENTAGES), values, strict=True)),
    }
