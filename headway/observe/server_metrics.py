"""An observer that keeps the metrics of a server and answers queries without waiting for a step.

Counters and histograms follow the events on the engine's thread. Gauges are read from the
scheduler when a query arrives, on the thread that asks. Memory does not grow with the number of
finished requests.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple, get_args

from headway.engine.loop import CachedReader, EngineLoop
from headway.engine.queries import GetMetrics, GetSnapshot
from headway.events import Completed, Event, Planned, preempted_by
from headway.observe.prometheus import Exposition, MetricValues
from headway.observe.snapshot import Snapshot, SnapshotBuilder
from headway.plan import Reason
from headway.record.lines import HeaderLine
from headway.record.stats import RunStats, percentiles, stalls_of
from headway.record.timeline import RequestTimeline, StepStats, Timeline
from headway.record.writer import header
from headway.request import Request
from headway.scheduler import Scheduler

PREFIX = "headway"
NEW = "new"  # the reason of requests that arrived after the latest plan
COMPLETED = ("stop", "length")
SLICE_SECONDS, NUM_SLICES = 10.0, 6
log = logging.getLogger(__name__)


class ServerMetrics:
    """Observes the engine of a loop and answers GetMetrics and GetSnapshot."""

    def __init__(self, loop: EngineLoop, model_name: str) -> None:
        self._loop, self._engine = loop, loop.engine
        engine = loop.engine
        self._timeline = Timeline()
        self._builder = SnapshotBuilder(loop, model_name)
        self.values = MetricValues.empty(engine.scheduler.config.max_model_len)
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM has the same two labels
        self._recent = RecentStats(header(engine.scheduler.config, engine.async_scheduling))
        self._latest_values = CachedReader(engine, self._read)
        self._latest_snapshot = CachedReader(engine, self._take_snapshot)
        engine.observers.append(self)
        loop.handle(GetMetrics, lambda query: self.text(query.prefix))
        loop.handle(GetSnapshot, lambda _: self.snapshot())

    def __call__(self, event: Event) -> None:
        try:
            with self._engine.lock:
                stats = self._timeline.follow(event)
                if not isinstance(event, Planned) or event.plan.preempted:
                    self._count(event, stats)
                    self._recent.count(event, stats, self._timeline)
                self._builder.follow(event, stats)
        except Exception:  # a failure in the metrics must not stop the engine
            log.exception("the metrics of a step were lost")

    def text(self, prefix: str = PREFIX) -> str:
        """All metrics in the Prometheus text format. Names are `prefix:name`."""
        values, age = self._latest_values.get()
        values.gauges["snapshot_age_seconds", ""] = age
        config = self._engine.scheduler.config
        cache = {
            "block_size": str(config.block_size), "num_gpu_blocks": str(config.num_blocks),
            "num_cpu_blocks": str(config.num_host_blocks),
        }  # fmt: skip
        return Exposition(values, prefix, self._labels, cache).text()

    def snapshot(self) -> Snapshot:
        """The snapshot for the live page, with its age and the duration of the current step."""
        snapshot, age = self._latest_snapshot.get()
        return {**snapshot, "age": age, "step_seconds": self._engine.step_seconds}

    def recent(self) -> RunStats:
        """The statistics of the last minute. The caller holds the engine's lock."""
        return self._recent.merged(self._timeline, self._engine.clock.now())

    def _take_snapshot(self) -> Snapshot:
        stalls = stalls_of(self._recent.streams(self._timeline, self._engine.clock.now()))
        return self._builder.snapshot(percentiles(stalls)["p99"] if stalls else None)

    def _read(self) -> MetricValues:
        values = self.values.copy()
        values.gauges = _gauges(self._engine.scheduler, self._loop.num_unread)
        return values

    def _count(self, event: Event, stats: StepStats) -> None:
        counters, histograms = self.values.counters, self.values.histograms
        if isinstance(event, Completed):
            counters["generation_tokens", ""] += stats.num_output
            counters["builds", ""] += event.result.num_builds
            planned, plan = event.planned, event.planned.plan
            histograms["scheduler_step_seconds"].observe(planned.time - planned.began)
            histograms["iteration_tokens_total"].observe(stats.num_computed)
            gaps = histograms["inter_token_latency_seconds"]
            for seconds, count in stats.gaps:
                gaps.observe(seconds, count)
            if plan.admitted or plan.chunks or plan.copies_out:
                self._count_changes(event, stats)
            if plan.drafts:
                self._count_drafts(event, stats)
        else:
            counters["num_preemptions", ""] += len(preempted_by(event))
        for request, times in stats.finished:
            counters["request_success", times.finish_reason] += 1
            if times.finish_reason in COMPLETED:
                self._count_completed(request, times)

    def _count_changes(self, event: Completed, stats: StepStats) -> None:
        """Count what a steady decode step does not have."""
        plan, counters = event.plan, self.values.counters
        counters["prompt_tokens", ""] += stats.num_prompt
        counters["prefix_cache_queries", ""] += stats.num_queried
        counters["prefix_cache_hits", ""] += stats.num_hit
        counters["recomputed_tokens", ""] += stats.num_recomputed
        counters["prefill_tokens", ""] += stats.num_prefill
        counters["swapped_blocks", "out"] += len(plan.copies_out)
        counters["swapped_blocks", "in"] += len(plan.copies_in)
        if event.result.swap_in:
            self.values.histograms["swap_in_seconds"].observe(event.result.swap_in)
        first = self.values.histograms["time_to_first_token_seconds"]
        for seconds in stats.first_tokens:
            first.observe(seconds)

    def _count_drafts(self, event: Completed, stats: StepStats) -> None:
        """Count the drafts of requests that had not ended before the step did."""
        counters, accepted = self.values.counters, "spec_decode_num_accepted_tokens"
        counters["spec_decode_num_drafts", ""] += stats.num_draft_steps
        counters["spec_decode_num_draft_tokens", ""] += stats.num_drafted
        counters[accepted, ""] += stats.num_accepted
        for draft, num_accepted in event.verified():
            for position in range(draft.count):
                counters[f"{accepted}_per_pos", str(position)] += position < num_accepted

    def _count_completed(self, request: Request, times: RequestTimeline) -> None:
        params, is_generation, end = request.params, not times.is_pooling, times.finished
        is_new = not times.is_resumed  # otherwise it has spent a part of its time elsewhere
        admitted = times.admitted if times.admitted >= 0 else end
        first_token = times.first_token if times.first_token >= 0 else end
        values: dict[str, float | None] = {
            "e2e_request_latency_seconds": end - times.arrival,
            "request_queue_time_seconds": admitted - times.arrival if is_new else None,
            "request_prefill_time_seconds": first_token - admitted if is_new else None,
            "request_decode_time_seconds": end - first_token if is_generation and is_new else None,
            "request_longest_stall_seconds": times.longest_stall if times.num_output > 1 else None,
            "request_inference_time_seconds": end - admitted if is_new else None,
            "request_prompt_tokens": times.num_prompt,
            "request_generation_tokens": times.num_output if is_generation else None,
            "request_params_max_tokens": params.max_tokens if is_generation else None,
            "request_params_n": params.n if request.parent is None else None,  # once for n samples
        }
        for name, value in values.items():
            if value is not None:
                self.values.histograms[name].observe(value)


