"""Why is nothing moving? The scheduler's state and its latest decisions, in sentences."""

from __future__ import annotations

from collections import Counter

from headway.plan import Blocked
from headway.scheduler import Scheduler

SENTENCES = {
    "seats": "all {limit} seats are taken",
    "kept seats": "{have} of {limit} seats are free, and kept for clients that hold few",
    "tokens": "it wants {need} tokens and {have} are left of the step's budget",
    "blocks": "it needs {need} free KV blocks and {have} are free",
    "headroom": "admission must leave blocks free: it asks for {need} and {have} are free",
    "order": "it waits for the sample that computes its prompt",
    "back-off": "preemptions were recent: admission asks for {need} blocks and {have} are free",
}
BEHIND = {
    "seats": "because all {limit} seats are taken",
    "tokens": "because the step's token budget is used up",
    "back-off": "because this step had to preempt, so nobody is admitted",
    "order": "behind those above, in the queue's order",
}
MOST_LISTED = 5


def explain(scheduler: Scheduler, num_in_flight: int, idle: float, fault: str | None) -> str:
    """A few lines that say who runs, who waits and for what."""
    lines = []
    if fault:
        lines.append(f"The latest step failed: {fault}")
    if not scheduler.requests:
        lines.append("Nothing to do: no request is waiting or running.")
        return "\n".join(lines)
    lines += _running(scheduler, num_in_flight, idle) + _waiting(scheduler)
    return "\n".join(lines)


def _running(scheduler: Scheduler, num_in_flight: int, idle: float) -> list[str]:
    config, kv = scheduler.config, scheduler.kv
    states = Counter(request.state.value for request in scheduler.running)
    running = ", ".join(f"{count} in {state}" for state, count in sorted(states.items()))
    used = config.num_blocks - kv.num_free
    return [
        f"{len(scheduler.running)} of {config.max_requests} seats taken"
        + (f" ({running})" if running else "")
        + f"; {used} of {config.num_blocks} KV blocks held, {kv.num_free} free"
        + f"; {num_in_flight} plan(s) in flight; last progress {idle:.3f} s ago.",
    ]


def _waiting(scheduler: Scheduler) -> list[str]:
    plan, limit = scheduler.last_plan, scheduler.config.max_requests
    if not scheduler.queue:
        return ["Nobody waits."]
    lines = [f"{len(scheduler.queue)} waiting ({len(scheduler.swapped)} of them swapped out)."]
    still = [b for b in plan.blocked if b.request.id in scheduler.requests and b.request.row < 0]
    for blocked in still[:MOST_LISTED]:
        lines.append(f"  {blocked.request.id}: {_sentence(blocked, limit)}.")
    if len(still) > MOST_LISTED:
        lines.append(f"  and {len(still) - MOST_LISTED} more that were looked at.")
    if plan.behind:
        reason = BEHIND.get(plan.behind.reason, plan.behind.reason).format(limit=limit)
        lines.append(f"  {plan.behind.num_requests} more wait {reason}.")
    if not still and not plan.behind:
        lines.append("  They came after the latest plan was made; the next step looks at them.")
    return lines


def _sentence(blocked: Blocked, limit: int) -> str:
    is_kept = blocked.reason == "seats" and blocked.have > 0
    reason = "kept seats" if is_kept else blocked.reason
    return SENTENCES[reason].format(need=blocked.need, have=blocked.have, limit=limit)
