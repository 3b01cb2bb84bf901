"""The wording of every decision: the only module that puts decisions into sentences.

`Engine.why()`, the live page, `headway top`, the view of `headway run`, replay and diff print these
sentences. Each number in a sentence is a number of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from headway.events import Added, Completed, Event, Failed, Planned, Reset, ended_by, preempted_by
from headway.plan import Plan, Preemption
from headway.request import Request
from headway.scheduler import Scheduler

Kind = Literal[
    "arrived", "reset", "preempted", "admitted", "waiting", "deferred", "copied", "finished"
]  # fmt: skip
NO_BLOCKS = "KV blocks ran out"
MAX_LISTED = 5  # blocked requests that `explain` lists
MAX_EACH = 32  # decisions of one kind that the log takes from one step
NEXT_STEP = "the next step considers it"
BLOCKED = {
    "token_budget": "it needs {need} tokens of the step; there is room for {have}",
    "blocks": "it needs {need} free KV blocks; {have} available",
    "window_blocks": "it needs {need} free KV blocks of the sliding-window layers; {have} available",
    "headroom": "it needs {need} free KV blocks including headroom; {have} available",
    "back_off": "after recent preemptions it needs {need} free KV blocks; {have} available",
    "reserved_rows": "it needs {need} free rows; {have} are free and reserved for "
    "clients with fewer running requests",
    "just_preempted": "it was just preempted; it can be admitted after the current step",
    "parent": "another sample of the request computes the shared prompt first",
}
NOT_CONSIDERED = {
    "max_num_seqs": "the limit of {limit} running requests (max_num_seqs) was reached",
    "token_budget": "the token budget of the step was used up",
    "after_preemption": "the step preempted a request, so it admitted none",
    "behind_blocked": "blocked requests are ahead in the queue",
    "not_reached": "the step did not reach this part of the queue",
}


# One sentence for each decision.


def admitted(id: str, num_cached: int, num_swapped: int, is_resume: bool) -> str:
    parts = [f"request {id} is admitted{' again' if is_resume else ''}"]
    if num_cached:
        parts.append(f"{_count(num_cached, 'token')} from the prefix cache")
    if num_swapped:
        parts.append(f"{_count(num_swapped, 'token')} swapped in")
    return ", ".join(parts)


class Alternatives(NamedTuple):
    """What the scheduler compared when it preempted a request."""

    victim_rule: str
    num_candidates: int
    seconds: tuple[float, float] | None = None  # to swap out and in, and to recompute


def preempted(
    preemption: Preemption,
    alternatives: Alternatives | None = None,
    cause: str = NO_BLOCKS,
) -> str:
    if preemption.is_priority:
        cause = "a request with a higher priority waits"
    if preemption.num_due:
        cause += f" (decodes needed {preemption.num_due}, {preemption.num_free} free)"
    fate = "swapped out" if preemption.is_swap else "to recompute"
    fate += ", output discarded" if preemption.is_discard else ""
    lost = _count(preemption.num_lost, "token")
    text = f"request {preemption.request.id} is preempted because {cause}, {lost} {fate}"
    if alternatives is None:
        return text
    text += f"; chosen by {alternatives.victim_rule} among {alternatives.num_candidates}"
    if seconds := alternatives.seconds:
        text += (
            f"; swapping takes {_milliseconds(seconds[0])}, recomputing {_milliseconds(seconds[1])}"
        )
    return text


def why_blocked(reason: str, need: int, have: int) -> str:
    """Why a request that a step considered was not admitted."""
    text = BLOCKED[reason].format(need=need, have=have)
    return text.replace(" tokens", " token").replace(" blocks", " block") if need == 1 else text


def why_not_considered(reason: str, max_num_seqs: int) -> str:
    """Why a step did not consider the rest of the queue."""
    return NOT_CONSIDERED[reason].format(limit=max_num_seqs)


def waits(
    id: str, reason: str, need: int, have: int, headroom: int | None = None, rule: str = ""
) -> str:
    """A considered request stays in the queue. `headroom` is the part of `need` that `rule` adds."""
    text = f"request {id} waits: {why_blocked(reason, need, have)}"
    if headroom is not None and reason in ("headroom", "back_off"):
        text += f" ({need - headroom} for its tokens, {headroom} by {rule})"
    return text


def not_considered(reason: str, num_requests: int, max_num_seqs: int) -> str:
    """The rest of the queue stays in the queue."""
    why = why_not_considered(reason, max_num_seqs)
    were = "was" if num_requests == 1 else "were"
    return f"{_count(num_requests, 'queued request')} {were} not considered: {why}"


def computed(id: str, start: int, end: int) -> str:
    return f"request {id} computes tokens [{start}, {end})"


def decoded(num_decodes: int, num_steps: int) -> str:
    often = f" {num_steps} times" if num_steps > 1 else ""
    verb = "decodes" if num_decodes == 1 else "decode"
    return f"{_count(num_decodes, 'request')} {verb}{often}"


def drafted(id: str, start: int, num_drafts: int) -> str:
    return f"request {id} verifies {_count(num_drafts, 'draft')} after token {start}"


def accepted(id: str, num_drafts: int, num_accepted: int) -> str:
    return f"{_count(num_drafts, 'draft')} for request {id}, {num_accepted} accepted"


def finished(request: Request) -> str:
    num_output = request.num_generated
    result = _count(num_output, "token")
    if request.params.pooling is not None:
        result = "its embedding" if num_output else "no embedding"
    return f"request {request.id} finished with {result} ({request.finish_reason})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# All decisions of an event.


class Decision(NamedTuple):
    """One decision, in a sentence."""

    step: int  # -1: not of a plan
    kind: Kind
    text: str
    request: Request | None = None


NO_DECISIONS: list[Decision] = []


def decisions_of(event: Event, max_num_seqs: int) -> Iterator[Decision]:
    step, cause = -1, NO_BLOCKS
    if isinstance(event, Planned | Completed):
        step = event.plan.step
    elif isinstance(event, Added):
        for request in event.requests:
            num_prompt = _count(request.num_prompt, "prompt token")
            text = f"request {request.id} arrives with {num_prompt}"
            yield Decision(step, "arrived", text, request)
    elif isinstance(event, Reset):
        cause = "the prefix cache was reset"
        yield Decision(step, "reset", "the prefix cache is reset")
    elif isinstance(event, Failed):
        cause = "a step failed"
        yield Decision(step, "reset", "a step failed: all KV blocks are forgotten")
    for preemption in preempted_by(event)[-MAX_EACH:]:
        text = preempted(preemption, cause=cause)
        yield Decision(step, "preempted", text, preemption.request)
    if isinstance(event, Planned):
        yield from _planned(event.plan, max_num_seqs)
    for request in ended_by(event)[-MAX_EACH:]:
        yield Decision(step, "finished", finished(request), request)


def _planned(plan: Plan, max_num_seqs: int) -> Iterator[Decision]:
    for request, num_cached, num_swapped, is_resume, *_ in plan.admitted[-MAX_EACH:]:
        text = admitted(request.id, num_cached, num_swapped, is_resume)
        yield Decision(plan.step, "admitted", text, request)
    for request, reason, need, have in plan.blocked:
        text = waits(request.id, reason, need, have)
        yield Decision(plan.step, "waiting", text, request)
    if plan.not_considered:
        yield Decision(plan.step, "waiting", not_considered(*plan.not_considered, max_num_seqs))
    if plan.deferred:
        num_decodes = _count(len(plan.deferred), "decode")
        text = f"{num_decodes} deferred: the token budget of the step was used up"
        yield Decision(plan.step, "deferred", text)
    copies = ((plan.copies_out, "to the host"), (plan.copies_in, "from the host"))
    if texts := [f"{_count(len(each), 'KV block')} copied {way}" for each, way in copies if each]:
        yield Decision(plan.step, "copied", ", ".join(texts))


class DecisionLog:
    """The decisions of a run in sentences. A reason to wait is given when it changes."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._waits: dict[Request | None, str] = {}  # the latest reason of each waiting request
        self._has_deferred = False

    def follow(self, event: Event) -> list[Decision]:
        """The decisions of the next event, at most 32 of a kind, except reasons to wait."""
        if isinstance(event, Planned):
            return self._plan(event)
        if isinstance(event, Completed) and not event.finished:
            return NO_DECISIONS
        return list(decisions_of(event, self._max_num_seqs))

    def _plan(self, event: Planned) -> list[Decision]:
        plan, before = event.plan, self._waits
        copies = plan.copies_out or plan.copies_in
        changes = plan.admitted or plan.preempted or plan.deferred or copies
        if not (changes or plan.blocked or plan.not_considered or before or self._has_deferred):
            return NO_DECISIONS
        rest = {None: plan.not_considered.reason} if plan.not_considered else {}
        blocked = {each.request: each.reason for each in plan.blocked}
        admitted = {each.request for each in plan.admitted}
        kept = {r: reason for r, reason in before.items() if r is not None and r not in admitted}
        self._waits = {r: why for r, why in kept.items() if not r.is_finished} | blocked | rest
        had_deferred, self._has_deferred = self._has_deferred, bool(plan.deferred)
        if not changes and self._waits == before:
            return NO_DECISIONS
        return [
            each for each in decisions_of(event, self._max_num_seqs)
            if (each.kind != "waiting" or before.get(each.request) != self._waits[each.request])
            and (each.kind != "deferred" or not had_deferred)
        ]  # fmt: skip


