"""The running engine at a glance: running and waiting requests, rates, latest decisions.

Follows the step reports on the engine's thread. A snapshot is made on any thread that holds the
engine's lock; others serve and draw it. Prompts and texts are never part of a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from headway import __version__
from headway.engine.loop import EngineLoop
from headway.observe.explain import why_blocked, why_not_considered
from headway.observe.lives import StepStats
from headway.observe.rate_window import RateWindow
from headway.plan import Admission, Plan, StepReport
from headway.request import Request
from headway.scheduler import Scheduler

Snapshot = dict[str, Any]
NUM_DECISIONS = 32
MAX_ROWS = 64  # requests listed of those running, and of those waiting
NEXT_STEP = "the next step looks at it"


class Live:
    """The last minute in numbers, and the last decisions in words."""

    def __init__(self, loop: EngineLoop, model_name: str) -> None:
        self._loop, self._engine = loop, loop.engine
        self._model_name = model_name
        self._started = loop.engine.clock.now()
        self._window = RateWindow(self._started)
        self._decisions: deque[tuple[int, str, str]] = deque(maxlen=NUM_DECISIONS)
        self._waits: dict[Request | None, str] = {}  # the reason last noted of each request

    def follow(self, report: StepReport, happened: StepStats) -> None:
        """Take note of a step."""
        plan = report.plan
        self._window.follow(report, happened)
        if plan.admitted or plan.chunks or plan.events.preempted or happened.ended:
            self._note(report)
        elif plan.blocked or plan.not_considered:
            self._decisions += ((plan.step, "waits", words) for words in self._waiting(plan))

    # The latest decisions, in words.

    def _note(self, report: StepReport) -> None:
        plan, said = report.plan, self._decisions
        for request, is_swap, num_lost, _ in plan.events.preempted[-NUM_DECISIONS:]:
            fate = "copied to the host" if is_swap else "to be computed again"
            words = f"{request.id} gives up its blocks, {num_lost} tokens {fate}"
            said.append((plan.step, "preempted", words))
        for admission in plan.admitted[-NUM_DECISIONS:]:
            said.append((plan.step, "seated", _seated(admission)))
        said += ((plan.step, "waits", words) for words in self._waiting(plan))
        for request in report.finished[-NUM_DECISIONS:]:
            gained = f"{request.num_generated} tokens"
            if request.params.pooling is not None:
                gained = "its embedding" if request.num_generated else "no embedding"
            words = f"{request.id} ends after {gained} ({request.finish_reason})"
            said.append((plan.step, "ended", words))
        if self._waits:
            gone = (*(a.request for a in plan.admitted), *report.finished)
            for request in gone:
                self._waits.pop(request, None)

    def _waiting(self, plan: Plan) -> Iterator[str]:
        """Requests that wait for another reason than before."""
        config = self._engine.scheduler.config
        for blocked in plan.blocked:
            request, reason = blocked.request, blocked.reason
            if self._waits.get(request) != reason and not request.is_finished:
                self._waits[request] = reason
                yield f"{request.id} waits: {why_blocked(blocked, plan.events.num_running, config)}"
        behind = plan.not_considered
        if behind is None:
            self._waits.pop(None, None)
        elif self._waits.get(None) != behind.reason:
            self._waits[None] = behind.reason
            why = why_not_considered(behind, plan.events.num_running, config)
            yield f"{behind.num_requests} in the queue wait {why}"

    # The picture.

    def snapshot(self) -> Snapshot:
        """The present state as plain data. Call it with the engine's lock held."""
        engine, now, num_new = self._engine, self._engine.clock.now(), self._loop.num_unread
        scheduler, config = engine.scheduler, engine.scheduler.config
        host, window, computed = scheduler.kv.host, self._window, _in_flight(scheduler)
        return {
            "model": self._model_name, "version": __version__, "uptime": now - self._started,
            "fault": engine.fault, "why": engine.why(), "step": scheduler.last_plan.step,
            "seats": {"taken": len(scheduler.running), "limit": config.max_num_seqs},
            "blocks": {
                "held": config.num_blocks - scheduler.num_free, "total": config.num_blocks,
                "size": config.block_size, "host_held": config.num_host_blocks - host.num_free,
                "host_total": config.num_host_blocks,
            },
            "num_running": len(scheduler.running), "num_waiting": len(scheduler.queue) + num_new,
            "num_new": num_new, "num_swapped": len(scheduler.swapped),
            "running": [_row(r, now, computed) for r in islice(scheduler.running, MAX_ROWS)],
            "waiting": list(self._queue(now)),
            "rates": window.rates(now), "history": window.history(now),
            "minute": window.minute(now), "totals": dict(window.totals),
            "decisions": [{"step": s, "kind": k, "words": w} for s, k, w in self._decisions],
        }  # fmt: skip

    def _queue(self, now: float) -> Iterator[dict[str, Any]]:
        scheduler = self._engine.scheduler
        plan, config, num_running = scheduler.last_plan, scheduler.config, len(scheduler.running)
        reasons = {b.request: why_blocked(b, num_running, config) for b in plan.blocked}
        behind = NEXT_STEP
        if plan.not_considered:
            behind = why_not_considered(plan.not_considered, num_running, config).removeprefix(
                "because "
            )
        for request in islice(scheduler.queue, MAX_ROWS):  # `walk` would sort: watching must not
            yield {**_row(request, now, {}), "reason": reasons.get(request, behind)}


def _in_flight(scheduler: Scheduler) -> dict[Request, int]:
    """Requests whose prompt the running step computes: tokens that were computed before it."""
    computed: dict[Request, int] = {}
    for plan in scheduler.in_flight:
        for chunk in plan.chunks:
            computed.setdefault(chunk.request, chunk.start)
    return computed


def _seated(admission: Admission) -> str:
    request, num_cached, num_swapped, is_resume = admission
    again = " again" if is_resume else ""
    found = f", {num_cached} of {request.prefill_end} tokens from the cache" if num_cached else ""
    back = f", {num_swapped} tokens back from the host" if num_swapped else ""
    return f"{request.id} is seated{again}{found}{back}"


def _row(request: Request, now: float, in_flight: dict[Request, int]) -> dict[str, Any]:
    computed = in_flight.get(request)
    return {
        "id": request.id, "prompt": request.num_prompt,
        "state": request.state.value if computed is None else "prefill",
        "computed": min(request.num_computed if computed is None else computed, request.num_prompt),
        "output": request.num_generated, "most": request.limit - request.num_prompt,
        "blocks": len(request.kv.blocks), "client": request.params.client,
        "priority": request.params.priority, "preemptions": request.history.num_preemptions,
        "age": now - request.arrival,
    }  # fmt: skip
