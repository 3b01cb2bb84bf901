"""Rates, latencies and cache hits over the last seconds, and totals since the start.

Counts are kept by second. A rate covers a sliding window of RATE_SECONDS that ends now: the second
in which the window starts counts in part, so rates change smoothly.
"""

from __future__ import annotations

from collections import Counter, deque

from headway.events import Completed, Event, Planned, preempted_by
from headway.record.timeline import StepStats

Counts = Counter[str]
NUM_SECONDS = 60  # length of the history
RATE_SECONDS = 5  # window of the rates and mean latencies
RATES = ("output_tokens", "prompt_tokens", "requests", "preemptions", "steps")
TOTALS = ("requests", "output_tokens", "errors", "aborts")


class RateWindow:
    """Counts of the last minute by second, and totals since the start."""

    def __init__(self, started: float) -> None:
        self.totals: Counts = Counter(dict.fromkeys(TOTALS, 0))
        self._started = started
        self._seconds: deque[tuple[int, Counts]] = deque(maxlen=NUM_SECONDS + 1)

    def follow(self, event: Event, stats: StepStats) -> None:
        if isinstance(event, Planned) and not event.plan.preempted:
            return  # its work is counted when it is complete
        second = int(stats.now or event.time)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        counts = self._seconds[-1][1]
        if stats.finished:
            self._count_finished(stats, counts)
        if not isinstance(event, Completed):
            counts["preemptions"] += len(preempted_by(event))
            return
        counts["steps"] += 1
        counts["output_tokens"] += stats.num_output
        self.totals["output_tokens"] += stats.num_output
        counts["computed"] += stats.num_computed
        for seconds, num_gaps in stats.gaps:
            counts["gaps"] += num_gaps
            counts["itl_us"] += int(1e6 * seconds * num_gaps)
            counts["max_itl_us"] = max(counts["max_itl_us"], int(1e6 * seconds))
        plan = event.planned.plan
        if plan.admitted or plan.chunks or event.result.swap_in:
            self._count_changes(event, stats, counts)

    def _count_changes(self, event: Completed, stats: StepStats, counts: Counts) -> None:
        """Count what a steady decode step does not have."""
        swap_in = event.result.swap_in or 0
        counts.update(
            prompt_tokens=stats.num_prompt, prefill=stats.num_prefill,
            recomputed=stats.num_recomputed, queried=stats.num_queried, hit=stats.num_hit,
            swap_ins=bool(swap_in), swap_in_us=int(1e6 * swap_in),
            first_tokens=len(stats.first_tokens), ttft_us=int(1e6 * sum(stats.first_tokens)),
        )  # fmt: skip

    def _count_finished(self, stats: StepStats, counts: Counts) -> None:
        ended = Counter(times.finish_reason for _, times in stats.finished)
        for each in (counts, self.totals):
            each.update(requests=ended.total(), errors=ended["error"], aborts=ended["abort"])

    def rates(self, now: float) -> dict[str, float]:
        """Rates per second, and mean latencies in seconds (0 without any)."""
        span = min(float(RATE_SECONDS), max(1.0, now - self._started))
        shares = [(min(1.0, second + 1 - (now - span)), c) for second, c in self._seconds]
        recent = [(share, counts) for share, counts in shares if share > 0]

        def total(name: str) -> float:
            return sum(share * counts[name] for share, counts in recent)

        rates = {name: total(name) / span for name in RATES}
        rates["ttft"] = total("ttft_us") / 1e6 / max(1.0, total("first_tokens"))
        rates["itl"] = total("itl_us") / 1e6 / max(1.0, total("gaps"))
        return rates

    def last_minute(self, now: float) -> dict[str, float | None]:
        """Values of 60 seconds; a mean or a share is None if there is nothing to divide by."""
        last = [counts for second, counts in self._seconds if second > now - NUM_SECONDS]
        total, span = Counter[str](), min(float(NUM_SECONDS), max(1.0, now - self._started))
        for counts in last:
            total.update(counts)
        longest = max((counts["max_itl_us"] for counts in last), default=0)
        return {
            "errors": total["errors"], "aborts": total["aborts"],
            "prefix_cache_hit_rate": _ratio(total["hit"], total["queried"]),
            "preemptions_per_second": total["preemptions"] / span,
            "tokens_per_step": _ratio(total["computed"], total["steps"]),
            "prefill_share": _ratio(total["prefill"], total["computed"]),
            "recompute_tax": _ratio(total["recomputed"], total["computed"]),
            "max_itl": longest / 1e6 if total["gaps"] else None,
            "swap_in": _ratio(total["swap_in_us"] / 1e6, total["swap_ins"]),
        }  # fmt: skip

    def history(self, now: float) -> dict[str, list[float | None]]:
        """The last 60 whole seconds, oldest first. A latency is None in a second without any."""
        by_second, nothing = dict(self._seconds), Counter[str]()
        last = [by_second.get(int(now) - ago, nothing) for ago in range(NUM_SECONDS, 0, -1)]
        return {
            "output_tokens": [counts["output_tokens"] for counts in last],
            "ttft": [_ratio(counts["ttft_us"] / 1e6, counts["first_tokens"]) for counts in last],
            "itl": [_ratio(counts["itl_us"] / 1e6, counts["gaps"]) for counts in last],
            "max_itl": [c["max_itl_us"] / 1e6 if c["gaps"] else None for c in last],
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
