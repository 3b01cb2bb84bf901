"""What to watch on a running server: a few values, each with its healthy range.

docs/metrics.md explains them. The live page, `headway top` and `GET /doctor` show the same list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headway.config import Config


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
        Vital("waiting requests", waiting, "", "0-5", waiting <= 5),
        Vital(
            "running requests", running, "", f"near {limit} (max_num_seqs) while requests wait",
            not is_loaded or running >= limit / 2,
        ),
        Vital("preemptions", preemptions, "/s", "0-1", preemptions <= 1),
        Vital("recompute tax", tax, "%", "under 5 %", (tax or 0) <= 0.05),
        Vital(
            "tokens per step", tokens, "", f"up to {budget} (the budget) while requests wait",
            not is_loaded or tokens is None or tokens >= budget / 10,
        ),
        Vital("prefill share", prefill, "%", "20-40 %, at most 80 %", (prefill or 0) <= 0.8),
        Vital("longest stall, p99", stall, "s", "under 200 ms", (stall or 0) < 0.2),
        Vital("longest stall, max", max_stall, "s", "under 1 s", (max_stall or 0) < 1),
        Vital("swap-in", swap_in, "s", "1-5 ms, at most 20 ms", (swap_in or 0) <= 0.02),
    ]  # fmt: skip
