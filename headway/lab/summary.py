"""The summary of a run: one dictionary for JSON, the tables and the doctor.

Times are seconds; a latency has mean, p50, p90, p99, p99.9 and max. `per_step` values are means over
steps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from headway.record.stats import RunStats, by_prompt_length, percentiles
from headway.record.timeline import RequestTimeline

Summary = dict[str, Any]


def summarize(metrics: RunStats, rejected: int = 0) -> Summary:
    """All values that a report shows."""
    totals, requests = metrics.totals, metrics.requests
    ended = [request for request in requests if request.finish_reason in ("stop", "length")]
    started = metrics.started_at
    if started is None:
        started = min((request.arrival for request in requests), default=0.0)
    seconds = metrics.ended_at - started
    preemptions = totals["swaps"] + totals["recomputes"]
    num_verified, num_right = totals["num_draft_steps"], totals["num_accepted"]
    ttft = [(x.num_prompt, x.first_token - x.arrival) for x in requests if x.first_token >= 0]
    deadlines = [(x.finished, x.deadline) for x in requests if x.deadline is not None]
    return {
        "requests": len(requests) + rejected,
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
        "ttft": percentiles(seconds for _, seconds in ttft),
        "ttft_by_prompt": [
            {"from": shortest, "to": end, "requests": len(times), **percentiles(times)}
            for shortest, end, times in by_prompt_length(ttft)
        ],
        "time_between_tokens": metrics.gaps(),
        "longest_stall": percentiles(metrics.longest_stalls()),
        "end_to_end": percentiles(x.finished - x.arrival for x in ended),
        "queue_time": percentiles(x.admitted - x.arrival for x in requests if x.admitted >= 0),
        "steps": len(metrics.steps["running"]),
        "per_step": _per_step(metrics),
        "preemptions": preemptions,
        "preemptions_per_second": _ratio(preemptions, seconds),
        "preemptions_by_swap": totals["swaps"],
        "preemptions_for_priority": totals["priority_preemptions"],
        "recomputed_tokens": totals["recomputed_tokens"],
        "recompute_tax": _ratio(totals["recomputed_tokens"], totals["computed_tokens"]),
        "swapped_blocks": {"out": totals["blocks_out"], "in": totals["blocks_in"]},
        "swap_in": percentiles(metrics.swap_ins),
        "drafted_tokens": totals["num_drafted"],
        "accepted_share": _ratio(num_right, totals["num_drafted"]),
        "tokens_per_verification": _ratio(num_right + num_verified, num_verified),
        "cache_hit_ratio": _ratio(totals["cached_tokens"], totals["prompt_tokens"]),
        "waiting_steps_by_reason": dict(
            sorted(metrics.reasons.items(), key=lambda item: (-item[1], item[0]))
        ),
        "clients": len({request.client for request in requests}),
        "fairness": fairness(ended),
        "deadlines": len(deadlines),
        "deadline_misses": sum(not 0 <= end <= deadline for end, deadline in deadlines),
    }


MIN_QUEUED = 0.01  # share of the run; a client that queued less was served without delay


def fairness(requests: list[RequestTimeline]) -> float:
    """Jain's index over the clients' tokens per second, counted while they had queued requests.

    1 means that all clients with queued requests had equal rates, or that no client had to queue.
    """
    by_client: dict[str, list[RequestTimeline]] = defaultdict(list)
    for request in requests:
        by_client[request.client].append(request)
    span = max((x.finished for x in requests), default=0.0) - min(
        (x.arrival for x in requests), default=0
    )
    rates = [_rate_while_queued(each, MIN_QUEUED * span) for each in by_client.values()]
    known = np.array([rate for rate in rates if rate is not None])
    return _ratio(float(known.sum() ** 2), float(len(known) * (known**2).sum())) or 1.0


def _rate_while_queued(requests: list[RequestTimeline], least: float) -> float | None:
    """One client's tokens per second while it had a queued request; None if it hardly queued."""
    times, queued, reached = [0.0], [0.0], 0.0  # seconds queued up to each of these times
    for start, end in sorted((request.arrival, request.admitted) for request in requests):
        start = max(start, reached)
        if end > start:
            times += [start, end]
            queued += [queued[-1], queued[-1] + end - start]
            reached = end
    if queued[-1] <= least:
        return None
    admitted = np.array([request.admitted for request in requests])
    finished = np.array([request.finished for request in requests])
    tokens = np.array([request.num_prompt + request.num_output for request in requests])
    within = np.interp(finished, times, queued) - np.interp(admitted, times, queued)
    return float((tokens * within / np.maximum(finished - admitted, 1e-9)).sum() / queued[-1])


def _per_step(metrics: RunStats) -> dict[str, float]:
    mean = {name: float(np.mean(v)) if len(v) else 0.0 for name, v in metrics.steps.items()}
    config = metrics.config
    return {
        "running": mean["running"],
        "running_share": mean["running"] / config["max_num_seqs"],
        "tokens": mean["tokens"],
        "tokens_share": mean["tokens"] / config["max_num_batched_tokens"],
        "prefill_share": _ratio(mean["prefill"], mean["tokens"]),
        "waiting": mean["waiting"],
        "free_blocks": mean["free"],
        "seconds": mean["seconds"],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