# The present state.


def explain(
    scheduler: Scheduler, num_in_flight: int, seconds_since_progress: float, fault: str | None
) -> str:
    """A few lines: how many requests run, which ones wait, and why."""
    lines = [f"The latest step failed: {fault}"] if fault else []
    if not scheduler.requests:
        return "\n".join([*lines, "No requests are running or waiting."])
    lines.append(_running(scheduler, num_in_flight, seconds_since_progress))
    return "\n".join([*lines, *_waiting(scheduler)])


def _running(scheduler: Scheduler, num_in_flight: int, seconds_since_progress: float) -> str:
    config, num_free = scheduler.config, scheduler.num_free
    states = Counter(request.state.value for request in scheduler.running)
    states_text = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return (
        f"{len(scheduler.running)} of {config.max_num_seqs} requests running"
        + (f" ({states_text})" if states_text else "")
        + f"; {config.num_blocks - num_free} of {config.num_blocks} KV blocks in use, "
        f"{num_free} free; {_count(num_in_flight, 'plan')} in flight; "
        f"{_drafts(scheduler)}last progress {seconds_since_progress:.3f} s ago."
    )


def _drafts(scheduler: Scheduler) -> str:
    """The drafts of running requests so far; "" without any."""
    histories = [request.history for request in scheduler.running]
    num_drafted = sum(history.num_drafted for history in histories)
    num_accepted = sum(history.num_accepted for history in histories)
    return f"{_count(num_drafted, 'draft')} for them, {num_accepted} accepted; " * (num_drafted > 0)


def _waiting(scheduler: Scheduler) -> list[str]:
    plan = scheduler.last_planned.plan
    if not scheduler.queue:
        return ["No requests waiting."]
    lines = [f"{len(scheduler.queue)} waiting, {len(scheduler.swapped)} of them swapped out."]
    still = [b for b in plan.blocked if b.request.id in scheduler.requests and b.request.row < 0]
    lines += [f"  {waits(b.request.id, *b[1:])}." for b in still[:MAX_LISTED]]
    if len(still) > MAX_LISTED:
        lines.append(f"  Considered and not admitted: {len(still) - MAX_LISTED} more.")
    if rest := plan.not_considered:
        lines.append(f"  {not_considered(*rest, scheduler.config.max_num_seqs)}.")
    elif not still:
        lines.append("  They arrived after the latest plan; the next step considers them.")
    return lines
