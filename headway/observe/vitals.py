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
    preemptions, tokens = minute["preemptions_per_second"] or 0.0, minute["tokens_per_step"]
    stall, max_stall = minute["p99_stall"], minute["max_itl"]
    budget, limit = config.max_num_batched_tokens, config.max_num_seqs
    return [
        _up_to(MAX_WAITING, "waiting requests", waiting, "", f"0-{MAX_WAITING}"),
        Vital(
            "running requests", running, "", f"near {limit} (max_num_seqs) while requests wait",
            not is_loaded or running >= MIN_RUNNING * limit,
        ),
        _up_to(MAX_PREEMPTIONS, "preemptions", preemptions, "/s", f"0-{MAX_PREEMPTIONS}"),
        _up_to(
            MAX_RECOMPUTE_TAX, "recompute tax", minute["recompute_tax"], "%",
            f"under {100 * MAX_RECOMPUTE_TAX:g} %",
        ),
        Vital(
            "tokens per step", tokens, "", f"up to {budget} (the budget) while requests wait",
            not is_loaded or tokens is None or tokens >= MIN_TOKENS * budget,
        ),
        _up_to(
            MAX_PREFILL_SHARE, "prefill share", minute["prefill_share"], "%",
            f"20-40 %, at most {100 * MAX_PREFILL_SHARE:g} %",
        ),
        Vital(
            "longest stall, p99", stall, "s", f"under {1e3 * MAX_P99_STALL:g} ms",
            (stall or 0) < MAX_P99_STALL,
        ),
        Vital(
            "longest stall, max", max_stall, "s", f"under {MAX_STALL:g} s",
            (max_stall or 0) < MAX_STALL,
        ),
        _up_to(
            MAX_SWAP_IN, "swap-in", minute["swap_in"], "s",
            f"1-5 ms, at most {1e3 * MAX_SWAP_IN:g} ms",
        ),
    ]  # fmt: skip


def _up_to(limit: float, name: str, value: float | None, unit: str, healthy: str) -> Vital:
    return Vital(name, value, unit, healthy, (value or 0) <= limit)
