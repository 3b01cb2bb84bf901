"""What a load on a server came to, in the words of `vllm bench serve`.

Latencies are those of requests that completed, in milliseconds; ITL is the time between two pieces
of a stream, as a client sees it. Knows no server and no clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError
from headway.lab.loadgen.load import Outcome

Times = Mapping[str, npt.NDArray[np.float64]]  # milliseconds, by NAMES
NAMES = {
    "ttft": "time to first token", "tpot": "time per output token after it",
    "itl": "time between two tokens", "e2el": "end to end",
}  # fmt: skip
MARKS = ("mean", "median", "std", "p90", "p99")
OBJECTIVES = ("ttft", "tpot", "e2el")  # what a single request can be held to


def parse_goodput(text: str) -> dict[str, float]:
    """Milliseconds by name, from such as ttft:500,tpot:50; ConfigError for anything else."""
    limits = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, _, number = part.partition(":")
        if name not in OBJECTIVES or not re.fullmatch(r"\d+(\.\d*)?", number) or not float(number):
            raise ConfigError(
                f"goodput must be such as ttft:500,tpot:50 (milliseconds; {', '.join(OBJECTIVES)}), "
                f"not {text!r}"
            )
        limits[name] = float(number)
    return limits


def times_of(outcomes: Sequence[Outcome]) -> Times:
    """The latencies of requests that completed; all but itl have one for each of them.

    A request of one token has no tpot: it is given as nan.
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
    }


def _milliseconds(seconds: list[float]) -> npt.NDArray[np.float64]:
    return np.array(seconds, dtype=np.float64) * 1e3


def report(
    outcomes: Sequence[Outcome], most_open: int, goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Counts, rates and latencies of one load, with vLLM's keys."""
    times = times_of(outcomes)
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = sum(o.num_input for o in done), sum(o.num_output for o in done)
    seconds = duration(outcomes)
    good = None if not goodput else num_good(times, goodput) / seconds
    result = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "request_goodput": good,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": most_open,
        "p99_send_delay_ms": _mark(_milliseconds([o.sent - o.due for o in outcomes]), "p99"),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
    }
    return result | {
        f"{mark}_{name}_ms": _mark(times[name], mark) for name in NAMES for mark in MARKS
    }


def duration(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first request to the last token; never 0, as it divides."""
    ends = [outcome.last or outcome.sent for outcome in outcomes]
    return max(1e-9, max(ends) - min(o.sent for o in outcomes)) if outcomes else 1e-9


def num_good(times: Times, limits: Mapping[str, float]) -> int:
    """Requests that met every objective; one that a request has no value for is met."""
    fine = np.ones(len(times["ttft"]), dtype=bool)
    for name, limit in limits.items():
        fine &= ~(times[name] > limit)
    return int(fine.sum())


def _mark(values: npt.NDArray[np.float64], mark: str) -> float:
    """0.0 where there are none, as in vLLM."""
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0
    if mark in ("mean", "std"):
        return float(values.mean() if mark == "mean" else values.std())
    return float(np.percentile(values, 50 if mark == "median" else float(mark[1:])))