def _gauges(scheduler: Scheduler, num_unread: int) -> dict[tuple[str, str], float]:
    """The present state. `num_unread` requests have arrived since the current step began."""
    num_blocks = scheduler.config.num_blocks
    gauges = {
        ("num_requests_running", ""): float(len(scheduler.running)),
        ("num_requests_waiting", ""): float(len(scheduler.queue) + num_unread),
        ("num_requests_swapped", ""): float(len(scheduler.swapped)),
        ("kv_cache_usage_perc", ""): (num_blocks - scheduler.num_free) / num_blocks,
    }
    reasons = _waiting_by_reason(scheduler)
    reasons[NEW] += num_unread
    for reason in (*get_args(Reason), NEW):
        gauges["waiting_by_reason", reason] = float(reasons[reason])
    return gauges


def _waiting_by_reason(scheduler: Scheduler) -> Counter[str]:
    """The number of waiting requests for each reason that the latest plan gave."""
    plan, num_waiting = scheduler.last_planned.plan, len(scheduler.queue)
    waiting = (b for b in plan.blocked if b.request.row < 0 and not b.request.is_finished)
    reasons = Counter[str](each.reason for each in waiting)
    if rest := plan.not_considered:
        reasons[rest.reason] += max(0, min(rest.num_requests, num_waiting - reasons.total()))
    reasons[NEW] = max(0, num_waiting - reasons.total())
    return reasons


class _Slice(NamedTuple):
    start: float
    stats: RunStats
    finished: list[RequestTimeline]


class RecentStats:
    """Statistics of the last minute, in slices of steps that are dropped after 60 to 70 seconds."""

    def __init__(self, head: HeaderLine) -> None:
        self._head = head
        self._slices: deque[_Slice] = deque(maxlen=NUM_SLICES + 1)

    def count(self, event: Event, stats: StepStats, timeline: Timeline) -> None:
        """Count an event that the timeline has followed."""
        now = stats.now or event.time
        if not self._slices or now >= self._slices[-1].start + SLICE_SECONDS:
            self._slices.append(_Slice(now, RunStats(self._head), []))
        latest = self._slices[-1]
        latest.stats.count(event, stats, timeline)
        if stats.finished:
            latest.finished.extend([times for _, times in stats.finished])

    def merged(self, timeline: Timeline, now: float) -> RunStats:
        """The slices of the last minute as one run, which began with the first of them.

        Requests are those that arrived in it; stalls are those of all requests that were open.
        """
        recent = self._recent(now)
        run = RunStats(self._head, recent[0].start if recent else now)
        run.ended_at = now
        run.streams = self.streams(timeline, now)
        for each in recent:
            run.merge(each.stats)
        return run

    def streams(self, timeline: Timeline, now: float) -> list[RequestTimeline]:
        """The requests that were open in the last minute, with their longest stalls so far."""
        timeline.update_stalls()
        finished = [times for each in self._recent(now) for times in each.finished]
        return [*finished, *timeline.open.values()]

    def _recent(self, now: float) -> list[_Slice]:
        oldest = now - (NUM_SLICES + 1) * SLICE_SECONDS
        return [each for each in self._slices if each.start > oldest]
