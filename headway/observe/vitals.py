"""What to watch on a running server: a few values, each with its healthy range.

docs/metrics.md explains them. The live page, `headway top` and `GET /doctor` show the same list. The
doctor (headway/lab/doctor/diagnose.py) uses the same limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.config import Config

MAX_WAITING = 5  # requests
MIN_RUNNING = 0.5  # share of max_num_seqs, while requests wait
MAX_PREEMPTIONS = 1  # per second
MAX_RECOMPUTE_TAX = 0.05
MIN_TOKENS = 0.1  # of a step, share of its budget, while requests wait
MAX_PREFILL_SHARE = 0.8
MAX_P99_STALL, MAX_STALL = 0.2, 1.0  # seconds
MAX_SWAP_IN = 0.02  # seconds


class Vital(NamedTuple):
    """One value; None if there is nothing to measure, which is healthy."""

    name: str
    value: float | None
    unit: str  # "", "/s", "s", or "%" for a share from 0 to 1
    healthy: str
    is_healthy: bool


def vitals(
    config: Config, running: int, waiting: int, minute: Mapping[str, float | None]
) -> list[Vital]:
    """The values now, and those of a snapshot's last minute. A full server is not unhealthy."""
    is_loaded = waiting >= 1
    preemptions, stall = minute["preemptions_per_second"] or 0.0, minute["p99_stall"]
    max_stall = minute["max_itl"]
    tokens, prefill = minute["tokens_per_step"], minute["prefill_share"]
    tax, swap_in = minute["recompute_tax"], minute["swap_in"]
    budget, limit = config.max_num_batched_tokens, config.max_num_seqs
    return [
        Vital("waiting requests", waiting, "", f"0-{MAX_WAITING}", waiting <= MAX_WAITING),
        Vital(
            "running requests", running, "", f"near {limit} (max_num_seqs) while requests wait",
            not is_loaded or running >= MIN_RUNNING * limit,
        ),
        Vital(
            "preemptions", preemptions, "/s", f"0-{MAX_PREEMPTIONS}",
            preemptions <= MAX_PREEMPTIONS,
        ),
        Vital(
            "recompute tax", tax, "%", f"under {100 * MAX_RECOMPUTE_TAX:g} %",
            (tax or 0) <= MAX_RECOMPUTE_TAX,
        ),
        Vital(
            "tokens per step", tokens, "", f"up to {budget} (the budget) while requests wait",
            not is_loaded or tokens is None or tokens >= MIN_TOKENS * budget,
        ),
        Vital(
            "prefill share", prefill, "%", f"20-40 %, at most {100 * MAX_PREFILL_SHARE:g} %",
            (prefill or 0) <= MAX_PREFILL_SHARE,
        ),
        Vital(
            "longest stall, p99", stall, "s", f"under {1e3 * MAX_P99_STALL:g} ms",
            (stall or 0) < MAX_P99_STALL,
        ),
        Vital(
            "longest stall, max", max_stall, "s", f"under {MAX_STALL:g} s",
            (max_stall or 0) < MAX_STALL,
        ),
        Vital(
            "swap-in", swap_in, "s", f"1-5 ms, at most {1e3 * MAX_SWAP_IN:g} ms",
            (swap_in or 0) <= MAX_SWAP_IN,
        ),
    ]  # fmt: skip
