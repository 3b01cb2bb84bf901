"""Why is nothing moving? The scheduler's state and its latest decisions, in sentences.

The only place that words why a request waits: `why()`, the live page, `headway top` and the
terminal view all use `why_blocked` and `why_not_considered`.
"""

from __future__ import annotations

from collections import Counter

from headway.config import Config
from headway.plan import Blocked, NotConsidered
from headway.scheduler import Scheduler

SENTENCES = {
    "token_budget": "it wants {need} token{s} and {have} are left of the step's budget",
    "blocks": "it needs {need} free KV block{s} and {have} are free",
    "headroom": "admission must leave blocks free: it asks for {need} and {have} are free",
    "order": "it waits for the sample that computes its prompt",
    "back_off": "preemptions were recent: admission asks for {need} block{s} and {have} are free",
}
UNSETTLED = "it was just preempted and can be admitted again after the running step"
BEHIND = {
    "token_budget": "because the step's token budget is used up",
    "back_off": "because this step had to preempt, so nobody is admitted",
    "order": "behind those above, in the queue's order",
}
MAX_LISTED = 5


def why_blocked(blocked: Blocked, num_running: int, config: Config) -> str:
    """Why a request that was considered was not admitted, with `num_running` requests running.

    Pass the plan's own count for the time of the plan, or the scheduler's for the present.
    """
    if blocked.reason == "max_num_seqs":
        return _why_seats(num_running, config.max_num_seqs, is_kept=blocked.have > 0)
    # Only a request with a token in flight has these numbers: they are not numbers of blocks.
    is_unsettled = blocked.request.history.num_preemptions and blocked[2:] == (1, 0)
    if blocked.reason == "back_off" and is_unsettled:
        return UNSETTLED
    plural = "" if blocked.need == 1 else "s"
    return SENTENCES[blocked.reason].format(need=blocked.need, have=blocked.have, s=plural)


def why_not_considered(behind: NotConsidered, num_running: int, config: Config) -> str:
    """Why the requests that were not considered wait; follows the word `wait` in a sentence."""
    if behind.reason == "max_num_seqs":
        return f"because {_why_seats(num_running, config.max_num_seqs, is_kept=False)}"
    return BEHIND.get(behind.reason, f"because of {behind.reason}")


def _why_seats(num_running: int, limit: int, *, is_kept: bool) -> str:
    """Names all seats as taken only if they are: requests may have ended since the plan."""
    if num_running >= limit:
        return f"all {limit} seats are taken"
    if is_kept:
        free = limit - num_running
        return f"{free} of {limit} seats are free, and kept for clients that hold few"
    return f"all {limit} seats were taken when the step was planned"


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
        f"{len(scheduler.running)} of {config.max_num_seqs} seats taken"
        + (f" ({running})" if running else "")
        + f"; {used} of {config.num_blocks} KV blocks held, {kv.num_free} free"
        + f"; {num_in_flight} plan(s) in flight; last progress {idle:.3f} s ago.",
    ]


def _waiting(scheduler: Scheduler) -> list[str]:
    plan, config, num_running = scheduler.last_plan, scheduler.config, len(scheduler.running)
    if not scheduler.queue:
        return ["Nobody waits."]
    lines = [f"{len(scheduler.queue)} waiting ({len(scheduler.swapped)} of them swapped out)."]
    still = [b for b in plan.blocked if b.request.id in scheduler.requests and b.request.row < 0]
    for blocked in still[:MAX_LISTED]:
        lines.append(f"  {blocked.request.id}: {why_blocked(blocked, num_running, config)}.")
    if len(still) > MAX_LISTED:
        lines.append(f"  and {len(still) - MAX_LISTED} more that were looked at.")
    if plan.not_considered:
        reason = why_not_considered(plan.not_considered, num_running, config)
        lines.append(f"  {plan.not_considered.num_requests} more wait {reason}.")
    if not still and not plan.not_considered:
        lines.append("  They came after the latest plan was made; the next step looks at them.")
    return lines
