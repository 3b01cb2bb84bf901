"""A snapshot of the running engine: requests, KV blocks, rates and the latest decisions.

`GET /live` returns it as JSON. The builder follows the events on the engine's thread; any
thread that holds the engine's lock may take a snapshot. A snapshot never contains prompts or texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from headway import __version__
from headway.engine.loop import EngineLoop
from headway.engine.queries import Document
from headway.events import Event
from headway.observe.rate_window import RateWindow
from headway.observe.vitals import vitals
from headway.record.sentences import (
    NEXT_STEP,
    Decision,
    DecisionLog,
    why_blocked,
    why_not_considered,
)
from headway.record.timeline import StepStats
from headway.request import Request
from headway.scheduler import Scheduler

Snapshot = Document
NUM_DECISIONS = 32
MAX_REQUESTS = 64  # listed running requests, and listed waiting requests


class SnapshotBuilder:
    """Keeps the counts of the last minute and the latest decisions."""

    def __init__(self, loop: EngineLoop, model_name: str) -> None:
        self._loop, self._engine = loop, loop.engine
        self._model_name = model_name
        self._started = loop.engine.clock.now()
        self._window = RateWindow(self._started)
        self._log = DecisionLog(loop.engine.scheduler.config.max_num_seqs)
        self._decisions: deque[Decision] = deque(maxlen=NUM_DECISIONS)

    def follow(self, event: Event, stats: StepStats) -> None:
        self._window.follow(event, stats)
        if decisions := self._log.follow(event):
            self._decisions += [each for each in decisions if each.kind != "arrived"]

    def snapshot(self, p99_stall: float | None) -> Snapshot:
        """The present state as plain data. The caller holds the engine's lock.

        `p99_stall` is that of the requests' longest stalls in the last minute, in seconds.
        """
        engine, now, num_new = self._engine, self._engine.clock.now(), self._loop.num_unread
        scheduler, window = engine.scheduler, self._window
        computed = _computed_before(scheduler)
        minute = {**window.last_minute(now), "p99_stall": p99_stall}
        num_running, num_waiting = len(scheduler.running), len(scheduler.queue) + num_new
        running = [_row(r, now, computed) for r in islice(scheduler.running, MAX_REQUESTS)]
        return {
            "model": self._model_name, "version": __version__, "uptime": now - self._started,
            "fault": engine.fault, "why": engine.why(), "step": scheduler.last_planned.plan.step,
            "running": {
                "count": num_running, "limit": scheduler.config.max_num_seqs,
                "requests": running,
            },
            "waiting": {
                "count": num_waiting, "new": num_new,
                "swapped": len(scheduler.swapped), "requests": list(self._queue(now)),
            },
            "kv_blocks": _kv_blocks(scheduler),
            "rates": window.rates(now), "history": window.history(now),
            "last_minute": minute, "totals": dict(window.totals),
            "vitals": [v._asdict() for v in vitals(scheduler.config, num_running, num_waiting, minute)],
            "decisions": [
                {"step": d.step, "kind": d.kind, "text": d.text} for d in self._decisions
            ],
        }  # fmt: skip

    def _queue(self, now: float) -> Iterator[Document]:
        """Queued requests in any order; `walk` would sort them and call the queue's policy."""
        scheduler = self._engine.scheduler
        plan, planned = scheduler.last_planned.plan, scheduler.last_planned.time
        reasons = {b.request: why_blocked(b.reason, b.need, b.have) for b in plan.blocked}
        rest = NEXT_STEP
        if plan.not_considered:
            reason, limit = plan.not_considered.reason, scheduler.config.max_num_seqs
            rest = why_not_considered(reason, limit)
        for request in islice(scheduler.queue, MAX_REQUESTS):
            why = NEXT_STEP if request.arrival > planned else reasons.get(request, rest)
            yield {**_row(request, now, {}), "why": why}


def _kv_blocks(scheduler: Scheduler) -> dict[str, int]:
    config, host = scheduler.config, scheduler.kv.host
    return {
        "used": config.num_blocks - scheduler.num_free, "total": config.num_blocks,
        "block_size": config.block_size, "host_used": config.num_host_blocks - host.num_free,
        "host_total": config.num_host_blocks,
    }  # fmt: skip


def _computed_before(scheduler: Scheduler) -> dict[Request, int]:
    """Requests whose prompt a plan in flight computes, and the tokens computed before it."""
    computed: dict[Request, int] = {}
    for planned in scheduler.in_flight:
        for chunk in planned.plan.chunks:
            computed.setdefault(chunk.request, chunk.start)
    return computed


def _row(request: Request, now: float, in_flight: dict[Request, int]) -> Document:
    computed = in_flight.get(request)
    num_computed = request.num_computed if computed is None else computed
    return {
        "id": request.id, "client": request.params.client, "priority": request.params.priority,
        "state": request.state.value if computed is None else "prefill",
        "prompt_tokens": request.num_prompt,
        "computed_prompt_tokens": min(num_computed, request.num_prompt),
        "output_tokens": request.num_generated,
        "max_output_tokens": request.limit - request.num_prompt,
        "blocks": len(request.kv.blocks), "preemptions": request.history.num_preemptions,
        "age": now - request.arrival,
    }  # fmt: skip
