"""A run in numbers: one plain dictionary, for JSON, tables and the doctor alike.

Times are seconds, `per_step` values are means over steps. Throughput keys and latencies are the
usual ones; ours on top are the recompute tax, seats and tokens used, and what waiting waited for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from headway.engine.metrics import PERCENTILES, Life, Metrics, percentiles

Summary = dict[str, Any]


def summarize(metrics: Metrics, rejected: int = 0) -> Summary:
    """Everything that a report shows."""
    totals, lives = metrics.totals, list(metrics.lives.values())
    ended = [life for life in lives if life.reason in ("stop", "length")]
    seconds = metrics.ended_at - min((life.arrival for life in lives), default=0.0)
    preemptions = totals["swaps"] + totals["recomputes"]
    return {
        "requests": len(lives),
        "completed": len(ended),
        "rejected": rejected,
        "finish_reasons": {
            key.removeprefix("finished_"): count
            for key, count in sorted(totals.items())
            if key.startswith("finished_")
        },
        "seconds": seconds,
        "requests_per_second": _ratio(len(ended), seconds),
        "output_tokens": totals["output_tokens"],
        "output_tokens_per_second": _ratio(totals["output_tokens"], seconds),
        "prompt_tokens": totals["prompt_tokens"],
        "ttft": percentiles(x.first_token - x.arrival for x in lives if x.first_token >= 0),
        "time_between_tokens": {"mean": metrics.mean_gap()}
        | {f"p{p}": metrics.gap_percentile(p) for p in PERCENTILES},
        "end_to_end": percentiles(x.finished - x.arrival for x in ended),
        "queue_time": percentiles(x.admitted - x.arrival for x in lives if x.admitted >= 0),
        "steps": len(metrics.steps["running"]),
        "per_step": _per_step(metrics),
        "preemptions": preemptions,
        "preemptions_per_second": _ratio(preemptions, seconds),
        "preemptions_by_swap": totals["swaps"],
        "preemptions_for_priority": totals["bumps"],
        "recomputed_tokens": totals["recomputed_tokens"],
        "recompute_tax": _ratio(totals["recomputed_tokens"], totals["computed_tokens"]),
        "swapped_blocks": {"out": totals["blocks_out"], "in": totals["blocks_in"]},
        "cache_hit_ratio": _ratio(totals["cached_tokens"], totals["prompt_tokens"]),
        "waiting_steps_by_reason": dict(metrics.reasons.most_common()),
        "clients": len({life.client for life in lives}),
        "fairness": fairness(ended),
        "deadlines": sum(life.deadline is not None for life in lives),
        "deadline_misses": sum(_is_late(life) for life in lives),
    }


def fairness(lives: list[Life]) -> float:
    """Jain's index over clients of the pace their requests are served at; 1 is equal."""
    paces: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        tokens = life.num_prompt + life.num_output
        paces[life.client].append(tokens / max(life.finished - life.arrival, 1e-9))
    means = np.array([np.mean(values) for values in paces.values()])
    return _ratio(float(means.sum() ** 2), float(len(means) * (means**2).sum())) or 1.0


def _per_step(metrics: Metrics) -> dict[str, float]:
    mean = {name: float(np.mean(v)) if len(v) else 0.0 for name, v in metrics.steps.items()}
    config = metrics.config
    return {
        "seats": mean["running"],
        "seats_share": mean["running"] / config["max_requests"],
        "tokens": mean["tokens"],
        "tokens_share": mean["tokens"] / config["max_tokens"],
        "prefill_share": _ratio(mean["prefill"], mean["tokens"]),
        "waiting": mean["waiting"],
        "free_blocks": mean["free"],
        "seconds": mean["busy"],
    }


def _is_late(life: Life) -> bool:
    return life.deadline is not None and not 0 <= life.finished <= life.deadline


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
