"""The running engine at a glance: who runs and waits, rates of the last minute, last decisions.

Follows the step reports and makes snapshots, both on the engine's thread; who serves and draws
them is elsewhere. Prompts and texts are never part of a snapshot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from headway import __version__
from headway.engine.engine import Engine
from headway.engine.explain import BEHIND, SENTENCES
from headway.plan import Admission, Plan, StepReport
from headway.request import Request
from headway.server.lives import Happened

Snapshot = dict[str, Any]
NUM_SECONDS = 60  # of history
RATE_SECONDS = 5  # that a rate is taken over
NUM_DECISIONS = 32
MOST_ROWS = 64  # requests listed of those running, and of those waiting
RATES = ("output_tokens", "prompt_tokens", "requests", "preemptions", "steps")


class Live:
    """The last minute by seconds, and the last decisions in words."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._started = engine.clock.now()
        self._seconds: deque[tuple[int, Counter[str]]] = deque(maxlen=NUM_SECONDS + 1)
        self._totals: Counter[str] = Counter()
        self._decisions: deque[tuple[int, str, str]] = deque(maxlen=NUM_DECISIONS)
        self._waits: dict[Request | None, str] = {}  # what was last said of who waits

    def follow(self, report: StepReport, happened: Happened) -> None:
        """Take note of a step."""
        plan, second = report.plan, int(happened.now)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        counts = self._seconds[-1][1]
        counts["steps"] += plan.step >= 0
        counts["output_tokens"] += happened.num_output
        if plan.admitted or plan.chunks or plan.preempted or happened.ended:
            counts["prompt_tokens"] += happened.num_prompt
            counts["requests"] += len(happened.ended)
            counts["preemptions"] += len(plan.preempted)
            counts["firsts"] += len(happened.firsts)
            counts["ttft_us"] += int(1e6 * sum(happened.firsts))
            self._totals["requests"] += len(happened.ended)
            self._note(report)
        elif plan.blocked or plan.behind:
            self._decisions += ((plan.step, "waits", words) for words in self._waiting(plan))
        self._totals["output_tokens"] += happened.num_output

    # The latest decisions, in words.

    def _note(self, report: StepReport) -> None:
        plan, said = report.plan, self._decisions
        for request, is_swap, num_lost, _ in plan.preempted[-NUM_DECISIONS:]:
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
        """Who waits for something else than before."""
        limit = self._engine.scheduler.config.max_requests
        for request, reason, need, have in plan.blocked:
            if self._waits.get(request) != reason and not request.is_finished:
                self._waits[request] = reason
                why = SENTENCES[reason].format(need=need, have=have, limit=limit)
                yield f"{request.id} waits: {why}"
        behind = plan.behind
        if behind is None:
            self._waits.pop(None, None)
        elif self._waits.get(None) != behind.reason:
            self._waits[None] = behind.reason
            why = BEHIND.get(behind.reason, behind.reason).format(limit=limit)
            yield f"{behind.num_requests} in the queue wait {why}"

    # The picture.

    def snapshot(self) -> Snapshot:
        """How things stand, as plain data; on the engine's thread."""
        engine, now = self._engine, self._engine.clock.now()
        scheduler, config = engine.scheduler, engine.scheduler.config
        host = scheduler.kv.host
        return {
            "model": self._model_name, "version": __version__, "uptime": now - self._started,
            "fault": engine.fault, "why": engine.why(), "step": scheduler.last_plan.step,
            "seats": {"taken": len(scheduler.running), "limit": config.max_requests},
            "blocks": {
                "held": config.num_blocks - scheduler.num_free, "total": config.num_blocks,
                "size": config.block_size, "host_held": config.num_host_blocks - host.num_free,
                "host_total": config.num_host_blocks,
            },
            "num_running": len(scheduler.running), "num_waiting": len(scheduler.queue),
            "num_swapped": len(scheduler.swapped),
            "running": [_row(r, now) for r in islice(scheduler.running, MOST_ROWS)],
            "waiting": list(self._queue(now)),
            "rates": self._rates(now), "history": self._history(now), "totals": dict(self._totals),
            "decisions": [{"step": s, "kind": k, "words": w} for s, k, w in self._decisions],
        }  # fmt: skip

    def _queue(self, now: float) -> Iterator[dict[str, Any]]:
        scheduler = self._engine.scheduler
        plan, limit = scheduler.last_plan, scheduler.config.max_requests
        reasons = {
            b.request: SENTENCES[b.reason].format(need=b.need, have=b.have, limit=limit)
            for b in plan.blocked
        }
        behind = "the next step looks at it"
        if plan.behind:
            behind = BEHIND.get(plan.behind.reason, plan.behind.reason).format(limit=limit)
            behind = behind.removeprefix("because ")
        for request in islice(scheduler.queue, MOST_ROWS):  # `walk` would sort: watching must not
            yield {**_row(request, now), "reason": reasons.get(request, behind)}

    def _rates(self, now: float) -> dict[str, float]:
        """A second's worth, over the last whole seconds."""
        last = int(now)
        spent = max(1.0, min(RATE_SECONDS, last - int(self._started)))
        recent = [counts for second, counts in self._seconds if 0 < last - second <= RATE_SECONDS]
        rates = {name: sum(counts[name] for counts in recent) / spent for name in RATES}
        num_firsts = sum(counts["firsts"] for counts in recent)
        ttft = sum(counts["ttft_us"] for counts in recent) / 1e6 / max(1, num_firsts)
        return {**rates, "ttft": ttft}

    def _history(self, now: float) -> dict[str, list[float | None]]:
        """The last minute, oldest first; times to first token only where there were any."""
        by_second = dict(self._seconds)
        nothing: Counter[str] = Counter()
        last = [by_second.get(int(now) - ago, nothing) for ago in range(NUM_SECONDS, 0, -1)]
        return {
            "output_tokens": [counts["output_tokens"] for counts in last],
            "ttft": [c["ttft_us"] / 1e6 / c["firsts"] if c["firsts"] else None for c in last],
        }


def _seated(admission: Admission) -> str:
    request, num_cached, num_swapped, is_resume = admission
    again = " again" if is_resume else ""
    found = f", {num_cached} of {request.prefill_end} tokens from the cache" if num_cached else ""
    back = f", {num_swapped} tokens back from the host" if num_swapped else ""
    return f"{request.id} is seated{again}{found}{back}"


def _row(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.id, "state": request.state.value, "prompt": request.num_prompt,
        "computed": min(request.num_computed, request.num_prompt),
        "output": request.num_generated, "most": request.limit - request.num_prompt,
        "blocks": len(request.held.blocks), "client": request.params.client,
        "priority": request.params.priority, "preemptions": request.history.num_preemptions,
        "age": now - request.arrival,
    }  # fmt: skip
