"""The wording of every decision: the only module that puts decisions into sentences.

`Engine.why()`, the live page, `headway top`, the view of `headway run`, replay and diff print these
sentences. The functions take plain values, because a decision comes from a plan or from a trace
line. Each number in a sentence is a number of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from headway.config import Config
from headway.observe.trace import Line
from headway.plan import Plan, StepReport
from headway.record.packing import num_packed
from headway.request import Request
from headway.scheduler import Scheduler

Kind = Literal["preempted", "admitted", "waiting", "deferred", "copied", "finished"]
MAX_LISTED = 5  # blocked requests that `explain` lists
MAX_EACH = 32  # decisions of one kind that the log takes from one step
NEXT_STEP = "the next step considers it"
BLOCKED = {
    "token_budget": "it needs {need} tokens of the step's budget; {have} left",
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


def arrived(id: str, num_prompt: int) -> str:
    """A request enters the queue."""
    return f"request {id} arrives with {_count(num_prompt, 'prompt token')}"


def admitted(id: str, num_cached: int, num_swapped: int, is_resume: bool) -> str:
    """A waiting request starts to run."""
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
    id: str,
    is_swap: bool,
    num_lost: int,
    is_priority: bool,
    step: int,
    short: tuple[int, int] = (0, 0),
    alternatives: Alternatives | None = None,
    discards: bool = False,
) -> str:
    """A running request goes back to the queue. Step -1 reports preemptions after a failure.

    `short` has the blocks that decodes needed and those that were free.
    """
    cause = "a step failed" if step < 0 else "KV blocks ran out"
    if is_priority:
        cause = "a request with a higher priority waits"
    if short[0]:
        cause += f" (decodes needed {short[0]}, {short[1]} free)"
    fate = "swapped out" if is_swap else "to recompute"
    fate += ", output discarded" if discards else ""
    text = f"request {id} is preempted because {cause}, {_count(num_lost, 'token')} {fate}"
    if alternatives is None:
        return text
    rule, num_candidates, seconds = alternatives
    text += f"; chosen by {rule} among {num_candidates}"
    if seconds:
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


def deferred(num_decodes: int) -> str:
    """Decodes are left out of a step."""
    return f"{_count(num_decodes, 'decode')} deferred: the token budget of the step was used up"


def copied(num_out: int, num_in: int) -> str:
    """KV blocks are copied between the device and the host."""
    counts = ((num_out, "to the host"), (num_in, "from the host"))
    return ", ".join(f"{_count(n, 'KV block')} copied {way}" for n, way in counts if n)


def reset(is_all: bool) -> str:
    """The cached content is forgotten."""
    return "a step failed: all KV blocks are forgotten" if is_all else "the prefix cache is reset"


def computed(id: str, start: int, end: int) -> str:
    """A step computes a chunk of a request."""
    return f"request {id} computes tokens [{start}, {end})"


def decoded(num_decodes: int, num_steps: int) -> str:
    """Requests decode in a step."""
    often = f" {num_steps} times" if num_steps > 1 else ""
    verb = "decodes" if num_decodes == 1 else "decode"
    return f"{_count(num_decodes, 'request')} {verb}{often}"


def finished(id: str, num_output: int, reason: str | None, *, is_pooling: bool = False) -> str:
    """A request ends."""
    result = _count(num_output, "token")
    if is_pooling:
        result = "its embedding" if num_output else "no embedding"
    return f"request {id} finished with {result} ({reason})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# All decisions of a step.


class Decision(NamedTuple):
    """One decision of a step, in a sentence."""

    step: int
    kind: Kind
    text: str


NO_DECISIONS: list[Decision] = []


class DecisionLog:
    """Describes the decisions of a live run in sentences. A reason to wait is reported when it changes."""

    def __init__(self, config: Config) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._waits: dict[Request | None, str] = {}  # the last reason of each waiting request
        self._has_deferred = False

    def follow(self, report: StepReport) -> list[Decision]:
        """The decisions of the next step, at most 32 of a kind, except reasons to wait."""
        plan, events = report.plan, report.plan.events
        changes = plan.admitted or events.preempted or report.finished
        if changes or plan.deferred or plan.copies_in or self._has_deferred:
            return list(self._changes(report))
        if plan.blocked or plan.not_considered or self._waits:
            return list(self._waiting(plan))
        return NO_DECISIONS

    def _changes(self, report: StepReport) -> Iterator[Decision]:
        plan, events = report.plan, report.plan.events
        for event in events.preempted[-MAX_EACH:]:
            text = preempted(
                event.request.id, event.is_swap, event.num_lost, event.is_priority, plan.step,
                discards=event.is_discard,
            )  # fmt: skip
            yield Decision(plan.step, "preempted", text)
        for request, num_cached, num_swapped, is_resume, *_ in plan.admitted[-MAX_EACH:]:
            text = admitted(request.id, num_cached, num_swapped, is_resume)
            yield Decision(plan.step, "admitted", text)
        yield from self._waiting(plan)
        if plan.deferred and not self._has_deferred:
            yield Decision(plan.step, "deferred", deferred(len(plan.deferred)))
        self._has_deferred = bool(plan.deferred)
        if plan.copies_out or plan.copies_in:
            text = copied(len(plan.copies_out), len(plan.copies_in))
            yield Decision(plan.step, "copied", text)
        for request in report.finished[-MAX_EACH:]:
            yield Decision(plan.step, "finished", self.finished(request))
        for request in (*(a.request for a in plan.admitted), *report.finished):
            self._waits.pop(request, None)

    def finished(self, request: Request) -> str:
        """The sentence for a request that has finished."""
        is_pooling = request.params.pooling is not None
        num_output, reason = request.num_generated, request.finish_reason
        return finished(request.id, num_output, reason, is_pooling=is_pooling)

    def _waiting(self, plan: Plan) -> Iterator[Decision]:
        """Requests whose reason to wait has changed."""
        for request, reason, need, have in plan.blocked:
            if self._waits.get(request) != reason and not request.is_finished:
                self._waits[request] = reason
                yield Decision(plan.step, "waiting", waits(request.id, reason, need, have))
        rest = plan.not_considered
        if rest is None:
            self._waits.pop(None, None)
        elif self._waits.get(None) != rest.reason:
            self._waits[None] = rest.reason
            text = not_considered(*rest, self._max_num_seqs)
            yield Decision(plan.step, "waiting", text)


def sentences_of(line: Line, max_num_seqs: int) -> Iterator[str]:
    """All decisions of one trace line, in sentences."""
    for id, how, num_lost, is_priority in line.get("preempted", ()):
        is_swap, discards = how == "swap", how == "discard"
        yield preempted(id, is_swap, num_lost, bool(is_priority), line["step"], discards=discards)
    if line.get("reset"):
        yield reset(bool(line["reset"][1]))
    for id, num_cached, num_swapped, is_resume in line.get("admitted", ()):
        yield admitted(id, num_cached, num_swapped, bool(is_resume))
    for id, start, end, _ in line.get("chunks", ()):
        yield computed(id, start, end)
    yield decoded(line["decodes"], line.get("num_steps", 1))
    if line.get("deferred"):
        yield deferred(len(line["deferred"]))
    if line.get("copied_out") or line.get("copied_in"):
        yield copied(line.get("copied_out", 0), line.get("copied_in", 0))
    for id, reason, need, have in line.get("blocked", ()):
        yield waits(id, reason, need, have)
    if line.get("not_considered"):
        reason, count = line["not_considered"]
        yield not_considered(reason, count, max_num_seqs)
    for end in line.get("finished", ()):
        yield finished(end["id"], num_packed(end["output"]), end["finish_reason"])


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
        f"last progress {seconds_since_progress:.3f} s ago."
    )


def _waiting(scheduler: Scheduler) -> list[str]:
    plan = scheduler.last_plan
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
