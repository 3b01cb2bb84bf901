"""An observer that counts what operators watch, and answers queries without waiting for a step.

Counters and histograms follow the step reports on the engine's thread; gauges are read from the
scheduler when a query comes, on the thread that it comes on. Nothing grows with the number of
requests that have ended. Knows no HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import get_args

from headway.engine.loop import EngineLoop, Latest
from headway.observe.lives import COMPLETED, Life, Lives, StepStats
from headway.observe.prometheus import Exposition, Numbers
from headway.observe.snapshot import Live, Snapshot
from headway.plan import Reason, StepReport
from headway.request import Request
from headway.scheduler import Scheduler

PREFIX = "headway"
NEW = "new"  # came after the latest plan was made
log = logging.getLogger(__name__)


class ServerMetrics:
    """Watches the engine of a loop; answers its queries "metrics" and "snapshot"."""

    def __init__(self, loop: EngineLoop, model_name: str) -> None:
        self._loop, self._engine = loop, loop.engine
        engine = loop.engine
        self._lives = Lives(engine.clock.now)
        self._live = Live(loop, model_name)
        self.numbers = Numbers.empty(engine.scheduler.config.max_model_len)
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM's own two
        self._numbers_read = Latest(engine, self._read)
        self._snapshot_read = Latest(engine, self._live.snapshot)
        engine.observers.append(self)
        loop.observations["metrics"] = lambda prefix: self.text(prefix or PREFIX)
        loop.observations["snapshot"] = lambda _: self.snapshot()

    def __call__(self, report: StepReport) -> None:
        try:
            with self._engine.lock:
                happened = self._lives.follow(report)
                self._count(report, happened)
                self._live.follow(report, happened)
        except Exception:  # what watches the engine must not be what ends it
            log.exception("a step was not counted")

    def text(self, prefix: str = PREFIX) -> str:
        """All metrics in Prometheus' text form; names are `prefix:name`."""
        numbers, age = self._numbers_read.get()
        numbers.gauges["snapshot_age_seconds", ""] = age
        config = self._engine.scheduler.config
        cache = {
            "block_size": str(config.block_size), "num_gpu_blocks": str(config.num_blocks),
            "num_cpu_blocks": str(config.num_host_blocks),
        }  # fmt: skip
        return Exposition(numbers, prefix, self._labels, cache).text()

    def snapshot(self) -> Snapshot:
        """What the live page shows, with its age and the time that the running step has taken."""
        snapshot, age = self._snapshot_read.get()
        return {**snapshot, "age": age, "step_seconds": self._engine.step_seconds}

    def _read(self) -> Numbers:
        numbers = self.numbers.copy()
        numbers.gauges = _gauges(self._engine.scheduler, self._loop.num_unread)
        return numbers

    def _count(self, report: StepReport, happened: StepStats) -> None:
        plan, counters = report.plan, self.numbers.counters
        histograms = self.numbers.histograms
        counters["generation_tokens", ""] += happened.num_output
        if plan.step >= 0:
            num_decoded = len(plan.decodes) * (plan.num_steps - 1)
            histograms["iteration_tokens_total"].observe(plan.num_tokens + num_decoded)
            histograms["scheduler_step_seconds"].observe(
                plan.events.schedule_ended - plan.events.schedule_started
            )
        between = histograms["inter_token_latency_seconds"]
        for seconds, count in happened.gaps:
            between.observe(seconds, count)
        if plan.admitted or plan.chunks or plan.events.preempted or happened.ended:
            self._count_changes(report, happened)

    def _count_changes(self, report: StepReport, happened: StepStats) -> None:
        """What a steady decode step has nothing of."""
        plan, counters = report.plan, self.numbers.counters
        counters["prompt_tokens", ""] += happened.num_prompt
        counters["prefix_cache_queries", ""] += happened.num_queried
        counters["prefix_cache_hits", ""] += happened.num_hit
        counters["recomputed_tokens", ""] += happened.num_recomputed
        counters["num_preemptions", ""] += len(plan.events.preempted)
        counters["swapped_blocks", "out"] += len(plan.copies_out)
        counters["swapped_blocks", "in"] += len(plan.copies_in)
        first = self.numbers.histograms["time_to_first_token_seconds"]
        for seconds in happened.firsts:
            first.observe(seconds)
        for request, life in happened.ended:
            counters["request_success", request.finish_reason or "abort"] += 1
            if request.finish_reason in COMPLETED:
                self._count_completed(request, life, happened.now)

    def _count_completed(self, request: Request, life: Life, now: float) -> None:
        params, is_generation = request.params, request.params.pooling is None
        seated = life.seated if life.seated >= 0 else now
        first_token = life.first_token if life.first_token >= 0 else now
        values: dict[str, float | None] = {
            "e2e_request_latency_seconds": now - life.arrival,
            "request_queue_time_seconds": seated - life.arrival,
            "request_prefill_time_seconds": first_token - seated,
            "request_decode_time_seconds": now - first_token if is_generation else None,
            "request_inference_time_seconds": now - seated,
            "request_prompt_tokens": request.num_prompt,
            "request_generation_tokens": request.num_generated if is_generation else None,
            "request_params_max_tokens": params.max_tokens if is_generation else None,
            "request_params_n": params.n if request.parent is None else None,  # once for all n
        }
        for name, value in values.items():
            if value is not None:
                self.numbers.histograms[name].observe(value)


def _gauges(scheduler: Scheduler, num_unread: int) -> dict[tuple[str, str], float]:
    """How things stand now; `num_unread` requests have come since the running step began."""
    num_blocks = scheduler.num_blocks
    gauges = {
        ("num_requests_running", ""): float(len(scheduler.running)),
        ("num_requests_waiting", ""): float(len(scheduler.queue) + num_unread),
        ("num_requests_swapped", ""): float(len(scheduler.swapped)),
        ("kv_cache_usage_perc", ""): (num_blocks - scheduler.num_free) / num_blocks,
    }
    reasons = waiting_by_reason(scheduler)
    reasons[NEW] += num_unread
    for reason in (*get_args(Reason), NEW):
        gauges["waiting_by_reason", reason] = float(reasons[reason])
    return gauges


def waiting_by_reason(scheduler: Scheduler) -> Counter[str]:
    """Everyone who waits, by what the latest plan said of it."""
    plan, num_waiting = scheduler.last_plan, len(scheduler.queue)
    reasons = Counter[str](b.reason for b in plan.blocked if _waits(b.request))
    if plan.not_considered:
        num_known = reasons.total()
        reasons[plan.not_considered.reason] += max(
            0, min(plan.not_considered.num_requests, num_waiting - num_known)
        )
    reasons[NEW] = max(0, num_waiting - reasons.total())
    return reasons


def _waits(request: Request) -> bool:
    return request.row < 0 and not request.is_finished
