"""A run in numbers: one plain dictionary, for JSON, tables and the doctor alike.

Times are seconds, `per_step` values are means over steps. Throughput keys and latencies are the
usual ones; ours on top are the recompute tax, seats and tokens used, and what waiting waited for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from headway.observe.run_stats import PERCENTILES, RunStats, percentiles
from headway.observe.timeline import RequestTimes

Summary = dict[str, Any]


def summarize(metrics: RunStats, rejected: int = 0) -> Summary:
    """Everything that a report shows."""
    totals, lives = metrics.totals, metrics.requests
    ended = [life for life in lives if life.finish_reason in ("stop", "length")]
    seconds = metrics.ended_at - min((life.arrival for life in lives), default=0.0)
    preemptions = totals["swaps"] + totals["recomputes"]
    return {
        "requests": len(lives) + rejected,
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
        "preemptions_for_priority": totals["priority_preemptions"],
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


MIN_QUEUED = 0.01  # of the run: clients that queued less had all they asked for


def fairness(lives: list[RequestTimes]) -> float:
    """Jain's index over clients of the tokens a second they got while they had to queue.

    1 means that all who had to queue were served alike, or that nobody had to.
    """
    by_client: dict[str, list[RequestTimes]] = defaultdict(list)
    for life in lives:
        by_client[life.client].append(life)
    span = max((x.finished for x in lives), default=0.0) - min(
        (x.arrival for x in lives), default=0
    )
    rates = [_rate_while_queued(each, MIN_QUEUED * span) for each in by_client.values()]
    known = np.array([rate for rate in rates if rate is not None])
    return _ratio(float(known.sum() ** 2), float(len(known) * (known**2).sum())) or 1.0


def _rate_while_queued(lives: list[RequestTimes], least: float) -> float | None:
    """Tokens a second served to one client while a request of its queued; None if hardly ever."""
    times, queued, reached = [0.0], [0.0], 0.0  # seconds queued up to each of these times
    for start, end in sorted((life.arrival, life.admitted) for life in lives):
        start = max(start, reached)
        if end > start:
            times += [start, end]
            queued += [queued[-1], queued[-1] + end - start]
            reached = end
    if queued[-1] <= least:
        return None
    admitted = np.array([life.admitted for life in lives])
    finished = np.array([life.finished for life in lives])
    tokens = np.array([life.num_prompt + life.num_output for life in lives])
    within = np.interp(finished, times, queued) - np.interp(admitted, times, queued)
    return float((tokens * within / np.maximum(finished - admitted, 1e-9)).sum() / queued[-1])


def _per_step(metrics: RunStats) -> dict[str, float]:
    mean = {name: float(np.mean(v)) if len(v) else 0.0 for name, v in metrics.steps.items()}
    config = metrics.config
    return {
        "seats": mean["running"],
        "seats_share": mean["running"] / config["max_num_seqs"],
        "tokens": mean["tokens"],
        "tokens_share": mean["tokens"] / config["max_num_batched_tokens"],
        "prefill_share": _ratio(mean["prefill"], mean["tokens"]),
        "waiting": mean["waiting"],
        "free_blocks": mean["free"],
        "seconds": mean["seconds"],
    }


def _is_late(life: RequestTimes) -> bool:
    return life.deadline is not None and not 0 <= life.finished <= life.deadline


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
